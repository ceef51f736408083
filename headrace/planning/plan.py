"""What does the planner hand to the executor?"""

from dataclasses import dataclass

from headrace.planning.problem import Problem
from headrace.planning.text import columns, indices_text, seconds_text, size_text


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the executor does when the host reaches one visit, in this order:

    1. drop `evictions` (never blocks of this visit);
    2. load blocks of this visit that are missing (first in `loads` when planned; otherwise a demand load);
    3. issue the rest of `loads`, in order, on the onload lane.
    """

    evictions: tuple[int, ...] = ()
    loads: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one cycle of the plan costs, averaged over the plan's cycles once it has settled (bytes and seconds)."""

    cycle_seconds: float
    compute_seconds: float
    stall_seconds: float
    lower_bound_seconds: float
    onload_bytes: int
    onloads: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Frozen decisions: the executor walks them without deciding.

    `cycles[c]` has one Step for each visit and, last, one for the boundary behind them. A cyclic plan repeats after
    `len(cycles)` cycles (one, unless it saves time that kept blocks take turns). `start` has the blocks that are
    present, or in flight, when the first cycle begins in the steady state (a changing resident only if its reload was
    issued). The plan may begin with any part of `start`: missing blocks are loaded when the cycle begins, and after one
    round the state is the steady one.
    """

    problem: Problem
    cycles: tuple[tuple[Step, ...], ...]
    start: frozenset[int]
    predicted: Prediction

    def step(self, cycle: int, index: int) -> Step:
        """The step at visit `index` (`len(visits)`: the boundary) of the cycle-th cycle, counted from 0 without end."""
        return self.cycles[cycle % len(self.cycles)][index]

    @property
    def kept(self) -> frozenset[int]:
        """The blocks that are always present: residents, and those that the plan chooses to keep for good."""
        loaded = {block for cycle in self.cycles for step in cycle for block in step.loads}
        return self.problem.residents | (self.start - loaded)

    def to_text(self) -> str:
        """A readable table of the plan: what stays, what is loaded and dropped when, and the predicted times."""
        return "\n".join([*_summary(self), "", *_table(self)]) + "\n"


def _summary(plan: Plan) -> list[str]:
    problem, predicted = plan.problem, plan.predicted
    total = sum(problem.block_bytes)
    kept = plan.kept
    bound = predicted.lower_bound_seconds
    ratio = f" ({predicted.cycle_seconds / bound:.3f} of it)" if bound else ""
    turns = "" if len(plan.cycles) == 1 else f", repeating after {len(plan.cycles)} cycles"
    return [
        f"blocks    {len(problem.block_bytes)} of {size_text(total)} in all; budget {size_text(problem.budget_bytes)}; "
        f"{len(problem.visits)} visits per cycle{turns}",
        *([f"by rows   {indices_text(problem.by_rows)}"] if problem.by_rows else []),
        f"stays     {len(kept)} blocks, {size_text(sum(problem.block_bytes[b] for b in kept))}: {indices_text(kept)}",
        f"onloads   {predicted.onloads:g} per cycle, {size_text(predicted.onload_bytes)}; "
        f"prefetch up to {_ahead(plan)} visits ahead",
        f"peak      {size_text(predicted.peak_bytes)}",
        f"cycle     {seconds_text(predicted.cycle_seconds)} = {seconds_text(predicted.compute_seconds)} compute + "
        f"{seconds_text(predicted.stall_seconds)} stall; no schedule is below {seconds_text(bound)}{ratio}",
    ]


def _table(plan: Plan) -> list[str]:
    rows = [("cycle", "visit", "phase", "uses", "compute", "evicts", "loads")]
    for cycle, steps in enumerate(plan.cycles):
        for index, step in enumerate(steps):
            if index < len(plan.problem.visits):
                visit = plan.problem.visits[index]
                named = (visit.phase.value, _list(visit.blocks), seconds_text(visit.compute_seconds))
            else:
                named = ("boundary", "", "")
            rows.append((str(cycle), str(index), *named, _list(step.evictions), _list(step.loads)))
    return columns(rows)


def _ahead(plan: Plan) -> int:
    """The largest number of visits between a load's issue and its use."""
    visits = plan.problem.visits

    def until_use(index: int, block: int) -> int:
        return next(n for n in range(len(visits) + 1) if block in visits[(index + n) % len(visits)].blocks)

    steps = [pair for cycle in plan.cycles for pair in enumerate(cycle)]
    return max((until_use(index, block) for index, step in steps for block in step.loads), default=0)


def _list(blocks: tuple[int, ...]) -> str:
    return " ".join(map(str, blocks))
