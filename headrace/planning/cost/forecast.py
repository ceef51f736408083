"""How does one method run? The planner's plan of its visits, and the step that it comes to on the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.planning.cost.floors import Floors, floors_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.shape import BlockKind
from headrace.planning.cost.sharing import Sharing, sharing_of
from headrace.planning.cost.step import StepForecast, forecast_step
from headrace.planning.cost.tiers import Tiers, tiers_of
from headrace.planning.cost.traffic import BlockTraffic, traffic_of
from headrace.planning.cost.work import Case, Method, Overlap, Place
from headrace.planning.plan import Plan
from headrace.planning.planner import make_plan
from headrace.planning.problem import Problem
from headrace.planning.visit import Phase, Visit

__all__ = ["SIMULATED_MICRO_BATCHES", "Option", "Run", "forecast_of", "option_of", "run_of"]

N = TypeVar("N", int, float)

SIMULATED_MICRO_BATCHES = 2  # more are counted from the difference between one and two


@dataclass(frozen=True, kw_only=True)
class Option:
    """A method that is considered, before anything is planned: all that it holds and moves, and its floors."""

    case: Case
    tiers: Tiers
    traffic: tuple[BlockTraffic, ...]
    room_bytes: int  # on the device, for blocks that visit
    floors: Floors

    @property
    def method(self) -> Method:
        return self.case.method

    @property
    def lacks(self) -> tuple[tuple[Place, int], ...]:
        """Tiers that have too little, and what they lack in bytes; empty: it fits."""
        return tuple((place, self.tiers.short(place)) for place in Place if self.tiers.short(place))

    @property
    def floor_seconds(self) -> float:
        """Below which no step can come."""
        waits = self.case.trains and self.method.overlap is Overlap.NONE and self.method.state is not Place.DEVICE
        return self.floors.serial_update if waits else self.floors.longest


@dataclass(frozen=True, kw_only=True)
class Run:
    """One method on one machine: the plan of its visits and one step of it.

    `step` is simulated with at most two micro-batches, or groups that go together; `seconds`, and `busy_seconds` and
    `moved_bytes` of each lane, count all of them. `sharing`: how devices share one copy for each node; None: they do
    not. `in_use`: lane, or "host memory" -> the share of the step for which it would be in use alone; what comes near 1
    is what the step is bound by.
    """

    option: Option
    visits: Plan
    step: StepForecast
    seconds: float
    busy_seconds: dict[CostLane, float]
    moved_bytes: dict[CostLane, int]
    sharing: Sharing | None = None
    in_use: dict[str, float] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        return self.option.method

    @property
    def tiers(self) -> Tiers:
        return self.option.tiers

    @property
    def floors(self) -> Floors:
        return self.option.floors

    @property
    def efficiency(self) -> float:
        """Compute alone over the step."""
        return self.floors.compute_seconds / self.seconds if self.seconds else 1.0

    @property
    def resident_fraction(self) -> float:
        """Of the weights' bytes, but for those of experts that come one by one, what stays on the device."""
        problem = self.visits.problem
        return sum(problem.block_bytes[b] for b in self.visits.kept) / max(1, sum(problem.block_bytes))


def option_of(case: Case, streaming_bytes: int | None = None) -> Option:
    """`streaming_bytes`: on the device, for weights that come and go; None: what is left."""
    grouped = case.grouped()
    tiers = tiers_of(grouped, streaming_bytes)
    traffic = traffic_of(grouped, tiers.cut)
    room = tiers.streaming_bytes if tiers.cut is None else tiers.cut.other_room_bytes
    floors = floors_of(traffic, grouped, room)
    return Option(case=case, tiers=tiers, traffic=traffic, room_bytes=room, floors=floors)


def run_of(case: Case, streaming_bytes: int | None = None) -> Run:
    """As `forecast_of`, of what is not an option yet."""
    return forecast_of(option_of(case, streaming_bytes))


def forecast_of(option: Option) -> Run:
    """The forecast of one method, which must fit."""
    case, traffic = option.case.grouped(), option.traffic
    batches = case.work.micro_batches
    steps = []
    for count in range(1, min(batches, SIMULATED_MICRO_BATCHES) + 1):
        plan = make_plan(_problem(option, count))
        steps.append(forecast_step(plan, traffic, case.share, option.method.overlap))
    alone = _by_lane([step.alone_seconds for step in steps], batches)
    used = {lane.value: seconds for lane, seconds in alone.items()}
    used["host memory"] = _of_all([step.dram_seconds for step in steps], batches)
    total = max(_of_all([step.seconds for step in steps], batches), option.floors.longest, *used.values())
    # What a lane's tasks wait for others differs between one and two: it is busy for what they take alone, at least.
    busy = _by_lane([step.busy_seconds for step in steps], batches)
    return Run(
        option=option,
        visits=plan,
        step=steps[-1],
        seconds=total,
        busy_seconds={lane: min(total, max(alone[lane], busy[lane])) for lane in CostLane},
        moved_bytes=_by_lane([one.moved_bytes for one in steps], batches),
        sharing=sharing_of(traffic, case),
        in_use={name: took / total for name, took in used.items()},
    )


def _of_all(values: Sequence[N], micro_batches: int) -> N:
    """Of all micro-batches, from what it is of one and of two: each further one adds the difference."""
    return values[-1] + (micro_batches - len(values)) * (values[-1] - values[0])


def _by_lane(steps: Sequence[dict[CostLane, N]], micro_batches: int) -> dict[CostLane, N]:
    """The same for each lane."""
    return {lane: _of_all([step[lane] for step in steps], micro_batches) for lane in CostLane}


def _problem(option: Option, batches: int) -> Problem:
    """The visits of one step of `batches` micro-batches, and what the planner may hold of the blocks."""
    case, traffic, shape = option.case, option.traffic, option.case.shape
    forward, backward = [], []
    for index, (block, own) in enumerate(zip(shape.blocks, traffic, strict=True)):
        uses = (index, 0) if shape.tied and block.kind is BlockKind.HEAD and index else (index,)
        forward.append(Visit(blocks=uses, phase=Phase.FORWARD, compute_seconds=own.forward_seconds))
        backward.append(Visit(blocks=uses, phase=Phase.BACKWARD, compute_seconds=own.backward_seconds))
    visits = forward + backward[::-1] if case.trains else forward
    sizes = tuple(own.block_bytes for own in traffic)
    trained = (index for index, block in enumerate(shape.blocks) if block.trainable and case.changes)
    return Problem(
        block_bytes=sizes,
        load_seconds=tuple(own.load_seconds for own in traffic),
        visits=tuple(visits) * batches,
        budget_bytes=option.room_bytes if case.method.streamed else sum(sizes),
        residents=frozenset() if case.method.streamed else frozenset(range(len(sizes))),
        changing=frozenset(trained),
    )
