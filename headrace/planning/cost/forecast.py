"""How does one method run? The planner's plan of its visits, and the step that it comes to on the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headrace.planning.cost.collectives import (
    changes,
    pass_on_seconds,
    reduce_seconds,
    summed_share,
)
from headrace.planning.cost.experts import cut_of, others_of, pass_loads
from headrace.planning.cost.floors import Floors, device_update_seconds, floors_of
from headrace.planning.cost.hardware import OVER_LINK, Hardware
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.packing import packs, read_share
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from headrace.planning.cost.sharing import Crossing, Sharing, crossing_of, sharing_of
from headrace.planning.cost.step import StepForecast, forecast_step
from headrace.planning.cost.tiers import Tiers, block_seconds, leaving_layers, recompute_seconds, tiers_of
from headrace.planning.cost.traffic import BlockTraffic
from headrace.planning.cost.work import Activations, Method, Place, Spread, Training, Work
from headrace.planning.plan import Plan
from headrace.planning.planner import make_plan
from headrace.planning.problem import Problem
from headrace.planning.visit import Phase, Visit

__all__ = ["SIMULATED_MICRO_BATCHES", "Run", "run_of", "tiers_and_floors"]

T = TypeVar("T")
N = TypeVar("N", int, float)

SIMULATED_MICRO_BATCHES = 2  # more are counted from the difference between one and two


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method on one machine: what it holds, its floors, the plan of its visits and one step of it.

    `step` is simulated with at most two micro-batches, or groups that go together; `seconds`, and `busy_seconds` and
    `moved_bytes` of each lane, count all of them. `sharing`: how
    devices share one copy for each node; None: they do not. `in_use`: lane, or "host memory" -> the share of the step
    for which it would be in use alone; what comes near 1 is what the step is bound by.
    """

    method: Method
    tiers: Tiers
    floors: Floors
    visits: Plan
    step: StepForecast
    seconds: float
    busy_seconds: dict[CostLane, float]
    moved_bytes: dict[CostLane, int]
    sharing: Sharing | None = None
    in_use: dict[str, float] = field(default_factory=dict)

    @property
    def efficiency(self) -> float:
        """Compute alone over the step."""
        return self.floors.compute_seconds / self.seconds if self.seconds else 1.0

    @property
    def resident_fraction(self) -> float:
        """Of the weights' bytes, but for those of experts that come one by one, what stays on the device."""
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
    work = method.grouped(work)
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
    """The forecast of one method. The method must fit (`Tiers.fits`)."""
    tiers, floors = tiers_and_floors(shape, work, spread, method, hardware, streaming_bytes)
    work = method.grouped(work)
    share = _share_of(hardware)
    count = min(work.micro_batches, SIMULATED_MICRO_BATCHES)
    steps = []
    leaving = leaving_layers(shape, work, method)
    packed = packs(shape, work, spread, method, hardware)
    crossings = [crossing_of(block, work, spread, method, hardware) for block in shape.blocks]
    cut = cut_of(shape, work, spread, method, tiers.streaming_bytes)
    visiting = shape.blocks if cut is None else tuple(map(others_of, shape.blocks))
    experts = pass_loads(shape, work, method, share, cut)
    traffic = []
    for index, (block, crossing) in enumerate(zip(visiting, crossings, strict=True)):
        own = replace(
            _traffic(block, work, spread, method, read_share(block) if packed else 1.0, leaves=index in leaving),
            load_bytes=round(method.crossing_share * block.weight_bytes),
            reduce_seconds=reduce_seconds(block, work, spread, hardware),
            pass_on_seconds=pass_on_seconds(block, work, spread, hardware),
            experts=experts[index],
        )
        traffic.append(own if crossing is None else _shared(own, block, work, spread, method, hardware, crossing))
    loads = [_load_seconds(own, share) for own in traffic]
    sizes = tuple(block.weight_bytes for block in visiting)
    room = tiers.streaming_bytes if cut is None else cut.other_room_bytes
    for batches in sorted({1, count}):
        plan = make_plan(_problem(shape, sizes, work, method, share, room, batches, loads))
        step = forecast_step(
            plan,
            traffic,
            share,
            overlap=method.overlap,
            closing_seconds=device_update_seconds(shape, work, spread, method, share),
        )
        steps.append(step)
    total = _of_all([step.seconds for step in steps], work.micro_batches)
    used = _used(steps, work.micro_batches)
    total = max(total, floors.longest, *used.values())
    return Run(
        method=method,
        tiers=tiers,
        floors=floors,
        visits=plan,
        step=step,
        seconds=total,
        busy_seconds=_busy(steps, work.micro_batches, total),
        moved_bytes=_by_lane([one.moved_bytes for one in steps], work.micro_batches),
        sharing=sharing_of(crossings, work, spread, method),
        in_use={name: took / total for name, took in used.items()},
    )


def _of_all(values: Sequence[N], micro_batches: int) -> N:
    """Of all micro-batches, from what it is of one and of two: each further one adds the difference."""
    return values[-1] + (micro_batches - len(values)) * (values[-1] - values[0])


