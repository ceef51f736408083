"""How does a block come to the devices of all ranks of a node at once? Each brings a range, and gets the others'.

A rank may not decide alone which blocks are gathered, and in which order. In a pass with gradients, when all ranks have
met, the first rank says which plan it follows, and all follow it: the loads that the plan lists are gathered, in its
order, whatever becomes of the plan on a rank. A rank that has no use for a block takes part, too, outside its budget. A
rank may begin a gather at any time, but it begins all that come before it in that order first. Every other load (on
demand, without gradients, between passes) brings the whole block over the rank's own link. See docs/design/nodes.md.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headrace.errors import RankError
from headrace.memory.ledger import Ledger, Tier
from headrace.planning import Plan
from headrace.runtime.device_group import DeviceGroup
from headrace.runtime.lanes import CollectiveLane, Copy, Event, Lane, LateTransfer, Transfer
from headrace.runtime.node import Counters
from headrace.runtime.pace import Pace
from headrace.runtime.threads import OneThread, wait_asleep
from headrace.weights.meter import Meter
from headrace.weights.movement.block import Block, BlockPart
from headrace.weights.movement.common import CommonHomes
from headrace.weights.movement.trace import Course, VisitKey
from headrace.weights.rest.fetching import Fetch, Fetching, Target
from headrace.weights.rest.reads import Range

_PURPOSE = "gathers"  # for the ledger: memory of gathers in which a rank takes part for the others' sake
_BEGUN, _ENTERED, _BEFORE, _AGREED = range(4)  # counters
_MOST_AGREED = 64  # the most agreements that are remembered
_IN_A_PASS = 1 << 10  # numbers of agreements that each pass has


@dataclass(frozen=True)
class Agreed:
    """What all ranks follow in a pass: one turn of a plan for these visits, and the loads that are gathered, in order.

    `loads`: for each, the visit from which on it may begin, and the block's place among all of the model.
    """

    visits: tuple[VisitKey, ...]
    plan: Plan
    turn: int
    loads: tuple[tuple[int, int], ...]


class Gathered(LateTransfer):
    """A gather under way. Asking for its end waits until all ranks have begun it."""

    def __init__(self, nbytes: int, submitted: "Future[Transfer]", others_come: Callable[[], None]) -> None:
        super().__init__(CollectiveLane.GATHER, nbytes, submitted)
        self._others_come = others_come

    @property
    def done(self) -> Any:
        self._others_come()
        return super().done

    def settle(self) -> None:
        """Waits until nothing is being written to the buffer, whether the gather succeeds or not."""
        with suppress(Exception):
            self.synchronize()


class Gathers:
    """Gathers of one model's blocks on all ranks of a node."""

    def __init__(
        self, common: CommonHomes, blocks: Callable[[], Sequence[Block]], pace: Pace, meter: Meter, ledger: Ledger
    ) -> None:
        """`blocks`: gives all blocks of the model, the same on all ranks."""
        self._blocks = blocks
        self._common, self._node = common, common.node
        self._lanes, self._pace, self._meter, self._ledger = pace.lanes, pace, meter, ledger
        self._group = DeviceGroup(self._node, self._lanes.device)
        self._counters = Counters(self._node, 4)
        self._thread = OneThread("headrace-gather", self._lanes.device)
        self._agenda: deque[tuple[float, Block]] = deque()  # gathers to come: from which visit on, and the block
        self._begun = 0  # how many gathers this rank has ever begun
        self._known: list[Agreed] = []  # earlier agreements, the same on all ranks
        self._scratch: torch.Tensor | None = None  # where blocks are gathered that this rank has no use for
        self.fetching: Fetching | None = None  # fetches blocks from disk; None: nothing rests there

    # what all ranks do -----------------------------------------------------------------------------------------------
    def agree(self, offer: Agreed | None) -> Agreed | None:
        """Called on all ranks, after they have met. Returns what the first rank offers; None: nothing is gathered.

        First, each rank begins what any rank has begun of the pass before. The rest of that pass's gathers is dropped.
        """
        base, number = self._common.passes * _IN_A_PASS, 0
        if self._node.is_first and offer is not None:
            number = 1 + (self._known.index(offer) if offer in self._known else len(self._known))
        self._counters.post(_BEFORE, self._begun)
        self._counters.post(_AGREED, base + number)
        self._counters.wait(_AGREED, base, f"forward {self._common.passes}")
        furthest = max(self._counters.of(rank, _BEFORE) for rank in range(self._node.size))
        while self._begun < furthest:
            self.gather_for_others(self._agenda.popleft()[1])
        self._agenda.clear()
        if self._scratch is not None:
            self._ledger.add(Tier.DEVICE, _PURPOSE, -self._scratch.nbytes)
            self._scratch = None
        number = self._counters.of(0, _AGREED) - base
        if number > len(self._known):
            told: Agreed = self._node.from_first(offer, "the plan of its pass")
            if len(self._known) == _MOST_AGREED:
                self._known.clear()
                number = 1
            self._known.append(told)
        if not number:
            return None
        agreed, blocks = self._known[number - 1], self._blocks()
        self._agenda.extend((visit, blocks[place]) for visit, place in agreed.loads)
        return agreed

    def offer(self, course: Course, first: Iterable[Block]) -> Agreed:
        """What all ranks are to follow, made of a course. The blocks `first` come when the pass begins."""
        places = {block: place for place, block in enumerate(self._blocks())}
        streamed = {block.index: block for block in places if block.index >= 0}
        turn = course.turn % len(course.plan.cycles)
        loads = [(-1, block) for block in first]
        for visit in range(len(course.trace.visits)):
            loads += [(visit, streamed[index]) for index in course.plan.step(turn, visit).loads]
        gathered = tuple((visit, places[block]) for visit, block in loads)
        return Agreed(course.trace.visits, course.plan, turn, gathered)

    def due(self, position: float) -> Block | None:
        """The block that is to be gathered next, if that may begin at this visit; else None."""
        return self._agenda[0][1] if self._agenda and self._agenda[0][0] <= position else None

    def is_due(self, block: Block, position: float) -> bool:
        """Whether the block is to be gathered at this visit."""
        return any(one is block and begin <= position for begin, one in self._agenda)

    def begin(self) -> None:
        """Called when the gather that is due next begins."""
        self._agenda.popleft()

    def keep_up(self) -> None:
        """Begins the gathers that other ranks have begun. Called while this rank waits for their gradients, as they may
        be waiting for it: ranks that use layers differently have the same gradient at different visits.
        """
        while self._agenda and any(self._counters.of(rank, _BEGUN) > self._begun for rank in range(self._node.size)):
            self.gather_for_others(self._agenda.popleft()[1])

    # gathers ---------------------------------------------------------------------------------------------------------
    def onload(
        self, block: Block, buffer: torch.Tensor, copies: Sequence[Copy], after: Event
    ) -> tuple[Gathered, Event]:
        """Submits the gather that fills a block's buffer, without waiting. Also returns the end of reading the homes.

        `copies`: first that of the whole block, where it rests in memory; then those that come on top of it.
        """
        part = self.part_of(block)
        brought: Transfer | LateTransfer
        read: Event
        if block.is_fetched and self.fetching is not None:
            others = list(copies)
            fetch = self.fetching.onload(part, Target(buffer, after, ()))
            brought, read = LateTransfer(Lane.ONLOAD, part.own_bytes, fetch.arrived), fetch
        else:
            (_, memory), *others = copies
            brought, read = self._pace.submit(Lane.ONLOAD, part.copies(buffer, memory), after)
        number, what = self._begins(block)
        submitted = self._thread.submit(self._gather, brought, buffer.detach(), part, others, number)
        self._meter.onloaded(brought.nbytes + sum(source.nbytes for _, source in others))

        def others_come() -> None:
            with self._counters.unbroken():
                self._counters.wait(_BEGUN, number, what)

        gathered = Gathered(len(buffer), submitted, others_come)
        return gathered, gathered if others else read

    def part_of(self, block: Block) -> "OwnPart":
        """What this rank brings of a block: its range (all ranks' are equal), and the rest behind these."""
        unit, ranks = block.rest.range_bytes, self._node.size
        length = block.nbytes // ranks // unit * unit
        own = self._node.rank * length, length
        behind = ranks * length, block.nbytes - ranks * length
        ranges = tuple(Range(first, nbytes, first) for first, nbytes in (own, behind) if nbytes)
        return OwnPart(block, ranges, ranks * length)

    def gather_for_others(self, block: Block) -> None:
        """Begins a gather for the other ranks' sake alone, into memory that this rank does not use."""
        block.wait_for_updates()
        if self._scratch is None or len(self._scratch) < block.nbytes:
            largest_bytes = max(one.nbytes for one in self._blocks())
            self._scratch = torch.empty(largest_bytes, dtype=torch.uint8, device=self._lanes.device)
            self._ledger.add(Tier.DEVICE, _PURPOSE, largest_bytes)
        part, whole, after = self.part_of(block), self._scratch[: block.nbytes].detach(), self._lanes.mark()
        bring: Callable[[], Transfer | LateTransfer]
        if block.is_fetched and self.fetching is not None:
            bring = partial(_fetched, self.fetching, self.fetching.promise(part), whole, after)
        elif block.rest.memory is not None:
            bring = partial(self._lanes.copy, Lane.ONLOAD, part.copies(whole, block.rest.memory), after)
        else:
            raise RankError(f"block {block.name!r} is to be gathered, and is not there on this rank")
        number, _ = self._begins(block)
        done = self._thread.submit(self._fill, bring, whole, part, number)
        block.last_read = LateTransfer(Lane.ONLOAD, part.own_bytes, done)
        self._meter.onloaded(part.own_bytes)

    def close(self) -> None:
        """Waits for what is under way, and ends the thread."""
        self._thread.shutdown(wait=True)
        self._group.close()

    def _begins(self, block: Block) -> tuple[int, str]:
        """Counts one more gather as begun. Returns its number, and what errors say that ranks wait for."""
        self._begun += 1
        self._counters.post(_BEGUN, self._begun)
        return self._begun, _what(block.name)

    def _gather(
        self,
        brought: Transfer | LateTransfer,
        buffer: torch.Tensor,
        part: "OwnPart",
        others: Sequence[Copy],
        number: int,
    ) -> Transfer:
        """On the gather thread: the collective, once all ranks have come to it."""
        end, name = part.gathered_bytes, part.block.name
        what = _what(name)
        with self._counters.unbroken():
            here = brought.done  # raises what kept the part from coming, before other ranks count on it
            self._counters.come(_ENTERED, number, what, in_pass=False)
            rows = buffer[:end].view(self._node.size, -1) if end else None
            moved = self._lanes.together(
                CollectiveLane.GATHER, lambda: None if rows is None else self._group.gather(rows, what), end, here
            )
            self._meter.arrived(brought, name)
            if others:
                late = self._lanes.copy(Lane.ONLOAD, others, moved.done)
                moved = Transfer(CollectiveLane.GATHER, (), moved.nbytes, moved.begun, late.done)
        return moved

    def _fill(
        self, bring: Callable[[], Transfer | LateTransfer], scratch: torch.Tensor, part: "OwnPart", number: int
    ) -> Transfer:
        """On the gather thread: a gather that this rank does not need. Waits for it, as the next may use its memory."""
        moved = self._gather(bring(), scratch, part, (), number)
        wait_asleep(moved.done)
        return moved


def _what(name: str) -> str:
    return f"its range of {name!r}"


@dataclass(frozen=True)
class OwnPart(BlockPart):
    """What this rank brings of a block: its range of the first `gathered_bytes`, which ranks send each other, and all
    bytes behind these.
    """

    gathered_bytes: int = 0
    always = True

    @property
    def nbytes(self) -> int:
        """The bytes of the whole block, as all of it comes to the device."""
        return self.block.nbytes

    def copies(self, buffer: torch.Tensor, memory: torch.Tensor) -> list[Copy]:
        """The copies of these ranges from `memory`, in which the block rests, to its buffer."""
        return [(buffer[at : at + nbytes].detach(), memory[at : at + nbytes]) for at, nbytes, _ in self.ranges]


def _fetched(fetching: Fetching, fetch: Fetch, scratch: torch.Tensor, after: Event) -> LateTransfer:
    """On the gather thread: asks for a fetch that was promised, and waits for it."""
    try:
        fetch.ask(Target(scratch, after, ()))
        fetch.arrived.exception()
    finally:
        fetching.kept(fetch)
    return LateTransfer(Lane.ONLOAD, fetch.nbytes, fetch.arrived)
