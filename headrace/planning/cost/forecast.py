"""How does one method run? The planner's plan of its visits, and the step that it comes to on the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.planning.cost.floors import Floors, floors_of
from headrace.planning.cost.hardware import Hardware, share_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.shape import BlockKind, ModelShape
from headrace.planning.cost.sharing import Sharing, sharing_of
from headrace.planning.cost.step import StepForecast, forecast_step
from headrace.planning.cost.tiers import Tiers, tiers_of
from headrace.planning.cost.traffic import BlockTraffic, traffic_of
from headrace.planning.cost.work import Method, Spread, Training, Work
from headrace.planning.plan import Plan
from headrace.planning.planner import make_plan
from headrace.planning.problem import Problem
from headrace.planning.visit import Phase, Visit

__all__ = ["SIMULATED_MICRO_BATCHES", "Outline", "Run", "outline_of", "run_of"]

N = TypeVar("N", int, float)

SIMULATED_MICRO_BATCHES = 2  # more are counted from the difference between one and two


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method on one machine: what it holds, its floors, the plan of its visits and one step of it.

    `step` is simulated with at most two micro-batches, or groups that go together; `seconds`, and `busy_seconds` and
    `moved_bytes` of each lane, count all of them. `sharing`: how devices share one copy for each node; None: they do
    not. `in_use`: lane, or "host memory" -> the share of the step for which it would be in use alone; what comes near 1
    is what the step is bound by.
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


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of a method before anything is planned: all that it holds and moves, and its floors."""

    tiers: Tiers
    traffic: tuple[BlockTraffic, ...]
    room_bytes: int  # on the device, for blocks that visit
    floors: Floors


def outline_of(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    method: Method,
    hardware: Hardware,
    streaming_bytes: int | None = None,
) -> Outline:
    """`streaming_bytes`: on the device, for weights that come and go; None: what is left."""
    work = method.grouped(work)
    tiers = tiers_of(shape, work, spread, method, hardware, streaming_bytes)
    traffic = traffic_of(shape, work, spread, method, hardware, tiers.cut)
    room = tiers.streaming_bytes if tiers.cut is None else tiers.cut.other_room_bytes
    floors = floors_of(traffic, work, method, share_of(hardware), room)
    return Outline(tiers=tiers, traffic=traffic, room_bytes=room, floors=floors)


def run_of(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    method: Method,
    hardware: Hardware,
    streaming_bytes: int | None = None,
) -> Run:
    """The forecast of one method. The method must fit (`Tiers.fits`)."""
    outline = outline_of(shape, work, spread, method, hardware, streaming_bytes)
    work, traffic = method.grouped(work), outline.traffic
    steps = []
    for batches in range(1, min(work.micro_batches, SIMULATED_MICRO_BATCHES) + 1):
        plan = make_plan(_problem(shape, work, method, outline, batches))
        closing = sum(own.device_update_seconds for own in traffic)
        share = share_of(hardware)
        steps.append(forecast_step(plan, traffic, share, overlap=method.overlap, closing_seconds=closing))
    used = _used(steps, work.micro_batches)
    total = _of_all([step.seconds for step in steps], work.micro_batches)
    total = max(total, outline.floors.longest, *used.values())
    return Run(
        method=method,
        tiers=outline.tiers,
        floors=outline.floors,
        visits=plan,
        step=steps[-1],
        seconds=total,
        busy_seconds=_busy(steps, work.micro_batches, total),
        moved_bytes=_by_lane([one.moved_bytes for one in steps], work.micro_batches),
        sharing=sharing_of(traffic, work, spread, method),
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


def _problem(shape: ModelShape, work: Work, method: Method, outline: Outline, batches: int) -> Problem:
    """The visits of one step of `batches` micro-batches, and what the planner may hold of the blocks."""
    traffic = outline.traffic
    forward, backward = [], []
    for index, (block, own) in enumerate(zip(shape.blocks, traffic, strict=True)):
        uses = (index, 0) if shape.tied and block.kind is BlockKind.HEAD and index else (index,)
        forward.append(Visit(blocks=uses, phase=Phase.FORWARD, compute_seconds=own.forward_seconds))
        backward.append(Visit(blocks=uses, phase=Phase.BACKWARD, compute_seconds=own.backward_seconds))
    visits = forward if work.training is Training.NONE else forward + backward[::-1]
    sizes = tuple(own.block_bytes for own in traffic)
    trained = (index for index, block in enumerate(shape.blocks) if block.trainable and method.changes(work))
    return Problem(
        block_bytes=sizes,
        load_seconds=tuple(own.load_seconds for own in traffic),
        visits=tuple(visits) * batches,
        budget_bytes=outline.room_bytes if method.streamed else sum(sizes),
        residents=frozenset() if method.streamed else frozenset(range(len(sizes))),
        changing=frozenset(trained),
    )
