"""What does the planner hand to the executor?"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.planning.problem import Problem


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
    `len(cycles)` cycles (one, unless taking turns in what is kept saves time). `start` is what is present, or in
    flight, when the first cycle begins in the steady state (a changing resident only if its reload was issued). From
    any part of `start` the plan is safe: what is missing is loaded on demand once, and after one round the state is
    the steady one.
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
        """Residents, and the blocks that the plan keeps present for good without being told to."""
        loaded = {block for cycle in self.cycles for step in cycle for block in step.loads}
        return self.problem.residents | (self.start - loaded)

    def to_text(self) -> str:
        """A readable table of the plan: what stays, what is loaded and dropped when, and the predicted times."""
        from headrace.planning.text import plan_text

        return plan_text(self)
