"""Which blocks are on the device? Onload, arrival and eviction of their buffers, within the budget.

The order of these operations across lanes is the subject of docs/design/ordering.md.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError, DiskError, RankError, StateError
from headrace.memory.buffers import DeviceBuffers, plain_tensors
from headrace.memory.ledger import Ledger
from headrace.memory.shared_budget import Share
from headrace.runtime.lanes import Event, Lane, LateTransfer
from headrace.runtime.link import LinkSpeed
from headrace.runtime.pace import Pace
from headrace.weights.meter import Meter
from headrace.weights.movement.addresses import Addresses
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.gathering import Gathered, Gathers
from headrace.weights.movement.packed_loads import PackedLoads
from headrace.weights.rest.fetching import Fetching, Target

NextUse = Callable[[Block], float]  # the larger, the later a block is needed again; infinity: not in sight


class Sized(Protocol):
    """What needs room on the device."""

    @property
    def nbytes(self) -> int: ...


class Residency:
    """The buffers of all blocks on one device, resident, visiting or arriving. `budget_bytes` caps their sum."""

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        pace: Pace,
        ledger: Ledger,
        meter: Meter,
        fetching: Fetching | None,
        gathers: Gathers | None,
        *,
        packed: bool,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.ledger = ledger
        self.held_bytes = 0
        self._residents_bytes = 0  # the part of `held_bytes` that resident blocks hold
        self.module_experts_bytes = 0  # the part that experts which are modules hold
        self._lanes = pace.lanes
        self._meter = meter
        self.pace = pace
        self.gathers = gathers  # None: no rank helps another
        self.fetch_from(fetching)
        self.begin_fetching: Callable[[], None] = lambda: None  # makes `fetching`; set by `Room`
        self.packed_loads = PackedLoads(device, pace.lanes, ledger, meter, wanted=packed)
        self._buffers = DeviceBuffers(device, ledger, budget_bytes)
        # Copies that compute was told to wait for, and the host has not waited for. Of those from host memory, the last
        # one that was submitted, with its number; of those from disk, which have an order of their own, all.
        self._consumed: tuple[int, Event] | None = None
        self._consumed_from_disk: list[Event] = []
        self._submitted: dict[Block, int] = {}  # the numbers of copies from host memory that are under way
        self._submissions = 0
        self.next_use: NextUse = lambda _: 0.0  # the block that is needed last makes room first
        # Onloads and evictions that have begun and not ended, also of banks; they nest. Above 0 while nothing runs: an
        # exception, or Ctrl-C, has broken one off, and `mend` is due.
        self.changing = 0
        self.addresses = Addresses(device)
        self.share: Share | None = None  # of the budget, if other models have it as well
        # The next three are set by `Caches`.
        self.caches_planned_bytes: Callable[[], int] = lambda: 0  # that plans leave for layers of caches
        self.caches_give_way: Callable[[], None] = lambda: None  # takes layers of caches off the device
        self.caches_mend: Callable[[], None] = lambda: None  # so does this, whatever was cut short
        self.is_paused: Callable[[], bool] = lambda: False  # whether nothing is loaded ahead now

    @property
    def streaming_budget_bytes(self) -> int:
        """The bytes that the budget leaves for blocks that come and go."""
        return self.budget_bytes - self._residents_bytes - self.packed_loads.held_bytes

    def fetch_from(self, fetching: Fetching | None) -> None:
        """Sets what fetches blocks from disk from now on; None: nothing rests on disk."""
        self.fetching = fetching
        if self.gathers is not None:
            self.gathers.fetching = fetching

    def way_from_disk(self) -> Fetching:
        """What fetches blocks from disk. It is opened here if Ctrl-C, after the first moves, prevented that."""
        if self.fetching is None:
            self.begin_fetching()
        if self.fetching is None:
            raise StateError("a block rests on disk, and there is no way from there")
        return self.fetching

    def with_buffers(self) -> Collection[Block]:
        """The blocks that have a buffer, also those that have yet to arrive in it."""
        return self.addresses.blocks()

    def fits(self, block: Sized) -> bool:
        """Whether the block, or a layer of a cache, can be onloaded without an eviction. Who shares the budget gives
        way to a pass.
        """
        if self.share is not None:
            return self._free_bytes(block.nbytes) >= block.nbytes
        return self.held_bytes + block.nbytes <= self.budget_bytes

    def _free_bytes(self, nbytes: int) -> int:
        """The bytes that blocks may take. Who shares the budget gives way first, if `nbytes` are wanted for a pass."""
        if self.share is None:
            return self.budget_bytes - self.held_bytes
        if self.share.may_claim:
            self.share.claim(self.budget_bytes - self.held_bytes - nbytes)
        allowed_bytes = self.budget_bytes - self.share.others_bytes
        self._buffers.limit(allowed_bytes)  # kept buffers are no others' memory
        return allowed_bytes - self.held_bytes

    def onload(self, block: Block) -> None:
        """Allocates a buffer and submits the copy. The caller has seen to it that the block fits."""
        self.reserve(block)
        self.submit_copies(block)

    def reserve(self, block: Block) -> None:
        """Gives the block a buffer, to be filled by `submit_copies`: new memory, or the memory in which it rests.

        The caller has seen to it that the block fits.
        """
        self.changing += 1
        with plain_tensors():
            arena = block.rest.memory if block.may_stay_at_home and block.stays_at_home else None
            buffer = self._buffers.allocate(block.nbytes) if arena is None else arena
            self.held_bytes += block.nbytes
            self._residents_bytes += block.nbytes if block.index < 0 else 0
            self.module_experts_bytes += block.nbytes if block.expert_key is not None else 0
            try:
                self.addresses.add(block, buffer)
                block.buffer = buffer
                block.loaded_generation = -1
                block.leaves.point(self._buffers.views(buffer, block.kind, block.layouts))
                block.allocated = self._lanes.mark()  # the copy comes after all earlier uses of this memory
                block.becomes(Presence.RESERVED)
            except BaseException:
                self._undo(block, buffer)
                raise
        self.changing -= 1
        if self.share is not None:
            self.share.note_peaks()

    def submit_copies(self, block: Block, *, gathered: bool = False) -> None:
        """Submits copies of what changed in the homes since the buffer was filled: of everything, if it never was.

        `gathered`: every rank copies its part of the whole block, and the devices exchange these parts.
        """
        if block.presence is Presence.ARRIVING and not self._outlive(block):
            self.reserve(block)
        if block.may_stay_at_home and block.is_at_home and not block.stays_at_home:
            self._leave_home(block)
        buffer = block.buffer
        if buffer is None:
            raise StateError(f"block {block.name!r} has no buffer to copy into")
        self.changing += 1
        with plain_tensors():
            try:
                self._submit(block, buffer, self.gathers if gathered else None)
            except BaseException:
                self._undo(block, buffer)
                raise
        self.changing -= 1

    def _leave_home(self, block: Block) -> None:
        """Gives the block a buffer of its own, even if it is bound: others may write from now on where it rests."""
        self.changing += 1
        block.keep_leaf_writes()
        block.becomes(Presence.ABSENT)
        if block.buffer is not None:
            self._free_buffer(block, block.buffer)
        self.changing -= 1
        self.reserve(block)

    def arrive(self, block: Block) -> None:
        """Compute waits for the block's last copy. Raises the error that kept a block from coming from disk."""
        if block.presence is Presence.ARRIVING and block.arrival is not None:
            try:
                done = block.arrival.done
            except BaseException:
                self._did_not_arrive(block)
                raise
            self.rely_on(done, self._submitted.pop(block, None))
            self._meter.arrived(block.arrival, block.name)
            block.becomes(Presence.PRESENT)

    def finish_arrival(self, block: Block) -> None:
        """The host waits for the block's last copy, if there is one. Raises the error that kept the block from coming,
        once: the block is then off the device, and its next use reads it again.
        """
        if block.arrival is not None:
            try:
                block.arrival.done.synchronize()
            except Exception:
                if block.presence is Presence.ARRIVING:
                    self._did_not_arrive(block)
                raise

    def _did_not_arrive(self, block: Block) -> None:
        """Takes a block that could not come off the device."""
        if self.fetching is not None:
            self.fetching.withdraw_all()  # fetches ahead of the same moment may have failed as well
        if block.buffer is not None:
            self._undo(block, block.buffer)

    def next_number(self) -> int:
        """The number of the copy from host memory that is about to be submitted."""
        self._submissions += 1
        return self._submissions

    def rely_on(self, done: Event, number: int | None) -> None:
        """Compute waits for a copy. `number`: that of `next_number`; None: the copy is from disk."""
        self._lanes.wait(done)
        if number is None:
            self._consumed_from_disk.append(done)
        elif self._consumed is None or number > self._consumed[0]:
            self._consumed = number, done

    def fetch_ahead(self, block: Block, *, gathered: bool) -> bool:
        """Submits the fetch of a block that is onloaded later; `gathered`: of this rank's part of it. False: no more
        can be fetched ahead now.
        """
        if self.fetching is None or not block.is_fetched:
            return True
        wanted = self.gathers.part_of(block) if gathered and self.gathers is not None else block
        return not block.being_updated and self.fetching.ahead(wanted, self.streaming_budget_bytes)

    def load_seconds(self, block: Block, link: LinkSpeed, gather_link: LinkSpeed | None = None) -> float:
        """Seconds that the slowest part of the way to the device takes for a block; `gather_link`: where gathered."""
        if gather_link is not None and self.gathers is not None:
            own_bytes = self.gathers.part_of(block).own_bytes
            fetch_seconds = 0.0 if self.fetching is None or not block.is_fetched else self.fetching.seconds(own_bytes)
            return max(fetch_seconds, link.load_seconds(own_bytes), gather_link.load_seconds(block.nbytes))
        if not block.is_fetched:
            return link.load_seconds(self.packed_loads.load_bytes(block))
        read_bytes = block.nbytes - block.packed.saved_bytes
        return max(0.0 if self.fetching is None else self.fetching.seconds(read_bytes), link.load_seconds(block.nbytes))

    def pack_loads(self, blocks: Iterable[Block], largest_bytes: int, link: LinkSpeed) -> bool:
        """Called between passes: from now on `blocks` that come repeatedly cross packed, if visits leave room."""
        nbytes = self.packed_loads.wanted_bytes(blocks, self.streaming_budget_bytes, largest_bytes)
        if not nbytes or self.pace.is_limited or self.clear(nbytes, (), lambda block: block.order) < nbytes:
            return False
        self.packed_loads.open(self.allot(nbytes), link)
        return True

    def load_times_changed(self) -> bool:
        """Whether load times have changed since the last call, between passes. Ends packed loads that do not pay."""
        if not self.packed_loads.is_worth_it():
            self._end_packed_loads()
        return self.packed_loads.changed()

    def _end_packed_loads(self) -> None:
        if self.packed_loads.held_bytes:
            self.changing += 1
            self.free(self.packed_loads.close())
            self.changing -= 1

    def wait_for_consumed_reads(self) -> None:
        """The host waits until every copy that compute relies on has read its homes."""
        if self._consumed is not None:
            self._consumed[1].synchronize()
            self._consumed = None
        while self._consumed_from_disk:
            self._consumed_from_disk[-1].synchronize()
            self._consumed_from_disk.pop()

    def evict(self, block: Block) -> None:
        """Lets go of the buffer. Whoever still refers to its memory keeps the memory, and reads the right values."""
        self.changing += 1
        if block.lent:
            block.take_back()
        # The memory goes back to the compute lane, so a copy into it must end before.
        outlived = block.presence is not Presence.ARRIVING or self._outlive(block)
        if outlived and block.buffer is not None:
            block.keep_leaf_writes()
            block.becomes(Presence.ABSENT)
            self._free_buffer(block, block.buffer)
        self.changing -= 1

    def _outlive(self, block: Block) -> bool:
        """Compute waits for a copy that is no longer wanted. False: it failed, and the block is away.

        The error is dropped, as nobody needs the copy: user code may have written pages while they came from disk, or a
        rank may have failed. If that persists, whoever needs the block next gets the error.
        """
        try:
            self.arrive(block)
        except (DiskError, RankError):
            return False
        return True

    def _free_buffer(self, block: Block, buffer: torch.Tensor) -> None:
        with plain_tensors():
            block.loaded_generation = -1
            block.leaves.point(None)
        self.addresses.remove(block)
        self.held_bytes -= block.nbytes
        self._residents_bytes -= block.nbytes if block.index < 0 else 0
        self.module_experts_bytes -= block.nbytes if block.expert_key is not None else 0
        block.buffer = block.arrival = None  # only now: after Ctrl-C before, `mend` finds it
        if buffer is not block.rest.memory:
            self._buffers.release(buffer)

    def _undo(self, block: Block, buffer: torch.Tensor) -> None:
        """Lets go of the buffer after an error or Ctrl-C during a copy: its contents are unknown."""
        self._finish_copies(block)
        block.lost()
        self._free_buffer(block, buffer)

    def _finish_copies(self, block: Block) -> None:
        """The host waits until nothing is being copied into the block's buffer, whether the copies succeed or not."""
        if block.is_fetched:
            block.wait_for_reads()
        if isinstance(block.arrival, Gathered):
            block.arrival.settle()
        self._finish_all_copies()

    def _finish_all_copies(self) -> None:
        """The host waits until all copies from host memory that were submitted are done."""
        self.pace.wait()
        self.packed_loads.finish()
        self._lanes.copy(Lane.ONLOAD, (), self._lanes.mark()).done.synchronize()  # behind what was submitted before

    def make_room(self, block: Block, keep: Iterable[Block]) -> None:
        """Evicts other blocks until `block` fits, the one that is needed last first; blocks whose memory a user keeps
        come at the very end; those in use, resident or in `keep` are never evicted.

        Raises BudgetError when even that is not enough.
        """
        if self.clear(block.nbytes, keep) < block.nbytes:
            self.caches_give_way()
        if not self.fits(block):
            self._end_packed_loads()
        if self.fits(block):
            return
        in_use = ", ".join(repr(other.name) for other in self.with_buffers())
        whole = " as a whole, as more is done with it than looking rows up," if block.row_bytes else ""
        others = "" if self.share is None else f", beside {format_bytes(self.share.others_bytes)} of other models"
        raise BudgetError(
            f"block {block.name!r} needs {format_bytes(block.nbytes)}{whole} while {format_bytes(self.held_bytes)} are"
            f" in use{' by ' + in_use if in_use else ''}{others}; device_memory allows"
            f" {format_bytes(self.budget_bytes)} for weights; raise it{'' if whole else ', or pass smaller blocks'}"
        )

    def clear(self, nbytes: int, keep: Iterable[Block] = (), next_use: NextUse | None = None) -> int:
        """Evicts blocks as `make_room` does until `nbytes` are free, or no more can go. Returns the bytes free then."""
        free_bytes = self._free_bytes(nbytes)
        if free_bytes < nbytes:
            self._evict_until(self.held_bytes - (nbytes - free_bytes), keep, next_use or self.next_use)
            free_bytes = self._free_bytes(nbytes)
        return free_bytes

    def _evict_until(self, most_bytes: int, keep: Iterable[Block], next_use: NextUse) -> None:
        """Evicts blocks as `make_room` does until `most_bytes` are held at most, or no more can go."""
        kept = {id(other) for other in keep}
        candidates = [
            other
            for other in self.with_buffers()
            if other.index >= 0
            and (not other.users or other.may_be_taken_back)
            and id(other) not in kept
            and not other.is_in_graph
        ]
        for other in sorted(candidates, key=lambda other: (other.is_free, next_use(other)), reverse=True):
            self.evict(other)
            if self.held_bytes <= most_bytes:
                break

    @property
    def device_bytes(self) -> int:
        """The bytes of device memory that this model takes now of a budget that it shares."""
        return self._buffers.device_bytes

    def check_turn(self) -> None:
        """Raises StateError if a pass cannot begin: a model that shares the budget computes on another thread."""
        if self.share is not None:
            self.share.check_turn()

    def pass_begins(self) -> None:
        """Called when a pass begins, or its backward: until `pass_ends`, who shares the budget gives way to it."""
        if self.share is not None:
            self.share.begin()
            self._free_bytes(0)  # for buffers of modules, which are about to come

    def pass_ends(self) -> None:
        """Called when a pass ends, or is broken off: who shares the budget gives way to it no more."""
        if self.share is not None:
            self.share.end()

    def give_way(self, nbytes: int) -> None:
        """Frees `nbytes` of the device for another model: memory that no block has, and then that of blocks."""
        self.caches_give_way()
        nbytes -= self._buffers.close()
        if nbytes > 0:
            self._evict_until(self.held_bytes - nbytes, (), self.next_use)
            self._buffers.close()

    def sleep(self) -> None:
        """Frees all device memory but that of blocks in use."""
        for block in list(self.with_buffers()):
            if not (block.users or block.is_in_graph):
                self.evict(block)
        self._end_packed_loads()
        self.caches_give_way()
        self._buffers.close()

    def allot(self, nbytes: int) -> torch.Tensor:
        """Allocates device memory within the budget that no block has; the caller has seen to it that it fits."""
        with plain_tensors():
            buffer = self._buffers.allocate(nbytes)
        self.held_bytes += nbytes
        if self.share is not None:
            self.share.note_peaks()
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """The inverse of `allot`: the caller gives up its reference."""
        self.held_bytes -= buffer.nbytes
        self._buffers.release(buffer)

    def check_resident(self, what: str, nbytes: int, largest: Block) -> None:
        """Raises BudgetError when `nbytes` more that stay would leave no room for the largest block."""
        if nbytes + largest.nbytes > self.streaming_budget_bytes:
            self._end_packed_loads()
        missing_bytes = nbytes + largest.nbytes - self.streaming_budget_bytes
        if missing_bytes > 0:
            raise BudgetError(
                f"what came after offload() stays on the device: {what} need {format_bytes(nbytes)} beside block"
                f" {largest.name!r} of {format_bytes(largest.nbytes)}; device_memory allows both "
                f"{format_bytes(self.streaming_budget_bytes)}; raise it by {format_bytes(missing_bytes, at_least=True)}"
                ", or call remove() on the handle, change the model, and offload it then"
            )

    def shrink(self, nbytes: int) -> None:
        """Makes the budget `nbytes` smaller, and evicts blocks that no longer fit. Not to be called during a pass."""
        self.budget_bytes -= nbytes
        for block in [block for block in self.with_buffers() if block.index >= 0]:
            if self.held_bytes > self.budget_bytes and not block.is_in_graph:
                self.evict(block)
        self._buffers.limit(self.budget_bytes)
        if self.share is not None:
            self.share.claim(self.budget_bytes - self.held_bytes)

    def mend(self, blocks: Iterable[Block], beside_bytes: int) -> None:
        """Called after an eviction or an onload was broken off: makes each block wholly present or wholly absent.

        `beside_bytes`: the bytes that banks of experts hold.
        """
        held: list[Block] = []
        blocks = list(blocks)
        for block in blocks:
            if block.is_fetched:
                block.wait_for_reads()  # a fetch may have been under way: its copies are submitted then
        self._finish_all_copies()  # also those that were not noted yet
        self.caches_mend()
        for block in blocks:
            buffer = block.buffer
            if block.presence is not Presence.ABSENT and self.addresses.has(block):
                held.append(block)
                if block.presence is Presence.RESERVED:
                    block.loaded_generation = -1  # it counts as not loaded, whatever was being submitted
            elif buffer is not None or block.presence is not Presence.ABSENT:
                self._finish_copies(block)
                block.lost()
                block.arrival = None
                with plain_tensors():
                    block.leaves.point(None)
                block.buffer = None
                if buffer is not None and buffer is not block.rest.memory:
                    self._buffers.release(buffer)
        self.addresses.reset(held)
        self.held_bytes = sum(block.nbytes for block in held)
        self._residents_bytes = sum(block.nbytes for block in held if block.index < 0)
        self.module_experts_bytes = sum(block.nbytes for block in held if block.expert_key is not None)
        self.held_bytes += self.packed_loads.held_bytes + beside_bytes
        self._buffers.rebook(self.held_bytes)  # nothing on the CPU, where blocks may be at home
        self.changing = 0

    def close(self) -> None:
        """Evicts everything, also blocks that could not come from disk."""
        for block in list(self.with_buffers()):
            self.evict(block)
        self._end_packed_loads()
        self._buffers.close()

    def _submit(self, block: Block, buffer: torch.Tensor, by: Gathers | None) -> None:
        # A copy into a new buffer begins as soon as its memory is free: compute submitted since then does not use it.
        after, block.allocated = block.allocated or self._lanes.mark(), None
        copies = block.prepare_copies(only_changes=by is None and block.presence is not Presence.RESERVED)
        if by is not None:
            self._submitted.pop(block, None)
            block.arrival, read = by.onload(block, buffer, copies, after)
            block.last_read = read
        elif not block.is_fetched:
            packs = self.packed_loads.is_open and not self.pace.is_limited
            arrival = self.packed_loads.onload(block, buffer, copies, after) if packs else None
            if arrival is None:
                block.arrival, done = self.pace.submit(Lane.ONLOAD, copies, after)
            else:
                block.arrival, done = arrival, arrival.done
            block.last_read = done
            self._submitted[block] = self.next_number()
        else:
            self._submitted.pop(block, None)
            fetch = self.way_from_disk().onload(block, Target(buffer, after, copies))
            block.last_read = fetch
            block.arrival = LateTransfer(Lane.ONLOAD, block.nbytes, fetch.arrived)
        block.becomes(Presence.ARRIVING)
        if by is None:
            self._meter.onloaded(block.arrival.nbytes)
