"""How does one method run? The planner's plan of its visits, and the step that results on the lanes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from headrace.planning.cost.floors import Floors, floors_of
from headrace.planning.cost.shape import BlockKind
from headrace.planning.cost.sharing import Sharing, sharing_of
from headrace.planning.cost.step import StepForecast, forecast_step
from headrace.planning.cost.tiers import Tiers, tiers_of
from headrace.planning.cost.traffic import BlockTraffic, traffic_of
from headrace.planning.cost.work import Activations, Case, Method, Overlap, Place
from headrace.planning.plan import Plan
from headrace.planning.problem import Phase, Problem, Visit
from headrace.planning.search import make_plan

N = TypeVar("N", int, float)

SIMULATED_MICRO_BATCHES = 2  # the figures of more follow from the difference between one and two


@dataclass(frozen=True, kw_only=True)
class Option:
    """A method under consideration, before its visits are planned: all that it holds and moves, and its floors."""

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
        """The tiers that are too small, and the bytes that each lacks; empty if the method fits."""
        return tuple((place, self.tiers.short(place)) for place in Place if self.tiers.short(place))

    @property
    def wears(self) -> bool:
        """Whether each step writes to the drive."""
        spilled = self.method.activations is Activations.SPILLED
        return any(own.state_bytes or own.spill_bytes or (spilled and own.activation_bytes) for own in self.traffic)

    @property
    def floor_seconds(self) -> float:
        """No step can take less than this."""
        waits = self.case.trains and self.method.overlap is Overlap.NONE and self.method.state is not Place.DEVICE
        return self.floors.serial_update if waits else self.floors.longest


@dataclass(frozen=True, kw_only=True)
class Run(Option):
    """An option that fits, with the plan of its visits and one step of it.

    `step` is simulated with at most two micro-batches, or groups that go together; `seconds`, and `busy_seconds` and
    `moved_bytes` of each lane, count all of them. `sharing` says how the devices of a node share one copy; None: they
    do not. `in_use` has, for each lane and for "host memory", the share of the step that its own work would take alone.
    A share near 1 is what bounds the step.
    """

    visits: Plan
    step: StepForecast
    seconds: float
    busy_seconds: dict[str, float]
    moved_bytes: dict[str, int]
    sharing: Sharing | None = None
    in_use: dict[str, float] = field(default_factory=dict)

    @property
    def efficiency(self) -> float:
        """Compute's time alone as a share of the step's."""
        return self.floors.compute_seconds / self.seconds if self.seconds else 1.0

    @property
    def resident_fraction(self) -> float:
        """The share of the weights' bytes that stays on the device, without what comes in parts: experts and tables."""
        problem = self.visits.problem
        return sum(problem.block_bytes[b] for b in self.visits.kept) / max(1, sum(problem.block_bytes))


def option_of(case: Case, streaming_bytes: int | None = None) -> Option:
    """The option of `case`, with `streaming_bytes` of the device for weights that come and go; None: what is left."""
    grouped = case.grouped()
    tiers = tiers_of(grouped, streaming_bytes)
    traffic = traffic_of(grouped, tiers.cut, tiers.tables, tiers.on_disk)
    room = tiers.streaming_bytes - tiers.rows_bytes if tiers.cut is None else tiers.cut.other_room_bytes
    floors = floors_of(traffic, grouped, room)
    return Option(case=case, tiers=tiers, traffic=traffic, room_bytes=room, floors=floors)


def run_of(case: Case, streaming_bytes: int | None = None) -> Run:
    """The forecast of `case`, which must fit, by way of its option."""
    return forecast_of(option_of(case, streaming_bytes))


def forecast_of(option: Option) -> Run:
    """The forecast of one method, which must fit."""
    case, traffic = option.case.grouped(), option.traffic
    batches = case.work.micro_batches
    steps = []
    for count in range(1, min(batches, SIMULATED_MICRO_BATCHES) + 1):
        plan = planned(_problem(option, count))
        steps.append(forecast_step(plan, traffic, case.share, option.method.overlap))
    alone = _by_lane([step.alone_seconds for step in steps], batches)
    total = max(_of_all([step.seconds for step in steps], batches), option.floors.longest, *alone.values())
    # Waits for other lanes differ between one and two micro-batches, but a lane is busy at least while its tasks run.
    busy = _by_lane([step.busy_seconds for step in steps], batches)
    return Run(
        **vars(option),
        visits=plan,
        step=steps[-1],
        seconds=total,
        busy_seconds={lane: min(total, max(alone[lane], busy[lane])) for lane in busy},
        moved_bytes=_by_lane([one.moved_bytes for one in steps], batches),
        sharing=sharing_of(traffic, case),
        in_use={name: took / total for name, took in alone.items()},
    )


@lru_cache(maxsize=64)
def planned(problem: Problem) -> Plan:
    """The plan of these visits: options that are compared often have the same ones."""
    return make_plan(problem)


def _of_all(values: Sequence[N], micro_batches: int) -> N:
    """The value of all micro-batches, from those of one and of two: each further one adds the difference."""
    return values[-1] + (micro_batches - len(values)) * (values[-1] - values[0])


def _by_lane(steps: Sequence[dict[str, N]], micro_batches: int) -> dict[str, N]:
    """The value of all micro-batches, for each lane."""
    return {lane: _of_all([step[lane] for step in steps], micro_batches) for lane in steps[0]}


def _problem(option: Option, batches: int) -> Problem:
    """The planner's problem: the visits of a step of `batches` micro-batches, and the room for their blocks."""
    case, traffic, shape = option.case, option.traffic, option.case.shape
    forward, backward = [], []
    for index, (block, own) in enumerate(zip(shape.blocks, traffic, strict=True)):
        uses = (index, 0) if shape.tied and block.kind is BlockKind.HEAD and index else (index,)
        forward.append(Visit(blocks=uses, phase=Phase.FORWARD, compute_seconds=own.forward_seconds))
        backward.append(Visit(blocks=uses, phase=Phase.BACKWARD, compute_seconds=own.backward_seconds))
    visits = forward + backward[::-1] if case.trains else forward
    sizes = tuple(own.block_bytes for own in traffic)
    trained = (index for index, block in enumerate(shape.blocks) if block.trainable and case.changes and sizes[index])
    return Problem(
        block_bytes=sizes,
        load_seconds=tuple(own.load_seconds for own in traffic),
        visits=tuple(visits) * batches,
        budget_bytes=option.room_bytes if case.method.streamed else sum(sizes),
        residents=frozenset() if case.method.streamed else frozenset(range(len(sizes))),
        changing=frozenset(trained),
    )
