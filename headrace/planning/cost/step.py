"""How long does one step take, lane by lane? The planner's schedule of visits, with all else that moves, on the lanes.

What the executor does is laid out as tasks (`graph.py`), which run on lanes (`lanes.py`). Some steps are run one
behind the other; the last one is the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planning.cost.graph import StepGraph
from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.lanes import CostLane, Span, Task, run_lanes
from headrace.planning.cost.traffic import BlockTraffic
from headrace.planning.cost.work import Overlap
from headrace.planning.plan import Plan

__all__ = ["Stall", "StepForecast", "forecast_step"]

_SETTLED = 2  # steps before the one that is measured, and rounds of a plan that takes turns


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Compute waited `seconds` at visit `visit` for the task `waited_for` of `lane`."""

    visit: int
    name: str
    lane: CostLane
    waited_for: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """One settled step: seconds, and what ran when (`tasks` and `spans` beside each other, from the step's begin).

    `alone_seconds`: of each lane's tasks, without what they wait for host memory while they run; `dram_seconds`: of all
    that passes through host memory.
    """

    seconds: float
    compute_seconds: float
    busy_seconds: dict[CostLane, float]
    alone_seconds: dict[CostLane, float]
    dram_seconds: float
    moved_bytes: dict[CostLane, int]
    stalls: tuple[Stall, ...]
    tasks: tuple[Task, ...]
    spans: tuple[Span, ...]

    @property
    def stall_seconds(self) -> float:
        return max(0.0, self.seconds - self.compute_seconds)

    @property
    def overlap(self) -> float:
        """The share of the transfers' time that hides behind compute."""
        moved = sum(seconds for lane, seconds in self.busy_seconds.items() if lane is not CostLane.COMPUTE)
        return 1.0 if not moved else min(1.0, max(0.0, 1.0 - self.stall_seconds / moved))


def forecast_step(
    plan: Plan,
    traffic: Sequence[BlockTraffic],
    hardware: Hardware,
    *,
    overlap: Overlap = Overlap.NONE,
    closing_seconds: float = 0.0,
) -> StepForecast:
    """The settled step of `plan` on `hardware`; its visits are one optimizer step.

    `closing_seconds`: compute at the end of the step (an update on the device). Link and disk rates, DRAM and its
    sharing come from `hardware`; block loads take what the plan's problem says.
    """
    graph = StepGraph(plan, traffic, hardware, overlap, closing_seconds)
    turns = len(plan.cycles)
    ends = [graph.step(cycle) for cycle in range(turns * _SETTLED + turns)]
    spans = run_lanes(
        graph.tasks,
        dram_rate=hardware.dram_bytes_per_second,
        duplex_share=hardware.duplex_share,
        disk_duplex_share=hardware.disk_duplex_share,
    )
    begin = spans[ends[turns * _SETTLED - 1]].end
    seconds = (spans[ends[-1]].end - begin) / turns
    last = slice(ends[turns * _SETTLED - 1] + 1, ends[-1] + 1)  # not what is loaded already for the step after it
    rate = hardware.dram_bytes_per_second
    return _summary(graph.tasks[last], spans[last], graph.tasks, begin, seconds, turns, rate)


def _summary(
    tasks: Sequence[Task],
    spans: Sequence[Span],
    all_tasks: Sequence[Task],
    begin: float,
    seconds: float,
    turns: int,
    dram_rate: float,
) -> StepForecast:
    busy = dict.fromkeys(CostLane, 0.0)
    alone = dict.fromkeys(CostLane, 0.0)
    moved = dict.fromkeys(CostLane, 0)
    stalls, last_end, visit = [], begin, 0
    for task, span in zip(tasks, spans, strict=True):
        busy[task.lane] += (span.end - span.begin) / turns
        alone[task.lane] += task.seconds / turns
        moved[task.lane] += task.nbytes
        if task.lane is CostLane.COMPUTE:
            waited = span.begin - last_end
            if waited > 1e-9 * max(seconds, 1e-9) and span.waited_for >= 0:
                source = all_tasks[span.waited_for]
                stalls.append(
                    Stall(visit=visit, name=task.name, lane=source.lane, waited_for=source.name, seconds=waited)
                )
            last_end = span.end
            visit += 1
    compute = busy[CostLane.COMPUTE]
    return StepForecast(
        seconds=seconds,
        compute_seconds=compute,
        busy_seconds=busy,
        alone_seconds=alone,
        dram_seconds=sum(task.dram_bytes for task in tasks) / dram_rate / turns,
        moved_bytes={lane: nbytes // turns for lane, nbytes in moved.items()},
        stalls=tuple(stalls),
        tasks=tuple(tasks),
        spans=tuple(Span(span.begin - begin, span.end - begin, span.waited_for) for span in spans),
    )
