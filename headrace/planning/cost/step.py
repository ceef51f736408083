"""How long does one step take, lane by lane? The planner's schedule of visits, with all else that moves, on the lanes.

What the executor does is laid out as tasks (`graph.py`), which run on lanes (`lanes.py`). Several consecutive steps are
run; the last one is the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planning.cost.graph import StepGraph
from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.lanes import CostLane, Task, run_lanes
from headrace.planning.cost.traffic import BlockTraffic
from headrace.planning.cost.work import Overlap
from headrace.planning.plan import Plan

HOST_MEMORY = "host memory"

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
    """One settled step: its seconds, and its `tasks`, which begin and end as counted from the step's begin.

    `alone_seconds`: the time of each lane's tasks if they did not share host memory, and the time of all that passes
    through host memory.
    """

    seconds: float
    busy_seconds: dict[str, float]
    alone_seconds: dict[str, float]
    moved_bytes: dict[str, int]
    stalls: tuple[Stall, ...]
    tasks: tuple[Task, ...]


def forecast_step(
    plan: Plan, traffic: Sequence[BlockTraffic], hardware: Hardware, overlap: Overlap = Overlap.NONE
) -> StepForecast:
    """The settled step of `plan` on `hardware`. The plan's visits are one optimizer step.

    Rates of link, disk and DRAM come from `hardware`; block loads take the seconds that the plan's problem says.
    """
    graph = StepGraph(plan, traffic, hardware, overlap)
    turns = len(plan.cycles)
    ends = [graph.step(cycle) for cycle in range(turns * _SETTLED + turns)]
    run_lanes(
        graph.tasks,
        dram_rate=hardware.dram_bytes_per_second,
        duplex_share=hardware.duplex_share,
        disk_duplex_share=hardware.disk_duplex_share,
    )
    first, last = ends[turns * _SETTLED - 1], ends[-1]
    begin = graph.tasks[first].end
    seconds = (graph.tasks[last].end - begin) / turns
    tasks = graph.tasks[first + 1 : last + 1]  # without loads for the step after it
    busy: dict[str, float] = dict.fromkeys(CostLane, 0.0)
    alone: dict[str, float] = dict.fromkeys(CostLane, 0.0)
    moved: dict[str, int] = dict.fromkeys(CostLane, 0)
    stalls, computed = [], begin
    for task in tasks:
        busy[task.lane] += (task.end - task.begin) / turns
        alone[task.lane] += task.seconds / turns
        moved[task.lane] += task.nbytes
        if task.lane is CostLane.COMPUTE:
            waited = task.begin - computed
            source = _last_of_others(task, graph.tasks)
            if waited > 1e-9 * max(seconds, 1e-9) and source is not None:
                stalls.append(Stall(name=task.name, lane=source.lane, waited_for=source.name, seconds=waited))
            computed = task.end
    for task in tasks:
        task.begin, task.end = task.begin - begin, task.end - begin
    alone[HOST_MEMORY] = sum(task.dram_bytes for task in tasks) / hardware.dram_bytes_per_second / turns
    return StepForecast(
        seconds=seconds,
        busy_seconds=busy,
        alone_seconds=alone,
        moved_bytes={lane: nbytes // turns for lane, nbytes in moved.items()},
        stalls=tuple(stalls),
        tasks=tuple(tasks),
    )


def _last_of_others(task: Task, tasks: Sequence[Task]) -> Task | None:
    """The task of another lane that it waited for last; None if its own lane was busy until then."""
    others = [other for other in map(tasks.__getitem__, task.after) if other.lane is not task.lane]
    last = max(others, key=lambda other: other.end, default=None)
    return last if last is not None and last.end >= task.begin * (1 - 1e-12) - 1e-12 else None
