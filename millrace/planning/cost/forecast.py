"""How does one method run? The planner's plan of its visits, and the step that it comes to on the lanes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from millrace.planning.cost.collectives import changes, gather_seconds, pass_on_seconds, reduce_seconds, visit_seconds
from millrace.planning.cost.floors import Floors, floors_of
from millrace.planning.cost.hardware import Hardware
from millrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from millrace.planning.cost.step import StepForecast, forecast_step
from millrace.planning.cost.tiers import Tiers, block_seconds, leaving_layers, recompute_seconds, tiers_of
from millrace.planning.cost.traffic import BlockTraffic
from millrace.planning.cost.work import Activations, Method, Place, Spread, Training, Work
from millrace.planning.plan import Plan
from millrace.planning.planner import make_plan
from millrace.planning.problem import Problem
from millrace.planning.visit import Phase, Visit

__all__ = ["Run", "run_of", "tiers_and_floors"]

T = TypeVar("T")

_PLANNED_MICRO_BATCHES = 2  # more are counted from the difference between one and two


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method on one machine: what it holds, its floors, the plan of its visits and one step of it.

    `step` is one of at most two micro-batches; `seconds` counts all of them, and the bubbles of a pipeline.
    """

    method: Method
    tiers: Tiers
    floors: Floors
    visits: Plan
    step: StepForecast
    seconds: float

    @property
    def efficiency(self) -> float:
        """Compute alone over the step."""
        return self.floors.compute_seconds / self.seconds if self.seconds else 1.0

    @property
    def resident_fraction(self) -> float:
        """Of the weights' bytes, what stays on the device."""
        problem = self.visits.problem
        return sum(problem.block_bytes[b] for b in self.visits.kept) / max(1, sum(problem.block_bytes))


def tiers_and_floors(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    method: Method,
    hardware: Hardware,
    streaming_bytes: int | None = None,
) -> tuple[Tiers, Floors]:
    """What a method holds and its floors, before anything is planned."""
    tiers = tiers_of(shape, work, spread, method, hardware, streaming_bytes)
    return tiers, floors_of(shape, work, spread, method, hardware, tiers.streaming_bytes)


def run_of(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    method: Method,
    hardware: Hardware,
    streaming_bytes: int | None = None,
) -> Run:
    """The forecast of one method; `shape` is one device's part. The method must fit (`Tiers.fits`)."""
    tiers, floors = tiers_and_floors(shape, work, spread, method, hardware, streaming_bytes)
    share = _share_of(hardware)
    count = min(work.micro_batches, _PLANNED_MICRO_BATCHES)
    seconds = []
    talking = visit_seconds(shape, work, spread, method, hardware)
    gathers = [gather_seconds(block, spread, hardware) for block in shape.blocks]
    leaving = leaving_layers(shape, work, method)
    traffic = [
        replace(
            _traffic(block, work, spread, method, leaves=index in leaving),
            load_bytes=block.weight_bytes // spread.weight_shards,
            gather_seconds=gather,
            reduce_seconds=reduce_seconds(block, work, spread, hardware),
            pass_on_seconds=pass_on_seconds(block, work, spread, hardware),
        )
        for index, (block, gather) in enumerate(zip(shape.blocks, gathers, strict=True))
    ]
    for batches in {1, count}:
        plan = make_plan(_problem(shape, work, spread, method, share, tiers.streaming_bytes, batches, talking, gathers))
        step = forecast_step(
            plan,
            traffic,
            share,
            overlap=method.overlap,
            closing_seconds=_closing_seconds(shape, work, spread, method, share),
            visit_collectives=_in_order(*talking, work) * batches,
        )
        seconds.append(step.seconds)
    total = seconds[-1] + (work.micro_batches - count) * (seconds[-1] - seconds[0])
    total *= 1 + (spread.pipeline - 1) / work.micro_batches
    return Run(
        method=method,
        tiers=tiers,
        floors=floors,
        visits=plan,
        step=step,
        seconds=max(total, floors.longest),
    )


