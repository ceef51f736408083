"""When do blocks come and go? When the plan for the expected trace says so; blocks that it lacks come on demand.

The first cycle of its kind is recorded while blocks come on demand. From its trace, sizes, measured speeds and the
budget the planner makes a plan, and the executor walks it. One thing it decides itself: a block that the plan gives up
only because an update is expected stays until the update comes, or others need its room. Where a cycle strays from the
trace, blocks are loaded on demand, the one that is needed again last makes room, and the trace is learned anew.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from headrace.planning import Phase, Plan
from headrace.runtime.link import known_loads
from headrace.weights.meter import Meter, VisitRecord
from headrace.weights.model.home import AliasHome
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.gathering import Gathers
from headrace.weights.movement.module_experts import ModuleExperts
from headrace.weights.movement.planner import Planner
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.rows import Rows
from headrace.weights.movement.shares import Shares
from headrace.weights.movement.slices import Slices
from headrace.weights.movement.trace import Course, Entry, Trace, TraceBook, VisitKey

_MOST_RECORDED_VISITS = 100_000  # in one cycle: beyond that (a forward in a loop with gradients on) nothing is learned


class Executor:
    """Walks plans, and loads on demand what they did not foresee."""

    def __init__(self, blocks: Sequence[Block], residency: Residency, meter: Meter, max_ahead: int | None) -> None:
        self._blocks = list(blocks)
        self._residency = residency
        self._gathers = residency.gathers
        self._is_agreed = False  # whether all ranks go along the first one's course in this cycle, and gather blocks
        self._was_agreed = False  # whether they did in the last cycle
        self._lanes = residency.pace.lanes
        self._meter = meter
        self._book = TraceBook()
        self._course: Course | None = None
        self.plan: Plan | None = None  # the plan that is followed, or was last
        self._entry: Entry | None = None  # of the cycle under way
        self._records: list[VisitRecord] = []
        self.take_turn(first=True, last=True)
        self._changed: frozenset[int] = frozenset()  # streamed blocks whose homes changed before this cycle
        self._changed_now: set[int] = set()  # streamed blocks whose homes changed after this cycle began
        # Loads for the next cycle that wait: until homes have changed or, where ranks gather, until that cycle begins.
        self._for_next_cycle: list[Block] = []
        # Blocks that may go, see `_follow_evictions`; the last one is needed last.
        self._leaving: dict[Block, None] = {}
        self._put_off: dict[Block, None] = {}  # loads that wait for the update of their homes, or for a pause to end
        self._pauses = 0  # how many calls of `pause` have no `resume` yet
        self._clock = 0  # visits so far
        self._cycle_clock = 0  # visits before the cycle under way
        self._last_used: dict[Block, int] = {}
        self._planner = Planner(self._blocks, residency, meter, max_ahead)
        # Experts that are modules are looked at when they are called, and not at the beginning of each pass.
        self._not_experts = [block for block in self._blocks if block.expert_key is None]
        self._has_module_experts = len(self._not_experts) < len(self._blocks)
        quantised = any(isinstance(param.home, AliasHome) for block in self._blocks for param in block.params)
        plain = self._gathers is None and not quantised
        self._may_keep_weights = plain  # whether autograd may save weights themselves where all of them stay
        self._indexes: dict[tuple[Block, ...], tuple[int, ...]] = {}  # the indexes of the blocks that a visit has
        residency.next_use = self._next_use
        residency.is_paused = lambda: self._pauses > 0
        self.shares = Shares(self._blocks, lambda: residency.streaming_budget_bytes)
        self.rows = Rows(self._blocks, self.shares, residency, meter)
        self._module_experts = ModuleExperts(self._blocks, self.shares, residency, meter, self.evict)
        self.slices = Slices(self._blocks, self.shares, residency, meter)
        self.everything_is_here = False  # in this cycle: all blocks are current, and stay

    # cycles -----------------------------------------------------------------------------------------------------------
    def begin_pass(self, name: str) -> None:
        """Called when an outermost forward begins: begins a cycle."""
        if self._entry is not None:  # a forward with gradients that no backward followed
            self._close()
        self._open(Entry(name, Phase.FORWARD, torch.is_grad_enabled()))

    @property
    def gradients_follow(self) -> bool:
        """Whether the cycle under way has a backward to come or under way, also inside `no_grad` within it."""
        return self._entry is not None and self._entry.gradients

    def take_turn(self, *, first: bool, last: bool) -> None:
        """Called when another of several micro-batches computes; one that is alone is the `first` and the `last`.

        They make the same visits in turn. Each visit is recorded, and advances the plan, once for all of them. For a
        turn's first visit this is when the `first` makes it, so that loads behind it begin early; for its other visits
        when the `last` makes them, so that nothing goes while others need it.
        """
        self._is_first, self._is_last = first, last

    def end_pass(self) -> None:
        """Called when the outermost forward ends: ends the cycle if no backward can follow."""
        if self._entry is not None and not self._entry.gradients:
            self.end_cycle()

    def begin_backward(self) -> None:
        """Called when a backward begins, in the cycle of its forward, unless another backward has ended that cycle.

        Blocks whose leaves autograd itself has saved are loaded again where their homes were written to.
        """
        if self._entry is None:
            self._open(Entry("", Phase.BACKWARD, True))
        self.bring_back([one for one in self._blocks if one.may_be_saved and not one.is_current and one.is_in_graph])

    def end_cycle(self) -> None:
        """Ends the cycle, and submits loads for the next one, but for blocks whose homes will change before it."""
        self._residency.pass_ends()
        self._close()
        self._was_agreed, self._is_agreed = self._is_agreed, False
        if self._was_agreed:
            self._begin_gathers(to_the_end=True)
        if self._course is not None and not self._course.strayed:
            step = self._course.end()
            loads = [self._blocks[index] for index in step.loads]
            self._for_next_cycle = [block for block in loads if self._was_agreed or block.index in self._changed]
            self._follow_evictions(step.evictions)
            for block in loads:
                if block not in self._for_next_cycle:
                    self.prefetch(block)
            self._fetch_ahead(but_not=self._changed)

    def abandon_cycle(self) -> None:
        """Called when an exception broke off the cycle: nothing is learned from it."""
        self._residency.pass_ends()
        self._entry = None
        self._records = []
        self._course = None
        self._is_agreed = False
        self._put_off.clear()

    def homes_changed(self) -> None:
        """Called when homes were written (optimizer step, `refresh()`): evicts old copies, submits waiting loads."""
        self._note_changes()  # first: after the loads, the change would not show
        self._drop_old_copies(renew=not self._pauses)
        self._fetch_ahead(but_not=frozenset())

    def _note_changes(self) -> None:
        for block in self._not_experts:
            if block.look() != block.loaded_generation and 0 <= block.last_loaded_generation < block.written_generation:
                self._changed_now.add(block.index)
                block.tell_autograd()

    def _drop_old_copies(self, *, renew: bool = True) -> None:
        """Evicts streamed blocks whose homes have changed, renews residents, and submits the loads that have waited.

        Experts that are modules stay: they are renewed when they are called.
        """
        for block in self._not_experts:
            if (
                block.buffer is not None
                and block.presence is not Presence.RESERVED
                and block.loaded_generation != block.generation
            ):
                self.evict(block)
        gathers = self._gathers
        if gathers is not None and self._entry is None:
            return  # all ranks gather the blocks that a pass with gradients begins with
        for block in self._old_residents() if renew else ():
            if not (block.being_updated or (gathers is not None and gathers.is_due(block, -1))):
                self._residency.submit_copies(block)  # before loads ahead: every pass begins with the residents
        waiting, self._for_next_cycle = self._for_next_cycle, []
        for block in waiting:
            self.prefetch(block)

    def load_ahead(self) -> None:
        """Called when a cycle begins, and after sleep: submits loads, in the order of use, of what its plan counts on
        and the device lacks: a step made it old, or another plan did not leave it.
        """
        course = self._course
        if course is None or self._gathers is not None:
            return
        missing = [index for index in course.at_start if self._blocks[index].buffer is None]
        for index in sorted(missing, key=course.next_use):
            self.prefetch(self._blocks[index])

    def _old_residents(self) -> list[Block]:
        return [one for one in self._residency.with_buffers() if one.index < 0 and not one.is_current]

    def replan(self) -> None:
        """Called when the budget for blocks that come and go has changed: makes room, and drops all plans."""
        self.slices.give_way()
        self._course = None
        self._book.forget_plans()

    def pause(self) -> None:
        """Stops loading ahead: from now on a block is loaded when a visit needs it."""
        self._pauses += 1

    def resume(self, *, loads: bool) -> None:
        """The inverse of `pause`. With `loads`, loads that were put off are submitted now, if no cycle is under way;
        within a cycle, the next visit submits them.
        """
        self._pauses -= 1
        if loads and not self._pauses and self._entry is None:
            self._note_changes()
            self._drop_old_copies()
            self._load_updated()

    def sleep(self, *, computes: bool) -> None:
        """Evicts everything from the device that nothing uses. `computes`: the model is within a pass."""
        if not computes:
            self.slices.give_way()
        self._residency.sleep()

    def close(self) -> None:
        """Evicts everything from the device, also blocks that could not come from disk."""
        self.slices.give_way()
        self.slices.leave_host()
        self._residency.close()

    def let_travel_whole(self, block: Block) -> None:
        """Called when a block that travels in parts was needed as a whole: from now on it travels whole."""
        block.row_bytes, block.experts = 0, None
        self.shares.sort()
        self.replan()

    def known(self) -> dict[str, Any]:
        """What was learned of the order and the times of passes, as plain values; between passes."""
        blocks = [[block.name, block.nbytes] for block in self._blocks]
        return {"blocks": blocks, "loads": self._meter.link().known(), **self._book.known()}

    def restore(self, known: Any) -> bool:
        """Takes over what `known` gave for a model with the same blocks, unless passes have been learned here already;
        between passes. False: the blocks are others.
        """
        try:
            if not isinstance(known, dict) or known["blocks"] != [[block.name, block.nbytes] for block in self._blocks]:
                return False
            if len(self._book):
                return True
            loads = known_loads(known["loads"])
            self._book.restore(known, len(self._blocks))
        except (LookupError, RuntimeError, TypeError, ValueError):  # RuntimeError: tensors compared with numbers
            return False
        self._meter.known_loads = loads
        self._course = None
        return True

    # visits -----------------------------------------------------------------------------------------------------------
    def visit(self, blocks: tuple[Block, ...], phase: Phase, name: str) -> None:
        """Makes the blocks present, and does what the plan has for this visit (no plan has module experts)."""
        if self._has_module_experts and any(block.expert_key for block in blocks):
            self._visit_module_experts(blocks, phase, name)
            return
        indexes = self._indexes.get(blocks)
        if indexes is None:
            indexes = self._indexes[blocks] = tuple(block.index for block in blocks if block.index >= 0)
        if self.everything_is_here:
            self.bring_back(blocks)
            return
        key: VisitKey = (indexes, phase)
        asked = self._lanes.tick()
        was_recorded = bool(self._records) and self._records[-1].phase is phase and self._records[-1].blocks == indexes
        was_recorded |= not (self._is_first or self._is_last)  # or it will be, by the last micro-batch
        self._is_first = False
        step = None if self._course is None or was_recorded else self._course.advance(key)
        if step is not None and step.evictions:
            self._follow_evictions(step.evictions, but_not=indexes)
        for block in blocks:
            self.bring(block, keep=blocks)
        if self._put_off:
            self._load_updated()
        if self._is_agreed:
            self._begin_gathers()
        elif step is not None:
            for index in step.loads:
                self.prefetch(self._blocks[index])
        if self._residency.fetching is not None:
            self._fetch_ahead(but_not=self._changed)
        for block in blocks:  # last: while the host waits here, lanes and drive have their next loads
            if block.presence is Presence.ARRIVING:
                self._residency.arrive(block)
            if phase is Phase.FORWARD and self._last_used.get(block, -1) < self._cycle_clock:
                block.order = len(self._records)
            self._last_used[block] = self._clock
        self._clock += 1
        if not was_recorded and len(self._records) < _MOST_RECORDED_VISITS:
            began, held, use = self._lanes.tick(), self._meter.sample(), self._meter.lane_use
            so_far = use.activations_bytes + use.parts_bytes  # `unplanned_bytes`, without a call
            self._records.append(VisitRecord(*key, name, asked, began, so_far, held))

    def _visit_module_experts(self, blocks: tuple[Block, ...], phase: Phase, name: str) -> None:
        """Makes experts that are modules present for a visit, and in backward loads the one that is needed next."""
        self._clock += 1
        experts = [block for block in blocks if block.expert_key is not None]
        if len(experts) < len(blocks):  # an expert shares weights with others
            self.visit(tuple(block for block in blocks if block.expert_key is None), phase, name)
        for block in experts:
            self._module_experts.note_use(block)
            with self._module_experts.counting():
                self.bring(block, blocks)
        following = self._module_experts.follow(experts, phase, gradients_follow=self.gradients_follow)
        if following is not None:
            if following.buffer is None:
                self._module_experts.make_room(following, blocks)
            with self._module_experts.counting():
                self.prefetch(following)
        for block in experts:
            self._residency.arrive(block)

    def are_here(self, blocks: Iterable[Block]) -> bool:
        """Whether a visit of these blocks has nothing to do, as the whole model is on the device for this cycle."""
        if not self.everything_is_here:
            return False
        for block in blocks:  # noqa: SIM110  # asked at every visit
            if block.look() != block.loaded_generation:
                return False
        return True

    def bring_back(self, blocks: Sequence[Block]) -> None:
        """Makes blocks present and current, loading again those whose homes were written to. Compute waits for them."""
        for block in blocks:
            self.bring(block, keep=blocks)
        for block in blocks:
            if block.presence is Presence.ARRIVING:
                self._residency.arrive(block)

    def bring(self, block: Block, keep: Sequence[Block] = ()) -> None:
        """Submits the copies that make one block present and current; compute has yet to wait for its arrival."""
        if self._gathers is not None and self._reached < math.inf and self._gathers.is_due(block, self._reached):
            self._begin_gathers(until=block)
        if block.updates:
            block.wait_for_updates()
        self._put_off.pop(block, None)
        self._leaving.pop(block, None)
        counts = block.index >= 0 and block.expert_key is None
        if block.buffer is None:
            if (block.experts is not None or block.index < 0) and not self._residency.fits(block):
                self.slices.give_way()
            if block.expert_key is not None:
                self._module_experts.make_room(block, keep)
            if self._leaving:
                self._make_way(block)
            self._residency.make_room(block, keep)
            self._residency.onload(block)
            self._meter.demand_onloads += counts
        elif block.look() != block.loaded_generation:
            self._meter.demand_onloads += counts and block.presence is not Presence.RESERVED
            self._residency.submit_copies(block)

    def prefetch(self, block: Block) -> None:
        """Loads the block before it is needed, if there is room for it."""
        if block.buffer is None:
            if not (self._residency.fits(block) or self._make_way(block)):
                return
            self._residency.reserve(block)
        elif block.look() == block.loaded_generation:
            return
        # `_put_off`: loads keep the order in which they are needed.
        if self._pauses or self._put_off or (block.updates and block.being_updated):
            self._put_off[block] = None
        else:
            self._residency.submit_copies(block)

    @property
    def _reached(self) -> float:
        """The position of the visit that the pass has reached. Infinite where this rank has left the agreed course: the
        other ranks wait for all of its gathers.
        """
        if self._is_agreed and self._course is not None and not self._course.strayed:
            return self._course.position
        return math.inf

    def _begin_gathers(self, until: Block | None = None, *, to_the_end: bool = False) -> None:
        """Begins the gathers that are due, up to the first block whose homes are being updated, but at least up to the
        block `until`; `to_the_end`: all. A rank that has left the agreed course begins them all at once for the sake of
        the other ranks, and uses none: others may need its gradients before these gathers are due.
        """
        gathers, reached = self._gathers, math.inf if to_the_end else self._reached
        while gathers is not None and (block := gathers.due(reached)) is not None:
            if until is None and reached < math.inf and (self._pauses or block.being_updated):
                return
            gathers.begin()
            until = None if block is until else until
            is_used = to_the_end or reached < math.inf
            if is_used and block.buffer is None and self._make_way(block):
                self._residency.reserve(block)
            if is_used and block.buffer is not None and not block.is_current:
                self._residency.submit_copies(block, gathered=True)
            else:
                gathers.gather_for_others(block)

    def _load_updated(self) -> None:
        """Submits the loads that were put off, up to the first block whose update is not done."""
        waiting, self._put_off = self._put_off, {}
        for block in waiting:
            self.prefetch(block)

    def _fetch_ahead(self, *, but_not: frozenset[int]) -> None:
        """Begins to fetch blocks on disk that the plan loads next, as many as the staging ring holds. In the next
        cycle, it stops at the first block in `but_not`, as the homes of these change before.
        """
        if self._residency.fetching is None or self._course is None or self._course.strayed:
            return
        gathered = self._is_agreed if self._entry is not None else self._was_agreed
        for index in self._course.coming_loads(but_not=but_not):
            if not self._residency.fetch_ahead(self._blocks[index], gathered=gathered):
                return

    def _follow_evictions(self, indexes: Iterable[int], but_not: Sequence[int] = ()) -> None:
        """Evicts blocks that the plan no longer needs, unless they are in `but_not`.

        The plan may give up a block only because it expects the homes to change before the next cycle. A further
        micro-batch would still find the copy current: so it stays until others need the room, or the homes change.
        """
        for index in indexes:
            block = self._blocks[index]
            if index in self._changed and self._course is not None and not self._course.comes_to(index):
                self._leaving[block] = None
            elif index not in but_not:
                self.evict(block)

    def _make_way(self, block: Block) -> bool:
        """Evicts blocks that the plan has let go of until `block` fits. Returns whether it does."""
        while not self._residency.fits(block) and self._leaving:
            self.evict(self._leaving.popitem()[0])
        return self._residency.fits(block)

    def evict(self, block: Block) -> None:
        """Evicts the block from the device, unless it is in use."""
        if block.is_free:
            self._put_off.pop(block, None)
            self._residency.evict(block)

    def _next_use(self, block: Block) -> float:
        if block.expert_key is not None:
            return 0  # experts that are modules make room among themselves
        if self._course is not None:
            return self._course.next_use(block.index)
        return self._clock - self._last_used.get(block, 0)  # unknown: the last used counts as needed first

    # learning ---------------------------------------------------------------------------------------------------------
    def _open(self, entry: Entry) -> None:
        self._meter.cycle_begins()
        self._module_experts.begin_cycle()
        last, self._course = self._course, None
        self._entry, self._records = entry, []
        self.take_turn(first=True, last=True)
        self._cycle_clock = self._clock
        self._note_changes()
        self._changed, self._changed_now = frozenset(self._changed_now), set()
        if self._residency.load_times_changed():
            self._book.forget_plans()
        trace = self._book.expect(entry)
        plan = None if trace is None else self._plan_for(trace)
        if trace is not None and plan is not None:
            self.plan = plan
            turn = last.turn + 1 if last is not None and last.plan is plan else 0
            self._course = Course(trace, plan, turn)
        self._is_agreed = False
        if self._gathers is not None and entry.gradients and entry.phase is Phase.FORWARD:
            self._agree_on_course(self._gathers, entry)
        self._drop_old_copies()
        self.load_ahead()
        self.everything_is_here = (
            (self._residency.share is None or not entry.gradients)  # else blocks may have to give way before backward
            and (
                not entry.gradients
                or (self._may_keep_weights and not self._has_module_experts and not self.shares.in_parts)
            )
            and self._course is not None
            and self._course.trace.refined
            and self.shares.beside_experts_bytes + self.slices.bytes_wanted
            <= self._residency.streaming_budget_bytes - self._residency.caches_planned_bytes()
            and self._all_are_current(self.shares.whole_blocks)
            and not self._needs_whole(self._course.trace)
        )
        if self.everything_is_here:  # one record for the whole cycle
            now, so_far = self._lanes.tick(), self._meter.lane_use.unplanned_bytes
            self._records.append(VisitRecord((), entry.phase, entry.site, now, now, so_far, self._meter.sample()))

    def _agree_on_course(self, gathers: Gathers, entry: Entry) -> None:
        """Agrees with the other ranks on the course of this pass, and on the blocks that are gathered in it."""
        first = [*self._old_residents(), *self._for_next_cycle]
        agreed = gathers.agree(None if self._course is None else gathers.offer(self._course, first))
        if agreed is not None:
            self._is_agreed, self._for_next_cycle = True, []
            self.plan = agreed.plan
            self._course = Course(self._book.of(entry, agreed.visits), agreed.plan, agreed.turn)

    def _all_are_current(self, blocks: Sequence[Block]) -> bool:
        """Whether these blocks are on the device with what their homes held when this cycle began, and are not being
        updated.
        """
        for block in blocks:
            if block.presence is not Presence.PRESENT or block.updates or block.loaded_generation != block.generation:
                return False
            if block.expert_key is not None and not block.is_current:  # `_note_changes` has not looked at it
                return False
        return True

    def _needs_whole(self, trace: Trace) -> bool:
        """Whether a visit of the trace needs a block as a whole that travels in parts."""
        in_parts = self.shares.in_parts
        return bool(in_parts) and any(not in_parts.isdisjoint(blocks) for blocks, _ in trace.visits)

    def _close(self) -> None:
        """Learns from the cycle that ends."""
        end = self._lanes.tick()
        entry, records, self._entry, self._records = self._entry, self._records, None, []
        course = self._course
        follows_plan = course is not None and not course.strayed
        took = course.trace.took if course is not None and follows_plan else None
        self._meter.cycle_ended(records, end, "" if entry is None else entry.site, took)
        if entry is None or not records or len(records) >= _MOST_RECORDED_VISITS:
            return
        if course is not None and follows_plan:
            self._book.followed(entry, course.trace)
            if self.everything_is_here:
                return
            if not course.trace.refined and len(records) == len(course.trace.visits):
                course.trace.compute_seconds = self._compute_seconds(records, end)
                course.trace.other_bytes = self._other_bytes(records)
                course.trace.refined = True
                course.trace.plans.clear()
            return
        visits = [(record.blocks, record.phase) for record in records]
        self._book.enter(entry, visits, self._compute_seconds(records, end), self._other_bytes(records))

    def _other_bytes(self, records: list[VisitRecord]) -> tuple[int, ...]:
        """For each visit, the bytes that it sent for beside whole blocks (`LaneUse.unplanned_bytes`); empty: none."""
        counts = [*(record.other_bytes_so_far for record in records), self._meter.lane_use.unplanned_bytes]
        return tuple(after - before for before, after in itertools.pairwise(counts)) if counts[0] < counts[-1] else ()

    def _compute_seconds(self, records: list[VisitRecord], end: object) -> tuple[float, ...]:
        return tuple(timing.compute_seconds for timing in self._meter.timings(records, end))

    def _plan_for(self, trace: Trace) -> Plan | None:
        """The plan for a trace with the blocks that change now. None: the planner failed; blocks come on demand."""
        caches_bytes = self._residency.caches_planned_bytes()
        key = self._changed, trace.repeats, self.shares.rows_bytes, caches_bytes
        if key in trace.plans:
            plan = trace.plans[key]
        else:
            plan = self._planner.make(
                trace,
                self._changed,
                in_parts_bytes=caches_bytes
                + self.shares.module_experts_bytes
                + (0 if self._needs_whole(trace) else self.slices.bytes_wanted),
                rows_bytes=self.shares.rows_bytes,
            )
        trace.keep_plan(key, plan)
        return plan
