"""How long does one step take, lane by lane? The planner's schedule of visits, with all else that moves, on the lanes.

What the executor does is laid out as tasks (`graph.py`), which run on lanes (`lanes.py`). Several consecutive steps are
run; the last one is the answer.
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
    """Compute waited `seconds` at the visit `name` for the task `waited_for` of `lane`."""

    name: str
    lane: CostLane
    waited_for: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """One settled step: seconds, and what ran when (`tasks` and `spans` beside each other, from the step's begin).

    `alone_seconds`: the time of each lane's tasks if they did not share host memory; `dram_seconds`: the time of all
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


def forecast_step(
    plan: Plan, traffic: Sequence[BlockTraffic], hardware: Hardware, overlap: Overlap = Overlap.NONE
) -> StepForecast:
    """The settled step of `plan` on `hardware`. The plan's visits are one optimizer step.

    Rates of link, disk and DRAM come from `hardware`; block loads take the seconds that the plan's problem says.
    """
    graph = StepGraph(plan, traffic, hardware, overlap)
    turns = len(plan.cycles)
    ends = [graph.step(cycle) for cycle in range(turns * _SETTLED + turns)]
    spans = run_lanes(
        graph.tasks,
        dram_rate=hardware.dram_bytes_per_second,
        duplex_share=hardware.duplex_share,
        disk_duplex_share=hardware.disk_duplex_share,
    )
    first, last = ends[turns * _SETTLED - 1], ends[-1]
    begin = spans[first].end
    seconds = (spans[last].end - begin) / turns
    # Without loads for the step after it.
    tasks, spans_of_step = graph.tasks[first + 1 : last + 1], spans[first + 1 : last + 1]
    busy, alone = dict.fromkeys(CostLane, 0.0), dict.fromkeys(CostLane, 0.0)
    moved = dict.fromkeys(CostLane, 0)
    stalls, last_end = [], begin
    for task, span in zip(tasks, spans_of_step, strict=True):
        busy[task.lane] += (span.end - span.begin) / turns
        alone[task.lane] += task.seconds / turns
        moved[task.lane] += task.nbytes
        if task.lane is CostLane.COMPUTE:
            waited = span.begin - last_end
            if waited > 1e-9 * max(seconds, 1e-9) and span.waited_for >= 0:
                source = graph.tasks[span.waited_for]
                stalls.append(Stall(name=task.name, lane=source.lane, waited_for=source.name, seconds=waited))
            last_end = span.end
    return StepForecast(
        seconds=seconds,
        compute_seconds=busy[CostLane.COMPUTE],
        busy_seconds=busy,
        alone_seconds=alone,
        dram_seconds=sum(task.dram_bytes for task in tasks) / hardware.dram_bytes_per_second / turns,
        moved_bytes={lane: nbytes // turns for lane, nbytes in moved.items()},
        stalls=tuple(stalls),
        tasks=tuple(tasks),
        spans=tuple(Span(span.begin - begin, span.end - begin, span.waited_for) for span in spans_of_step),
    )
