"""What will the model need next? The book of traces knows what passes looked like, and which pass follows which.

A cycle begins with an outermost forward and ends when its backward does (without gradients: when the forward does). Its
trace is the list of its visits. Which trace to expect depends on how a cycle begins and on the trace before it. So
evaluation inside training, or two forwards before two backwards, have traces of their own.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from headrace.planning import Phase, Plan, Step
from headrace.runtime.link import is_duration, is_size
from headrace.weights.meter import Timing

MOST_TRACES = 64  # the most that are remembered: where layers are skipped at random, each cycle has its own trace
MOST_PLANS = 8  # the most of one trace, each for other blocks that change

_MOST_SAVED_VISITS = 10_000  # of a trace that goes on in another process

_QUICKER = 0.9  # of the compute that plans count with: a cycle that takes less shows that it is measured too high

VisitKey = tuple[tuple[int, ...], Phase]  # indices of the streamed blocks, and the phase
# Blocks that change, whether the cycle repeats, bytes for rows and for caches.
PlanKey = tuple[frozenset[int], bool, int, int]


class Entry(NamedTuple):
    """How a cycle begins."""

    site: str  # the name of the module that was called; "" for a backward
    phase: Phase
    gradients: bool  # whether autograd records


@dataclass(eq=False)
class Trace:
    """The visits of a cycle, their compute seconds, and the plans made for it; None where the planner failed.

    `site`: where it begins. Several micro-batches that go together make the visits of one, and take longer.
    """

    site: str
    visits: tuple[VisitKey, ...]
    compute_seconds: tuple[float, ...]
    plans: OrderedDict[PlanKey, Plan | None] = field(default_factory=OrderedDict)
    repeats: bool = True  # whether the next cycle is like it, as far as is known
    other_bytes: tuple[int, ...] = ()  # what each visit sends for beside whole blocks; empty: none
    refined: bool = False  # whether it was timed while a plan was followed, not with all loads on demand

    @cached_property
    def last_uses(self) -> dict[int, int]:
        """For each block, the last visit that needs it."""
        return {index: visit for visit, (blocks, _) in enumerate(self.visits) for index in blocks}

    def took(self, timings: Sequence[Timing]) -> None:
        """Called when the times of a cycle that followed a plan are known, which may be two cycles later.

        Plans are made from one measured cycle. If the machine was busy then, a later cycle computes faster than
        any plan allows; its times replace those. A cycle with everything on the device has one time in all.
        """
        known, seconds = sum(self.compute_seconds), sum(timing.compute_seconds for timing in timings)
        if not self.refined or seconds >= _QUICKER * known:
            return
        if len(timings) == len(self.visits):
            self.compute_seconds = tuple(timing.compute_seconds for timing in timings)
        else:
            self.compute_seconds = tuple(each * seconds / known for each in self.compute_seconds)
        self.plans.clear()

    def keep_plan(self, key: PlanKey, plan: Plan | None) -> None:
        """Called when a plan was made, or used again. Beyond MOST_PLANS, drops the one used longest ago."""
        self.plans[key] = plan
        self.plans.move_to_end(key)
        if len(self.plans) > MOST_PLANS:
            self.plans.popitem(last=False)


class Course:
    """The walk of a cycle along a trace whose plan is followed."""

    def __init__(self, trace: Trace, plan: Plan, turn: int) -> None:
        self.trace = trace
        self.plan = plan
        self.turn = turn  # which of the plan's cycles this is
        self.strayed = False  # whether a visit came that the trace does not have
        self.ended = False
        self.position = -1

    @property
    def at_start(self) -> frozenset[int]:
        """The blocks that the plan counts on when the cycle begins. Empty for a plan of several cycles, whose `start`
        holds for the first one only.
        """
        return self.plan.start if len(self.plan.cycles) == 1 else frozenset()

    def advance(self, key: VisitKey) -> Step | None:
        """The plan's step for this visit, past visits that the model skipped. None: the trace has none such to come."""
        for position in range(self.position + 1, len(self.trace.visits)):
            if self.trace.visits[position] == key:
                self.position = position
                return self.plan.step(self.turn, position)
        self.strayed = True
        return None

    def end(self) -> Step:
        """Called when the last visit is over: returns the step that follows it."""
        self.ended = True
        return self.plan.step(self.turn, len(self.trace.visits))

    def coming_loads(self, *, but_not: frozenset[int]) -> Iterator[int]:
        """Blocks in the order in which the plan loads them next; in the coming cycle, up to the first in `but_not`."""
        count = len(self.trace.visits)
        for position in range(self.position + 1, count if self.ended else count + 1):
            yield from self.plan.step(self.turn, position).loads
        for position in range(count):
            for block in self.plan.step(self.turn + 1, position).loads:
                if block in but_not:
                    return
                yield block

    def comes_to(self, block: int) -> bool:
        """Whether a visit that is still to come in this cycle needs the block."""
        return self.trace.last_uses.get(block, -1) > self.position

    def next_use(self, block: int) -> float:
        """After how many visits the trace needs a block again, if the cycle repeats; infinity: never."""
        count = len(self.trace.visits)
        for ahead in range(1, count + 1):
            if block in self.trace.visits[(self.position + ahead) % count][0]:
                return ahead
        return float("inf")


