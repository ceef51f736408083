"""How do experts come to the device? One by one, into slots of banks, where they stay until others need the room.

See docs/design/experts.md. A bank is one buffer of equal slots, so that a module may compute with it as with a weight
that has as many experts as the bank has slots.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError, DiskError
from headrace.memory.buffers import plain_tensors, references_beside
from headrace.planning import Key, passes_through
from headrace.runtime.lanes import Copy, Event, Lane, Lanes, LateTransfer, Transfer
from headrace.weights.meter import Meter
from headrace.weights.model.experts import SlicePart, slice_parts
from headrace.weights.movement.banks import Arrival, Bank
from headrace.weights.movement.block import Block, BlockPart
from headrace.weights.movement.host_experts import FEWEST_SLOTS, HostExpertCache
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.shares import Shares
from headrace.weights.rest.fetching import Target
from headrace.weights.rest.reads import Range

__all__ = ["Slices"]


class Slices:
    """The experts of one model's blocks."""

    def __init__(
        self, blocks: Iterable[Block], shares: Shares, residency: Residency, lanes: Lanes, meter: Meter
    ) -> None:
        self._shares = shares
        self._residency = residency
        self._lanes = lanes
        self._meter = meter
        self._blocks = [block for block in blocks if block.experts is not None]
        self.travel = bool(self._blocks)
        layouts = {block: slice_parts([slot.layout for slot in block.slots]) for block in self._blocks}
        self._parts = {block: parts for block, (parts, _) in layouts.items()}
        self._bytes_of_one = {block: sum(part.nbytes for part in parts) for block, parts in self._parts.items()}
        self.slot_bytes = max((nbytes for _, nbytes in layouts.values()), default=0)
        self._banks: list[Bank] = []  # on the device
        self._host_cache: HostExpertCache | None = None  # what host memory keeps beside a disk; None: nothing
        self.unfinished: list[Callable[[], object]] = []  # give modules back what they had before stand-ins for weights
        shares.banks_bytes = lambda: self.bytes_wanted

    # the budget -------------------------------------------------------------------------------------------------------
    @property
    def held_bytes(self) -> int:
        """Of banks on the device."""
        return sum(bank.buffer.nbytes for bank in self._banks)

    @property
    def bytes_wanted(self) -> int:
        """What banks take, made or not: all that other weights leave of the budget, as far as experts need it."""
        banks, slots = self._sizes()
        return banks * slots * self.slot_bytes

    def _sizes(self) -> tuple[int, int]:
        """How many banks, and slots in each: in one for all experts of a block, if there is room for so many."""
        experts = [block.experts for block in self._blocks if block.experts is not None]
        if not experts:
            return 0, 0
        count = max(one.count for one in experts)
        beside_bytes = self._shares.beside_experts_bytes + self._shares.least_called_bytes
        room = max(0, self._residency.streaming_budget_bytes - beside_bytes) // self.slot_bytes
        slots = max(min(room, sum(one.count for one in experts)), max(one.routed for one in experts))
        banks = max(1, slots // count)
        return banks, slots // banks

    def give_way(self) -> None:
        """The memory of all banks is free for blocks. Whoever still refers to some of it keeps that."""
        while self._banks:
            bank = self._banks[-1]
            for slot in list(bank.arriving):
                self._settle(bank, slot)
            self._residency.intact = False  # Ctrl-C may come in between
            self._banks.pop()  # not before: what is copied into it would be waited for by nobody
            self._let_go(bank)
            self._residency.intact = True

    def use_host(self, nbytes: int) -> None:
        """From now on host memory of so many bytes has experts of blocks on disk that leave the device."""
        layers = sum(block.is_fetched for block in self._blocks)
        if nbytes >= FEWEST_SLOTS * self.slot_bytes and layers:
            among = self._lanes, self._residency.ledger, self._meter
            self._host_cache = HostExpertCache(nbytes, self.slot_bytes, layers, *among)

    def leave_host(self) -> None:
        """No more, and the memory is free. Not during a pass."""
        if self._host_cache is not None:
            self._residency.pace.wait()
            self._host_cache.wait()
            self._host_cache = None

    def bank_of(self, block: Block, used: int) -> Bank:
        """The bank for a call that uses so many of the block's experts. BudgetError: there is no room for it."""
        if not self._banks:
            self._make_banks()
        bank = self._banks[self._blocks.index(block) % len(self._banks)]
        for slot in list(bank.arriving):  # of a call that was broken off
            self._settle(bank, slot)
        if references_beside(bank.buffer):  # somebody keeps an expert, and shall keep its values
            bank = self._made_anew(bank)
        bank.passing = block.experts is not None and passes_through(used, block.experts.count)
        return bank

    def has_room_for_all_of(self, block: Block) -> bool:
        """Whether all of its experts fit beside the blocks in use."""
        in_use = (one for one in self._residency.present() if one.users and one.index >= 0 and one is not block)
        return block.nbytes + sum(one.nbytes for one in in_use) <= self._residency.streaming_budget_bytes

    def _make_banks(self) -> None:
        for block in self._blocks:
            if block.buffer is not None and block.is_free:
                self._residency.evict(block)
        banks, slots = self._sizes()
        nbytes = banks * slots * self.slot_bytes
        free_bytes = self._residency.clear(nbytes)
        if free_bytes < nbytes:  # something else is in use that is not always there
            banks, slots = 1, min(slots, free_bytes // self.slot_bytes)
        if not slots:
            raise BudgetError(
                f"one expert needs {format_bytes(self.slot_bytes)}, and device_memory leaves"
                f" {format_bytes(max(0, free_bytes))} beside the blocks in use; raise it by"
                f" {format_bytes(self.slot_bytes - free_bytes, at_least=True)}"
            )
        for _ in range(banks):
            buffer = self._residency.allot(slots * self.slot_bytes)
            self._banks.append(Bank(buffer, self.slot_bytes, -(-len(self._blocks) // banks)))

    def _made_anew(self, bank: Bank) -> Bank:
        place = self._banks.index(bank)
        self._residency.intact = False  # Ctrl-C may come in between, in a backward, too
        del self._banks[place]  # first: what is not counted any more is not there
        self._let_go(bank)
        new = Bank(self._residency.allot(bank.buffer.nbytes), self.slot_bytes, bank.layers)
        self._banks.insert(place, new)
        self._residency.intact = True
        return new

    def _let_go(self, bank: Bank) -> None:
        if self._host_cache is not None:
            self._lanes.wait(self._host_cache.all_left())
        self._residency.take_back(bank.buffer)

    def block_of(self, key: Key) -> Block:
        """Whose expert that is."""
        return next(block for block in self._blocks if block.index == key[0])

    def parts_of(self, block: Block) -> list[SlicePart]:
        """Where the parts of its experts' slices lie, in the order of its slots."""
        return self._parts[block]

    def put_back_weights(self) -> None:
        """Modules have what they had before calls that were broken off, also where Ctrl-C kept these from ending."""
        while self.unfinished:
            self.unfinished[-1]()
            self.unfinished.pop()

    # loads ------------------------------------------------------------------------------------------------------------
    def bring(
        self,
        block: Block,
        bank: Bank,
        experts: Sequence[int],
        *,
        keep: Iterable[int] = (),
        slots: Sequence[int] | None = None,
    ) -> list[int]:
        """Submits what it takes for these experts to be in slots of the bank: which ones. With `slots`, in these.

        `keep`: slots whose experts stay. The caller has seen to it that there are enough others.
        """
        block.keep_leaf_writes()
        bank.forget_stale(block.index, block.readable_generation())
        self._meter.expert_uses += len(experts)
        wanted = [(block.index, expert) for expert in experts]
        kept = {*wanted, *bank.experts_in(keep).values()}
        for place, key in enumerate(wanted):
            found = bank.places.get(key)
            slot = found if slots is None else slots[place]
            if found is not None and found == slot:
                continue
            if found is not None:
                self._empty(bank, found, wanted)
            self._load(block, key, bank, bank.slot_for(block.index, kept) if slot is None else slot, wanted)
            self._meter.expert_onloaded(self._bytes_of_one[block])
        bank.keeping.used(block.index, experts, passing=bank.passing)
        if self._host_cache is not None and block.is_fetched:
            self._host_cache.keeping.used(block.index, experts, passing=bank.passing)
        return [bank.places[key] for key in wanted]

    def bring_in_order(self, block: Block, bank: Bank, experts: Sequence[int], slots: int) -> list[int]:
        """As `bring`: into slots that ascend as the numbers of the experts do, among so many first ones.

        The same ones for the same experts: what a checkpoint computes again goes by what was saved in forward.
        """
        count = 0 if block.experts is None else block.experts.count
        return self.bring(block, bank, experts, slots=experts if count <= slots else range(len(experts)))

    def place_of(self, tensor: torch.Tensor) -> tuple[Bank, int] | None:
        """The bank in which a tensor lies, and bytes from its beginning; None for any other tensor."""
        for bank in self._banks:
            begin = tensor.data_ptr() - bank.buffer.data_ptr()
            if 0 <= begin < bank.buffer.nbytes:
                return bank, begin
        return None

    def arrive(self, bank: Bank, slot: int) -> None:
        """Compute waits until the expert is in the slot. Raises what kept it from coming."""
        arrival = bank.arriving.get(slot)
        if arrival is None:
            return
        try:
            done = arrival.transfer.done
        except BaseException:
            del bank.arriving[slot]
            for key in bank.experts_in([slot]).values():
                bank.forget(key)
            raise
        self._residency.rely_on(done, arrival.number)
        self._meter.arrived(arrival.transfer, "expert")
        del bank.arriving[slot]

    def is_unseen(self, bank: Bank, slots: Iterable[int]) -> bool:
        """Whether nobody has an expert of the bank. The host waits for those that are on their way to `slots`."""
        done: list[Event] = []
        for slot in slots:
            if slot in bank.arriving:
                done.append(bank.arriving[slot].transfer.done)
                self.arrive(bank, slot)
        for event in done:
            event.synchronize()
        return not references_beside(bank.buffer)

    def views(self, block: Block, bank: Bank, first: int, count: int) -> list[torch.Tensor]:
        """The block's weights as `count` slots of the bank have them, from the first on."""
        with plain_tensors(), torch.no_grad():
            return [part.view(bank.buffer, self.slot_bytes, first, count) for part in self._parts[block]]

    def view(self, block: Block, bank: Bank, slot: int, place: int) -> torch.Tensor:
        """One of the block's weights, the one at that place, as one slot has it."""
        with plain_tensors(), torch.no_grad():
            return self._parts[block][place].view_of_one(bank.buffer, self.slot_bytes, slot)

    def _load(self, block: Block, key: Key, bank: Bank, slot: int, wanted: Collection[Key]) -> None:
        self._residency.intact = False  # Ctrl-C may come before the bank knows of the copy, in a backward, too
        host, kept = self._host_cache, None
        if host is not None and block.is_fetched:
            kept = host.take(key, bank.generation_of(block.index), passing=bank.passing)
        self._empty(bank, slot, wanted)
        # Whoever computes with what was in the slot is done with it, and so is whoever copies it to the host.
        after = self._lanes.mark() if host is None else host.all_left()
        with plain_tensors(), torch.no_grad():
            if kept is None and block.is_fetched:
                arrival = self._fetch(block, key[1], bank, slot, after)
            elif host is not None and kept is not None:
                arrival, read = self._copy([(bank.memory(slot), host.memory(kept))], after)
                host.was_taken(kept, read)
                self._meter.expert_host_loads += 1
            else:
                places = self.views(block, bank, slot, 1)
                copies = [(place[0], own.source[key[1]]) for place, own in zip(places, block.slots, strict=True)]
                arrival, read = self._copy(copies, after)
                block.read_until(read)
        bank.arriving[slot] = arrival
        bank.hold(slot, key)
        self._residency.intact = True

    def _copy(self, copies: Sequence[Copy], after: Event) -> tuple[Arrival, Event]:
        """Submits copies from host memory; also returns when that has been read.

        The arrival does not keep the bank's memory: who counts those that do finds nobody.
        """
        transfer, read = self._residency.pace.submit(Lane.ONLOAD, copies, after)
        if isinstance(transfer, Transfer):
            transfer = Transfer(transfer.lane, (), transfer.nbytes, transfer.begun, transfer.done)
        return Arrival(transfer, self._residency.next_number()), read

    def _fetch(self, block: Block, expert: int, bank: Bank, slot: int, after: Event) -> Arrival:
        ranges: list[Range] = []
        more: list[Copy] = []
        places = self.views(block, bank, slot, 1)
        for part, own, place in zip(self._parts[block], block.slots, places, strict=True):
            if own.casts or own.in_place:
                first = part.layout.offset + expert * part.nbytes
                ranges.append((first, part.nbytes, slot * self.slot_bytes + part.offset))
            else:  # `p.data = t`
                more.append((place[0], own.source[expert]))
        one = BlockPart(block, tuple(ranges))
        fetch = self._residency.way_from_disk().onload(one, Target(bank.buffer, after, more))
        return Arrival(LateTransfer(Lane.ONLOAD, one.own_bytes, fetch.arrived), None)

    def _empty(self, bank: Bank, slot: int, wanted: Collection[Key]) -> None:
        """Nothing is in the slot any more: the host keeps it, if it keeps any, but not for one that is wanted."""
        self._settle(bank, slot)
        for key in bank.experts_in([slot]).values():
            if self._host_cache is not None and self.block_of(key).is_fetched:
                with plain_tensors(), torch.no_grad():
                    self._host_cache.keep(key, bank.generation_of(key[0]), bank.memory(slot), wanted)
            bank.forget(key)

    def _settle(self, bank: Bank, slot: int) -> None:
        """Compute waits for a copy into the slot that nobody wants any more, whatever came of it."""
        with contextlib.suppress(DiskError):
            self.arrive(bank, slot)
