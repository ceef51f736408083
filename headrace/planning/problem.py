"""What does the planner plan for?"""

import math
from dataclasses import dataclass
from enum import Enum

from headrace.errors import BudgetError


class Phase(Enum):
    """The pass of the model that a visit belongs to. The planner ignores it; texts and traces show it."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One use of blocks on the device: all of `blocks` must be present while it computes for `compute_seconds`.

    `other_load_seconds`: how long other copies that are issued during the visit (activations, single experts, rows
    of tables) take the onload lane. They come behind the visit's own loads.
    """

    blocks: tuple[int, ...]
    phase: Phase = Phase.FORWARD
    compute_seconds: float
    other_load_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model cut into blocks, the cycle of visits that a run repeats, and the device budget.

    - `block_bytes[b]`, `load_seconds[b]`: size of block b, and how long the onload lane needs for it alone.
    - `visits`: one cycle, in host order: one token of inference, or all forwards and backwards of one optimizer step.
    - `budget_bytes`: ceiling for all blocks on the device: residents, present ones and those in flight.
    - `residents`: always present, never evicted, counted in the budget.
    - `changing`: blocks whose host bytes change at the end of each cycle (optimizer step). Their device copies expire
      there; the boundary is the first step that may load them again. A resident that changes is loaded again in place.
    - `cyclic`: the cycle repeats. False: one pass, and nothing is loaded for what comes after it.
    - `max_ahead`: a block is loaded at most this many visits before its use (0: on demand only). None: no limit.
    - `by_rows`: tables that travel row by row, outside of the plan, in memory that does not count in the budget.

    Raises ValueError for invalid numbers, and BudgetError when a visit does not fit.
    """

    block_bytes: tuple[int, ...]
    load_seconds: tuple[float, ...]
    visits: tuple[Visit, ...]
    budget_bytes: int
    residents: frozenset[int] = frozenset()
    changing: frozenset[int] = frozenset()
    cyclic: bool = True
    max_ahead: int | None = None
    by_rows: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_indices()
        self._check_budget()

    @property
    def resident_bytes(self) -> int:
        return sum(self.block_bytes[block] for block in self.residents)

    @property
    def compute_seconds(self) -> float:
        """Compute of one cycle, without any stall."""
        return math.fsum(visit.compute_seconds for visit in self.visits)

    def _check_numbers(self) -> None:
        if len(self.block_bytes) != len(self.load_seconds):
            raise ValueError(f"{len(self.block_bytes)} sizes but {len(self.load_seconds)} load times: give one each")
        for block, (size, seconds) in enumerate(zip(self.block_bytes, self.load_seconds, strict=True)):
            if size < 0 or not (seconds >= 0 and math.isfinite(seconds)):
                raise ValueError(
                    f"block {block}: {size} bytes in {seconds} seconds; both must be finite and not negative"
                )
        for index, visit in enumerate(self.visits):
            if not (visit.compute_seconds >= 0 and math.isfinite(visit.compute_seconds)):
                raise ValueError(
                    f"visit {index}: compute_seconds is {visit.compute_seconds}; it must be finite and >= 0"
                )
        if not self.visits:
            raise ValueError("a cycle needs at least one visit")
        if self.max_ahead is not None and self.max_ahead < 0:
            raise ValueError(f"max_ahead is {self.max_ahead}; it must be None or >= 0")

    def _check_indices(self) -> None:
        count = len(self.block_bytes)
        for index, visit in enumerate(self.visits):
            if len(set(visit.blocks)) != len(visit.blocks):
                raise ValueError(f"visit {index} names a block twice: {list(visit.blocks)}")
            if any(not 0 <= block < count for block in visit.blocks):
                raise ValueError(
                    f"visit {index} uses blocks {list(visit.blocks)}; the model has blocks 0 to {count - 1}"
                )
        for name, group in (("residents", self.residents), ("changing", self.changing), ("by_rows", self.by_rows)):
            if any(not 0 <= block < count for block in group):
                raise ValueError(f"{name} are {sorted(group)}; the model has blocks 0 to {count - 1}")

    def _check_budget(self) -> None:
        resident_bytes = self.resident_bytes
        for index, visit in enumerate(self.visits):
            own = sum(self.block_bytes[block] for block in visit.blocks if block not in self.residents)
            if own + resident_bytes > self.budget_bytes:
                raise BudgetError(
                    f"visit {index} needs blocks {list(visit.blocks)}: {own + resident_bytes:,} bytes on the device"
                    f" together with {resident_bytes:,} bytes of residents, but the budget is {self.budget_bytes:,}"
                    f" bytes; raise the budget to at least {own + resident_bytes:,} bytes, keep fewer blocks resident,"
                    " or cut the model into smaller blocks"
                )