class TraceBook:
    """The traces that a model followed last. Says which one to expect."""

    def __init__(self) -> None:
        self._all: OrderedDict[tuple[str, tuple[VisitKey, ...]], Trace] = OrderedDict()  # oldest first
        self._by_context: dict[tuple[Trace | None, Entry], Trace] = {}  # by the trace before, and the entry
        self._by_entry: dict[Entry, Trace] = {}
        self._last: Trace | None = None

    def __len__(self) -> int:
        return len(self._all)

    def expect(self, entry: Entry) -> Trace | None:
        """The trace that a cycle with this entry most likely follows; None: no cycle ever had it."""
        return self._by_context.get((self._last, entry)) or self._by_entry.get(entry)

    def of(self, entry: Entry, visits: tuple[VisitKey, ...]) -> Trace:
        """The trace with these visits. If none is known, a new one, which is not entered in the book."""
        return self._all.get((entry.site, visits)) or Trace(entry.site, visits, (0.0,) * len(visits))

    def enter(
        self,
        entry: Entry,
        visits: Sequence[VisitKey],
        compute_seconds: Sequence[float],
        other_bytes: Sequence[int] = (),
    ) -> Trace:
        """Called when a cycle had these visits: enters its trace, or finds the known one, and returns it."""
        trace = self._all.get((entry.site, tuple(visits)))
        if trace is None:
            trace = Trace(entry.site, tuple(visits), tuple(compute_seconds), other_bytes=tuple(other_bytes))
        self.followed(entry, trace)
        return trace

    def followed(self, entry: Entry, trace: Trace) -> None:
        """Called when a cycle went along `trace`."""
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
        """Forgets a trace: it is no longer expected, nor is any trace after it."""
        self._by_context = {
            (before, entry): trace
            for (before, entry), trace in self._by_context.items()
            if before is not old and trace is not old
        }
        self._by_entry = {entry: trace for entry, trace in self._by_entry.items() if trace is not old}

    def known(self) -> dict[str, Any]:
        """The traces that are expected now, as plain values; `restore` takes them in another process."""
        traces = [trace for trace in dict.fromkeys(self._by_entry.values()) if len(trace.visits) <= _MOST_SAVED_VISITS]
        number = {trace: place for place, trace in enumerate(traces)}
        after = [(before, *entry, trace) for (before, entry), trace in self._by_context.items() if before is not None]
        alone = [(None, *entry, trace) for entry, trace in self._by_entry.items()]
        return {
            "traces": [
                {
                    "site": trace.site,
                    "visits": [[list(blocks), phase.value] for blocks, phase in trace.visits],
                    "compute_seconds": list(trace.compute_seconds),
                    "other_bytes": list(trace.other_bytes),
                    "repeats": trace.repeats,
                }
                for trace in traces
            ],
            "expected": [
                [-1 if before is None else number[before], site, phase.value, gradients, number[trace]]
                for before, site, phase, gradients, trace in (*after, *alone)
                if trace in number and (before is None or before in number)
            ],
        }

    def restore(self, known: Any, blocks: int) -> None:
        """Takes over what `known` gave for a model of so many blocks, in the place of all that is in the book.

        Raises LookupError, RuntimeError, TypeError or ValueError, and changes nothing, for anything else.
        """
        if len(known["traces"]) > MOST_TRACES:
            raise ValueError("these are more traces than a book has")
        traces = [_restored(saved, blocks) for saved in known["traces"]]
        by_context: dict[tuple[Trace | None, Entry], Trace] = {}
        by_entry: dict[Entry, Trace] = {}
        for before, site, phase, gradients, number in known["expected"]:
            if not (isinstance(site, str) and -1 <= before < len(traces) and 0 <= number < len(traces)):
                raise ValueError("a trace is expected that is not there")
            entry = Entry(site, Phase(phase), bool(gradients))
            if before < 0:
                by_entry[entry] = traces[number]
            else:
                by_context[traces[before], entry] = traces[number]
        self._all = OrderedDict(((trace.site, trace.visits), trace) for trace in traces)
        self._by_context, self._by_entry, self._last = by_context, by_entry, None

    def forget_plans(self) -> None:
        """Drops all plans: they are made anew when their traces are expected again."""
        for trace in self._all.values():
            trace.plans.clear()


def _restored(saved: Any, blocks: int) -> Trace:
    """The trace of `TraceBook.known`. It is timed again, as this may be another machine."""
    given = saved["visits"]
    # Lengths come first: a short pickle may name one list a million times.
    if not 0 < len(given) <= _MOST_SAVED_VISITS or any(len(indexes) > blocks for indexes, _ in given):
        raise ValueError("a trace is too long")
    visits = tuple((tuple(indexes), Phase(phase)) for indexes, phase in given)
    seconds, other_bytes = tuple(saved["compute_seconds"]), tuple(saved["other_bytes"])
    numbers = [index for indexes, _ in visits for index in indexes]
    if not (
        len(visits) == len(seconds)
        and len(other_bytes) in (0, len(visits))
        and all(isinstance(index, int) and 0 <= index < blocks for index in numbers)
        and all(len(set(indexes)) == len(indexes) for indexes, _ in visits)
        and all(map(is_size, other_bytes))
        and all(map(is_duration, seconds))
        and isinstance(saved["site"], str)
    ):
        raise ValueError("this is no trace of the model")
    return Trace(saved["site"], visits, seconds, repeats=bool(saved["repeats"]), other_bytes=other_bytes)