def _share_of(hardware: Hardware) -> Hardware:
    """One device's share of what the devices of a node share."""
    if hardware.devices == 1:
        return hardware
    count = hardware.devices
    return replace(
        hardware,
        devices=1,
        dram_bytes_per_second=hardware.dram_bytes_per_second / count,
        update_bytes_per_second=hardware.update_bytes_per_second / count,
        host_memory_bytes=hardware.host_memory_bytes // count,
        disk_bytes=hardware.disk_bytes // count,
        disk_read_bytes_per_second=hardware.disk_read_bytes_per_second / count,
        disk_write_bytes_per_second=hardware.disk_write_bytes_per_second / count,
    )


def _problem(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    method: Method,
    share: Hardware,
    streaming_bytes: int,
    batches: int,
    talking: tuple[list[float], list[float]],
    gathers: list[float],
) -> Problem:
    """The visits of one step of `batches` micro-batches, and what the planner may hold of the blocks."""
    blocks = shape.blocks
    sizes = tuple(block.weight_bytes for block in blocks)
    forward, backward = [], []
    for index, block in enumerate(blocks):
        ahead, back = block_seconds(block, work, share)
        again = recompute_seconds(block, work, method, ahead)
        uses = (index, 0) if shape.tied and block.kind is BlockKind.HEAD and len(blocks) > 1 else (index,)
        heard = talking[0][index], talking[1][index]
        forward.append(Visit(blocks=uses, phase=Phase.FORWARD, compute_seconds=ahead + heard[0]))
        backward.append(Visit(blocks=uses, phase=Phase.BACKWARD, compute_seconds=back + again + heard[1]))
    all_blocks = frozenset(range(len(blocks)))
    loads = (_load_seconds(size, gather, spread, method, share) for size, gather in zip(sizes, gathers, strict=True))
    return Problem(
        block_bytes=sizes,
        load_seconds=tuple(loads),
        visits=_in_order(forward, backward, work) * batches,
        budget_bytes=streaming_bytes if method.streamed else sum(sizes),
        residents=frozenset() if method.streamed else all_blocks,
        changing=frozenset(i for i, b in enumerate(blocks) if b.trainable) if changes(work, method) else frozenset(),
    )


def _in_order(forward: list[T], backward: list[T], work: Work) -> tuple[T, ...]:
    """What belongs to each block's visits, in the order of the visits of a micro-batch."""
    return tuple(forward if work.training is Training.NONE else forward + backward[::-1])


def _load_seconds(nbytes: int, gather: float, spread: Spread, method: Method, share: Hardware) -> float:
    """The slowest hop of a block's way to the device: its shard from disk and over the own link, the others' shards."""
    shard = nbytes / spread.weight_shards
    seconds = max(gather, shard / share.onload_bytes_per_second)
    return max(seconds, shard / share.disk_read_bytes_per_second) if method.weights is Place.DISK else seconds


def _traffic(block: BlockShape, work: Work, spread: Spread, method: Method, *, leaves: bool) -> BlockTraffic:
    activations = round(block.activation_bytes(work.tokens)) if leaves else 0
    spills = method.activations is Activations.SPILLED
    shard = block.weight_bytes // spread.weight_shards
    fetched = shard if method.weights is Place.DISK else 0
    if work.training is Training.NONE or method.state is Place.DEVICE or not block.trainable:
        return BlockTraffic(fetch_bytes=fetched, activation_bytes=activations, activations_spill=spills)
    trained = block.trainable // spread.state_shards
    return BlockTraffic(
        gradient_bytes=work.gradient_bytes * block.trainable // spread.gradient_shards,
        update_bytes=float(work.update_bytes * trained),
        norm_bytes=float(work.gradient_bytes * trained) if work.clipped else 0.0,
        state_bytes=round((work.master_bytes + work.state_bytes) * trained) if method.state is Place.DISK else 0,
        fetch_bytes=fetched,
        spill_bytes=fetched if work.training is Training.FULL else 0,
        activation_bytes=activations,
        activations_spill=spills,
    )


def _closing_seconds(shape: ModelShape, work: Work, spread: Spread, method: Method, share: Hardware) -> float:
    """The update on the device, by its memory traffic."""
    if work.training is Training.NONE or method.state is not Place.DEVICE:
        return 0.0
    return work.update_bytes * shape.trainable / spread.state_shards / share.device_bytes_per_second
