"""What will the model need next? The book of traces: what passes looked like, and which pass follows which.

A cycle begins with an outermost forward and ends when its backward does (without gradients: when the forward does). Its
trace is the list of its visits. What a cycle will look like is told by how it begins and by the trace before it: so
evaluation inside training, or two forwards before two backwards, have traces of their own.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from headrace.planning import Phase, Plan, Step

__all__ = ["MOST_PLANS", "MOST_TRACES", "Course", "Entry", "Trace", "TraceBook", "VisitKey"]

MOST_TRACES = 64  # that are remembered: where layers are skipped at random, every cycle has a trace of its own
MOST_PLANS = 8  # of one trace, each for other blocks that change

VisitKey = tuple[tuple[int, ...], Phase]  # indices of the streamed blocks, and the phase
PlanKey = tuple[frozenset[int], bool, int]  # which blocks change, whether the cycle is repeated, bytes left for rows


class Entry(NamedTuple):
    """How a cycle begins."""

    site: str  # the name of the one that was called; "" for a backward
    phase: Phase
    gradients: bool  # whether autograd records


@dataclass(eq=False)
class Trace:
    """The visits of a cycle, their compute seconds, and the plans made for it, as far as the planner found one.

    `site`: where it begins. Several micro-batches that go together visit what one does, and take longer.
    """

    site: str
    visits: tuple[VisitKey, ...]
    compute_seconds: tuple[float, ...]
    plans: OrderedDict[PlanKey, Plan | None] = field(default_factory=OrderedDict)
    repeats: bool = True  # as far as is known, the next cycle is like it
    other_bytes: tuple[int, ...] = ()  # what each visit sends for besides blocks; empty: nothing
    refined: bool = False  # timed while a plan was followed, not while everything was loaded on demand

    @cached_property
    def last_uses(self) -> dict[int, int]:
        """By block, the last visit that needs it."""
        return {index: visit for visit, (blocks, _) in enumerate(self.visits) for index in blocks}

    def keep_plan(self, key: PlanKey, plan: Plan | None) -> None:
        """A plan was made, or used again; the one used longest ago goes first."""
        self.plans[key] = plan
        self.plans.move_to_end(key)
        if len(self.plans) > MOST_PLANS:
            self.plans.popitem(last=False)


class Course:
    """A walk along a trace whose plan is followed."""

    def __init__(self, trace: Trace, plan: Plan, turn: int) -> None:
        self.trace = trace
        self.plan = plan
        self.turn = turn  # which cycle of the plan
        self.strayed = False  # a visit came that the trace does not have
        self.ended = False
        self.position = -1

    def advance(self, key: VisitKey) -> Step | None:
        """The step for this visit. Visits that the model skipped are skipped; None for one that the trace lacks."""
        for position in range(self.position + 1, len(self.trace.visits)):
            if self.trace.visits[position] == key:
                self.position = position
                return self.plan.step(self.turn, position)
        self.strayed = True
        return None

    def end(self) -> Step:
        """The last visit is over: what follows it."""
        self.ended = True
        return self.plan.step(self.turn, len(self.trace.visits))

    def coming_loads(self, *, but_not: frozenset[int]) -> Iterator[int]:
        """Blocks in the order in which the plan loads them next; in the coming cycle, until one is in `but_not`."""
        count = len(self.trace.visits)
        for position in range(self.position + 1, count if self.ended else count + 1):
            yield from self.plan.step(self.turn, position).loads
        for position in range(count):
            for block in self.plan.step(self.turn + 1, position).loads:
                if block in but_not:
                    return
                yield block

    def comes_to(self, block: int) -> bool:
        """Whether a visit that is still to come, of this cycle, needs the block."""
        return self.trace.last_uses.get(block, -1) > self.position

    def next_use(self, block: int) -> float:
        """How many visits ahead the trace needs a block again, going round."""
        count = len(self.trace.visits)
        for ahead in range(1, count + 1):
            if block in self.trace.visits[(self.position + ahead) % count][0]:
                return ahead
        return float("inf")


class TraceBook:
    """The traces of a model that were followed last, and which one to expect."""

    def __init__(self) -> None:
        self._all: OrderedDict[tuple[str, tuple[VisitKey, ...]], Trace] = OrderedDict()  # followed longest ago first
        self._by_context: dict[tuple[Trace | None, Entry], Trace] = {}  # by the trace before, and the entry
        self._by_entry: dict[Entry, Trace] = {}
        self._last: Trace | None = None

    def __len__(self) -> int:
        return len(self._all)

    def expect(self, entry: Entry) -> Trace | None:
        """The trace that a cycle beginning so most likely follows; None when none ever began so."""
        return self._by_context.get((self._last, entry)) or self._by_entry.get(entry)

    def of(self, entry: Entry, visits: tuple[VisitKey, ...]) -> Trace:
        """The trace with these visits: a new one that is in no book yet, if none is known."""
        return self._all.get((entry.site, visits)) or Trace(entry.site, visits, (0.0,) * len(visits))

    def enter(
        self,
        entry: Entry,
        visits: Sequence[VisitKey],
        compute_seconds: Sequence[float],
        other_bytes: Sequence[int] = (),
    ) -> Trace:
        """A cycle had these visits: its trace, a known one if it went so before."""
        trace = self._all.get((entry.site, tuple(visits)))
        if trace is None:
            trace = Trace(entry.site, tuple(visits), tuple(compute_seconds), other_bytes=tuple(other_bytes))
        self.followed(entry, trace)
        return trace

    def followed(self, entry: Entry, trace: Trace) -> None:
        """A cycle went along `trace`."""
        self._by_context[self._last, entry] = trace
        self._by_entry[entry] = trace
        if self._last is not None:
            self._last.repeats = self._last is trace
        self._last = trace
        key = trace.site, trace.visits
        self._all[key] = trace
        self._all.move_to_end(key)
        if len(self._all) > MOST_TRACES:
            self._forget(self._all.popitem(last=False)[1])

    def _forget(self, old: Trace) -> None:
        """Nobody expects it any more, nor anything after it."""
        self._by_context = {
            (before, entry): trace
            for (before, entry), trace in self._by_context.items()
            if before is not old and trace is not old
        }
        self._by_entry = {entry: trace for entry, trace in self._by_entry.items() if trace is not old}

    def forget_plans(self) -> None:
        """Plans are made anew when their traces are expected again."""
        for trace in self._all.values():
            trace.plans.clear()