def _by_lane(steps: Sequence[dict[CostLane, N]], micro_batches: int) -> dict[CostLane, N]:
    """The same for each lane."""
    return {lane: _of_all([step[lane] for step in steps], micro_batches) for lane in CostLane}


def _busy(steps: Sequence[StepForecast], micro_batches: int, total: float) -> dict[CostLane, float]:
    """At least what a lane would take alone: what its tasks wait for others differs between one and two."""
    alone = _by_lane([step.alone_seconds for step in steps], micro_batches)
    busy = _by_lane([step.busy_seconds for step in steps], micro_batches)
    return {lane: min(total, max(alone[lane], busy[lane])) for lane in CostLane}


def _used(steps: Sequence[StepForecast], micro_batches: int) -> dict[str, float]:
    """Seconds that each lane, and host memory, would take alone."""
    alone = _by_lane([step.alone_seconds for step in steps], micro_batches)
    used = {lane.value: seconds for lane, seconds in alone.items()}
    used["host memory"] = _of_all([step.dram_seconds for step in steps], micro_batches)
    return used


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
    sizes: tuple[int, ...],
    work: Work,
    method: Method,
    share: Hardware,
    streaming_bytes: int,
    batches: int,
    loads: list[float],
) -> Problem:
    """The visits of one step of `batches` micro-batches, and what the planner may hold of the blocks.

    `sizes`: bytes of the blocks, without experts that come one by one.
    """
    blocks = shape.blocks
    forward, backward = [], []
    for index, block in enumerate(blocks):
        ahead, back = block_seconds(block, work, share)
        again = recompute_seconds(block, work, method, ahead)
        uses = (index, 0) if shape.tied and block.kind is BlockKind.HEAD and len(blocks) > 1 else (index,)
        forward.append(Visit(blocks=uses, phase=Phase.FORWARD, compute_seconds=ahead))
        backward.append(Visit(blocks=uses, phase=Phase.BACKWARD, compute_seconds=back + again))
    all_blocks = frozenset(range(len(blocks)))
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


def _load_seconds(own: BlockTraffic, share: Hardware) -> float:
    """The slowest hop of a block's way to the device: from disk, out of memory, over the own link, from the others."""
    nbytes = own.load_bytes or 0
    on_link = share.link_latency_seconds + nbytes / share.onload_bytes_per_second
    hops = [own.gather_seconds, on_link + own.gather_seconds * own.over_link]
    if own.gathers_at_loads:
        hops.append(nbytes / share.dram_bytes_per_second)
    if own.fetch_bytes:
        hops.append(share.disk_latency_seconds + own.fetch_bytes / share.disk_read_bytes_per_second)
    return max(hops)


def _shared(
    own: BlockTraffic,
    block: BlockShape,
    work: Work,
    spread: Spread,
    method: Method,
    hardware: Hardware,
    crossing: Crossing,
) -> BlockTraffic:
    """The same block where its copy on the host is shared: what crosses for one device, and for its range."""
    held = 1 / spread.ranks
    own_sums = own.reduce_seconds * summed_share(work, spread, method) / method.sent_in(work)
    return replace(
        own,
        load_bytes=round(crossing.load_bytes),
        gather_seconds=crossing.gather_seconds,
        gathers_at_loads=True,
        gradient_bytes=round(crossing.gradient_bytes),
        reduce_seconds=own_sums + crossing.reduce_seconds,
        reduces_always=method.sent_in(work) > 1 or crossing.reduce_seconds > 0,
        over_link=hardware.peer == OVER_LINK,
        sum_bytes=crossing.sum_bytes,
        network_seconds=crossing.network_seconds,
        network_bytes=round(crossing.network_bytes),
        network_dram_bytes=crossing.network_dram_bytes,
        update_bytes=own.update_bytes * held,
        norm_bytes=own.norm_bytes * held,
        state_bytes=round(own.state_bytes * held),
        fetch_bytes=round(own.fetch_bytes * held),
        spill_bytes=round(own.spill_bytes * held),
    )


def _traffic(
    block: BlockShape, work: Work, spread: Spread, method: Method, read: float, *, leaves: bool
) -> BlockTraffic:
    """`read`: the share of the bytes that come from disk which is read, see packing.py."""
    activations = round(block.activation_bytes(work.tokens)) if leaves else 0
    spills = method.activations is Activations.SPILLED
    fetched = round(read * block.weight_bytes) if method.weights is Place.DISK else 0
    if work.training is Training.NONE or method.state is Place.DEVICE or not block.trainable:
        return BlockTraffic(fetch_bytes=fetched, activation_bytes=activations, activations_spill=spills)
    trained = int(method.host_share * spread.divided(block.trainable, 1))
    gradients = spread.divided(work.gradient_bytes * block.trainable, 2)
    return BlockTraffic(
        gradient_bytes=int(method.host_share * gradients / method.sent_in(work)),
        update_bytes=float(work.update_bytes * trained),
        norm_bytes=float(work.gradient_bytes * trained) if work.clipped else 0.0,
        state_bytes=round((work.master_bytes + work.state_bytes) * trained) if method.state is Place.DISK else 0,
        fetch_bytes=fetched,
        spill_bytes=fetched if work.training is Training.FULL else 0,
        activation_bytes=activations,
        activations_spill=spills,
    )
