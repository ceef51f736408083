"""When do blocks come and go? As the plan for the expected trace says; what it did not foresee comes on demand.

The first cycle of its kind is recorded while blocks come on demand. From its trace, sizes, measured speeds and the
budget the planner makes a plan; the executor walks it without deciding. Where a cycle strays from the trace, blocks are
loaded on demand, the one that is needed again last makes room, and the trace is learned anew.
"""

import itertools
import warnings
from collections.abc import Sequence

import torch

from millrace.planning import Phase, Plan, Problem, Visit, make_plan
from millrace.runtime.lanes import Lanes
from millrace.weights.meter import Meter, VisitRecord
from millrace.weights.movement.block import Block, Presence
from millrace.weights.movement.residency import Residency
from millrace.weights.movement.trace import Course, Entry, Trace, TraceBook, VisitKey

__all__ = ["Executor"]

_MOST_RECORDED_VISITS = 100_000  # in one cycle: beyond that (a forward in a loop with gradients on) nothing is learned


class Executor:
    """Walks plans, and serves what they did not foresee."""

    def __init__(
        self, blocks: Sequence[Block], residency: Residency, lanes: Lanes, meter: Meter, max_ahead: int | None
    ) -> None:
        self._blocks = list(blocks)
        self._residency = residency
        self._lanes = lanes
        self._meter = meter
        self._max_ahead = max_ahead
        self._book = TraceBook()
        self._course: Course | None = None
        self.plan: Plan | None = None  # the plan that is followed, or was last
        self._entry: Entry | None = None  # of the cycle under way
        self._records: list[VisitRecord] = []
        self._changed: frozenset[int] = frozenset()  # streamed blocks whose homes changed before this cycle
        self._changed_now: set[int] = set()  # those that changed after it began
        self._at_boundary: list[Block] = []  # loads that wait for the homes to change
        self._put_off: dict[Block, None] = {}  # loads that wait for the update of their homes
        self._moment = 0  # counts when homes may have changed without notice, see `Block.is_current`
        self._clock = 0  # visits so far
        self._cycle_clock = 0  # those before the cycle under way
        self._last_used: dict[Block, int] = {}
        self._planner_failed = False  # once it has, nobody is told again
        self._all_bytes = sum(block.nbytes for block in self._blocks)
        self.everything_is_here = False  # with what the homes hold, and nothing has to go: a cycle without visits

    # cycles -----------------------------------------------------------------------------------------------------------
    def begin_pass(self, name: str) -> None:
        """An outermost forward begins, and a cycle with it."""
        if self._entry is not None:  # a forward with gradients that no backward followed
            self._close()
        self._open(Entry(name, Phase.FORWARD, torch.is_grad_enabled()))

    def end_pass(self) -> None:
        """The outermost forward ends: without gradients, no backward can follow."""
        if self._entry is not None and not self._entry.gradients:
            self.end_cycle()

    def begin_backward(self) -> None:
        """A backward begins: a part of the cycle of its forward, unless another backward has ended that."""
        self._moment += 1
        if self._entry is None:
            self._open(Entry("", Phase.BACKWARD, True))

    def end_cycle(self) -> None:
        """The cycle is over; loads for the next one are submitted, as far as its homes do not change before."""
        self._close()
        if self._course is not None and not self._course.strayed:
            step = self._course.end()
            loads = [self._blocks[index] for index in step.loads]
            for index in step.evictions:
                self._evict(self._blocks[index])
            self._at_boundary = [block for block in loads if block.index in self._changed]
            for block in loads:
                if block.index not in self._changed:
                    self._prefetch(block)
            self._fetch_ahead(but_not=self._changed)

    def abandon_cycle(self) -> None:
        """The cycle was broken off by an exception: nothing is learned from it."""
        self._entry = None
        self._records = []
        self._course = None
        self._put_off.clear()

    def homes_changed(self) -> None:
        """Homes were written (optimizer step, `refresh()`): old device copies go, loads that waited are submitted."""
        self._note_changes()  # before loads make it look as if nothing had changed
        self._drop_old_copies()
        self._fetch_ahead(but_not=frozenset())

    def _note_changes(self) -> None:
        self._moment += 1
        moment = self._moment
        for block in self._blocks:
            if not block.is_current(moment) and block.changed_since_load:
                self._changed_now.add(block.index)

    def _drop_old_copies(self) -> None:
        for block in list(self._residency.present()):
            if block.index >= 0 and block.presence is not Presence.RESERVED and not block.is_current(self._moment):
                self._evict(block)
        for block in list(self._residency.present()):
            if block.index < 0 and not block.is_current(self._moment) and not block.being_updated:
                self._residency.renew(block)  # every pass begins with the residents: not behind what is loaded ahead
        waiting, self._at_boundary = self._at_boundary, []
        for block in waiting:
            self._prefetch(block)

    def replan(self) -> None:
        """The budget for blocks that come and go has changed."""
        self._course = None
        self._book.forget_plans()

    # visits -----------------------------------------------------------------------------------------------------------
    def visit(self, blocks: Sequence[Block], phase: Phase, name: str) -> None:
        """Makes the blocks present, and does what the plan has for this visit."""
        key: VisitKey = (tuple([block.index for block in blocks if block.index >= 0]), phase)
        asked = self._lanes.tick()
        again = bool(self._records) and (self._records[-1].blocks, self._records[-1].phase) == key
        step = None if self._course is None or again else self._course.advance(key)
        if step is not None:
            for index in step.evictions:
                if index not in key[0]:
                    self._evict(self._blocks[index])
        for block in blocks:
            self.bring(block, keep=blocks)
        if self._put_off:
            self._load_updated()
        if step is not None:
            for index in step.loads:
                self._prefetch(self._blocks[index])
        self._fetch_ahead(but_not=self._changed)
        for block in blocks:  # last: where this makes the host wait, the lanes and the drive have what comes next
            self._residency.arrive(block)
            if phase is Phase.FORWARD and self._last_used.get(block, -1) < self._cycle_clock:
                block.order = len(self._records)
            self._last_used[block] = self._clock
        self._clock += 1
        if not again and not self.everything_is_here and len(self._records) < _MOST_RECORDED_VISITS:
            began, held = self._lanes.tick(), self._meter.sample()
            self._records.append(VisitRecord(*key, name, asked, began, self._other_bytes(), held))

    def bring(self, block: Block, keep: Sequence[Block] = ()) -> None:
        """Submits what it takes to make one block present and current; compute has yet to wait for its arrival."""
        if block.updates:
            block.wait_for_updates()
        if self._put_off:
            self._put_off.pop(block, None)
        if block.buffer is None:
            self._residency.make_room(block, keep, self._next_use)
            self._residency.onload(block)
            self._meter.demand_onloads += block.index >= 0
        elif not (block.is_current(self._moment) and block.is_known_current):
            self._meter.demand_onloads += block.index >= 0 and block.presence is not Presence.RESERVED
            self._residency.renew(block)

    def _prefetch(self, block: Block) -> None:
        if block.buffer is None and self._residency.fits(block):
            self._residency.reserve(block)
        if block.buffer is not None and not block.is_current(self._moment):
            if block.being_updated or self._put_off:  # loads keep the order in which they are needed
                self._put_off[block] = None
            else:
                self._residency.renew(block)

    def _load_updated(self) -> None:
        """Loads that were put off are submitted, up to the first whose update is not done yet."""
        waiting, self._put_off = self._put_off, {}
        for block in waiting:
            self._prefetch(block)

    def _fetch_ahead(self, *, but_not: frozenset[int]) -> None:
        """Blocks on disk that the plan loads next begin their way, as far as the staging ring goes.

        Not those of the next cycle that are in `but_not`, and none behind them: their homes change before.
        """
        if not self._residency.streams_from_disk or self._course is None or self._course.strayed:
            return
        for index in self._course.coming_loads(but_not=but_not):
            if not self._residency.fetch_ahead(self._blocks[index]):
                return

    def _evict(self, block: Block) -> None:
        if block.is_free:
            self._put_off.pop(block, None)
            self._residency.evict(block)

    def _next_use(self, block: Block) -> float:
        if self._course is not None:
            return self._course.next_use(block.index)
        return self._clock - self._last_used.get(block, 0)  # unknown: what was used last is needed first

    # learning ---------------------------------------------------------------------------------------------------------
    def _open(self, entry: Entry) -> None:
        self._meter.cycle_begins()
        last, self._course = self._course, None
        self._entry = entry
        self._records = []
        self._cycle_clock = self._clock
        self._note_changes()
        self._changed, self._changed_now = frozenset(self._changed_now), set()
        trace = self._book.expect(entry)
        plan = None if trace is None else self._plan_for(trace)
        if trace is not None and plan is not None:
            self.plan = plan
            turn = last.turn + 1 if last is not None and last.plan is plan else 0
            self._course = Course(trace, plan, turn)
        self._drop_old_copies()
        self.everything_is_here = (
            not entry.gradients  # for which a visit has more to do than to bring blocks
            and self._course is not None
            and self._course.trace.refined
            and self._all_bytes <= self._residency.streaming_budget_bytes
            and self._are_here(self._blocks)
        )
        if self.everything_is_here:  # one record for all of it
            now = self._lanes.tick()
            self._records.append(
                VisitRecord((), entry.phase, entry.site, now, now, self._other_bytes(), self._meter.sample())
            )

    def _are_here(self, blocks: Sequence[Block]) -> bool:
        for block in blocks:
            if block.presence is not Presence.PRESENT or block.updates or not block.is_current(self._moment):
                return False
        return True

    def _close(self) -> None:
        """Learns from the cycle that ends."""
        end = self._lanes.tick()
        entry, records, self._entry, self._records = self._entry, self._records, None, []
        self._meter.cycle_ended(records, end)
        if entry is None or not records or len(records) >= _MOST_RECORDED_VISITS:
            return
        course = self._course
        if course is not None and not course.strayed:
            self._book.followed(entry, course.trace)
            if self.everything_is_here:
                return
            if not course.trace.refined and len(records) == len(course.trace.visits):
                course.trace.compute_seconds = self._compute_seconds(records, end)
                course.trace.other_bytes = self._others(records)
                course.trace.refined = True
                course.trace.plans.clear()
            return
        visits = [(record.blocks, record.phase) for record in records]
        self._book.enter(entry, visits, self._compute_seconds(records, end), self._others(records))

    def _other_bytes(self) -> int:
        return self._meter.lane_use.activations_bytes

    def _others(self, records: list[VisitRecord]) -> tuple[int, ...]:
        """Bytes that each visit sent for besides weights."""
        counts = [*(record.other_bytes for record in records), self._other_bytes()]
        return tuple(after - before for before, after in itertools.pairwise(counts)) if counts[0] < counts[-1] else ()

    def _compute_seconds(self, records: list[VisitRecord], end: object) -> tuple[float, ...]:
        return tuple(timing.compute_seconds for timing in self._meter.timings(records, end))

    def _plan_for(self, trace: Trace) -> Plan | None:
        """The plan for the blocks that change now. None: the planner failed, and blocks come on demand."""
        if self._changed in trace.plans:
            plan = trace.plans[self._changed]
        else:
            plan = self._make_plan(trace)
        trace.keep_plan(self._changed, plan)
        return plan

    def _make_plan(self, trace: Trace) -> Plan | None:
        try:
            return make_plan(self._problem(trace))
        except Exception as error:  # whatever it is: no pass depends on a plan
            if not self._planner_failed:
                self._planner_failed = True
                warnings.warn(
                    f"the planner failed for {len(trace.visits)} visits of {len(self._blocks)} blocks in"
                    f" {self._residency.streaming_budget_bytes:,} bytes, {type(error).__name__}: {error}. Such passes"
                    " load blocks on demand: results are the same, compute waits longer. Please report this",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return None

    def _problem(self, trace: Trace) -> Problem:
        link = self._meter.link()
        return Problem(
            block_bytes=tuple(block.nbytes for block in self._blocks),
            load_seconds=tuple(self._residency.load_seconds(block, link) for block in self._blocks),
            visits=tuple(
                Visit(blocks=blocks, phase=phase, compute_seconds=seconds, other_load_seconds=link.seconds(nbytes))
                for (blocks, phase), seconds, nbytes in zip(
                    trace.visits, trace.compute_seconds, trace.other_bytes or (0,) * len(trace.visits), strict=True
                )
            ),
            budget_bytes=self._residency.streaming_budget_bytes,
            changing=self._changed,
            cyclic=trace.repeats,
            max_ahead=self._max_ahead,
        )
