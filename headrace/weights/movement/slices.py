"""How do experts come to the device? One by one, into slots of banks, where they stay until others need the room.

See docs/design/experts.md. A bank is one buffer of equal slots, so that a module can compute with it as with a weight
of as many experts as the bank has slots.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError, DiskError
from headrace.memory.buffers import plain_tensors, references_beside
from headrace.planning import Key, passes_through
from headrace.runtime.lanes import Copy, Event, Lane, LateTransfer, Transfer
from headrace.weights.meter import Meter
from headrace.weights.model.experts import SlicePart, slice_parts
from headrace.weights.movement.banks import Arrival, Bank
from headrace.weights.movement.block import Block, BlockPart
from headrace.weights.movement.host_experts import FEWEST_SLOTS, HostExpertCache
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.shares import Shares
from headrace.weights.rest.fetching import Target
from headrace.weights.rest.reads import Range


class Slices:
    """The experts of one model's blocks that travel one by one, and their banks."""

    def __init__(self, blocks: Iterable[Block], shares: Shares, residency: Residency, meter: Meter) -> None:
        self._shares = shares
        self._residency = residency
        self._lanes = residency.pace.lanes
        self._meter = meter
        self._blocks = [block for block in blocks if block.experts is not None]
        self.travel = bool(self._blocks)
        layouts = {block: slice_parts([param.layout for param in block.params]) for block in self._blocks}
        self._parts = {block: parts for block, (parts, _) in layouts.items()}
        self._bytes_of_one = {block: sum(part.nbytes for part in parts) for block, parts in self._parts.items()}
        self.slot_bytes = max((nbytes for _, nbytes in layouts.values()), default=0)
        self._banks: list[Bank] = []  # on the device
        self._host_cache: HostExpertCache | None = None  # experts in host memory, beside a disk; None: there are none
        self.unfinished: list[Callable[[], object]] = []  # each gives a module back its weights
        shares.banks_bytes = lambda: self.bytes_wanted

    # the budget -------------------------------------------------------------------------------------------------------
    @property
    def held_bytes(self) -> int:
        """The bytes of banks on the device."""
        return sum(bank.buffer.nbytes for bank in self._banks)

    @property
    def bytes_wanted(self) -> int:
        """The bytes that banks take, made or not: all that other weights leave of the budget, if experts need it."""
        banks, slots = self._sizes()
        return banks * slots * self.slot_bytes

    def _sizes(self) -> tuple[int, int]:
        """How many banks, and how many slots in each. All experts of a block fit in one bank, if there is room."""
        experts = [block.experts for block in self._blocks if block.experts is not None]
        if not experts:
            return 0, 0
        count = max(one.count for one in experts)
        beside_bytes = self._shares.beside_experts_bytes + self._shares.least_module_experts_bytes
        room = max(0, self._residency.streaming_budget_bytes - beside_bytes) // self.slot_bytes
        slots = max(min(room, sum(one.count for one in experts)), max(one.routed for one in experts))
        banks = max(1, slots // count)
        return banks, slots // banks

    def give_way(self) -> None:
        """Frees the memory of all banks for blocks. Whoever still refers to some of it keeps that."""
        while self._banks:
            bank = self._banks[-1]
            for slot in list(bank.arriving):
                self._settle(bank, slot)
            self._residency.changing += 1  # Ctrl-C may come before it is lowered
            self._banks.pop()  # only now: nobody would wait for copies into a bank that is not listed
            self._let_go(bank)
            self._residency.changing -= 1

    def use_host(self, nbytes: int) -> None:
        """From now on keeps experts of blocks on disk in `nbytes` of host memory when they leave the device."""
        layers = sum(block.is_fetched for block in self._blocks)
        if nbytes >= FEWEST_SLOTS * self.slot_bytes and layers:
            among = self._lanes, self._residency.ledger, self._meter
            self._host_cache = HostExpertCache(nbytes, self.slot_bytes, layers, *among)

    def leave_host(self) -> int:
        """The inverse of `use_host`: frees that memory, and returns its bytes. Not to be called during a pass."""
        cache = self._host_cache
        if cache is None:
            return 0
        self._residency.pace.wait()
        cache.wait()
        self._host_cache = None
        return cache.buffer.nbytes

    def bank_of(self, block: Block, used: int) -> Bank:
        """The bank for a call that uses `used` of the block's experts. Raises BudgetError where it has no room."""
        if not self._banks:
            self._make_banks()
        bank = self._banks[self._blocks.index(block) % len(self._banks)]
        for slot in list(bank.arriving):  # loads of a call that was broken off
            self._settle(bank, slot)
        if references_beside(bank.buffer):  # somebody keeps an expert, whose values must stay
            bank = self._made_anew(bank)
        bank.passing = block.experts is not None and passes_through(used, block.experts.count)
        return bank

    def has_room_for_all_of(self, block: Block) -> bool:
        """Whether all experts of the block fit beside the blocks in use."""
        in_use = (one for one in self._residency.with_buffers() if one.users and one.index >= 0 and one is not block)
        return block.nbytes + sum(one.nbytes for one in in_use) <= self._residency.streaming_budget_bytes

    def _make_banks(self) -> None:
        for block in self._blocks:
            if block.buffer is not None and block.is_free:
                self._residency.evict(block)
        banks, slots = self._sizes()
        nbytes = banks * slots * self.slot_bytes
        free_bytes = self._residency.clear(nbytes)
        if free_bytes < nbytes:  # something is in use that the sizes do not count
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
        self._residency.changing += 1  # Ctrl-C may come before it is lowered, also in a backward
        del self._banks[place]  # first: after Ctrl-C, a bank that is listed must be counted
        self._let_go(bank)
        new = Bank(self._residency.allot(bank.buffer.nbytes), self.slot_bytes, bank.layers)
        self._banks.insert(place, new)
        self._residency.changing -= 1
        return new

    def _let_go(self, bank: Bank) -> None:
        if self._host_cache is not None:
            self._lanes.wait(self._host_cache.all_left())
        self._residency.free(bank.buffer)

    def block_of(self, key: Key) -> Block:
        """The block that an expert is of."""
        return next(block for block in self._blocks if block.index == key[0])

    def slice_parts_of(self, block: Block) -> list[SlicePart]:
        """Where the slices of one expert of the block lie, in the order of the block's parameters."""
        return self._parts[block]

    def put_back_weights(self) -> None:
        """Gives modules their weights back after calls that were broken off, also by Ctrl-C."""
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
        """Submits loads of these experts into slots of the bank, and returns their slots. With `slots`, uses these.

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
        """Brings experts as `bring` does, but into the first `slots` slots, in the order of the experts' numbers.

        The same experts get the same slots each time, as a checkpoint recomputes with the numbers saved in forward.
        """
        count = 0 if block.experts is None else block.experts.count
        return self.bring(block, bank, experts, slots=experts if count <= slots else range(len(experts)))

    def place_of(self, tensor: torch.Tensor) -> tuple[Bank, int] | None:
        """The bank in which a tensor lies, and at which byte of it; None for any other tensor."""
        for bank in self._banks:
            begin = tensor.data_ptr() - bank.buffer.data_ptr()
            if 0 <= begin < bank.buffer.nbytes:
                return bank, begin
        return None

    def arrive(self, bank: Bank, slot: int) -> None:
        """Compute waits until an expert is in the slot. Raises the error that kept it from coming."""
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
        """Whether nobody refers to the bank's memory. The host first waits for experts on their way to `slots`."""
        done: list[Event] = []
        for slot in slots:
            if slot in bank.arriving:
                done.append(bank.arriving[slot].transfer.done)
                self.arrive(bank, slot)
        for event in done:
            event.synchronize()
        return not references_beside(bank.buffer)

    def views(self, block: Block, bank: Bank, first: int, count: int) -> list[torch.Tensor]:
        """The block's weights, as views of `count` slots of the bank from slot `first` on."""
        with plain_tensors(), torch.no_grad():
            return [part.view(bank.buffer, self.slot_bytes, first, count) for part in self._parts[block]]

    def view(self, block: Block, bank: Bank, slot: int, place: int) -> torch.Tensor:
        """One of the block's weights, the one at `place` among its parameters, as a view of one slot."""
        with plain_tensors(), torch.no_grad():
            return self._parts[block][place].view_of_one(bank.buffer, self.slot_bytes, slot)

    def _load(self, block: Block, key: Key, bank: Bank, slot: int, wanted: Collection[Key]) -> None:
        self._residency.changing += 1  # Ctrl-C may come before the bank knows of the copy, also in a backward
        host, kept = self._host_cache, None
        if host is not None and block.is_fetched:
            kept = host.take(key, bank.generation_of(block.index))
        self._empty(bank, slot, wanted)
        # From then on, nobody computes with what was in the slot, or copies it to the host.
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
                copies = [(place[0], own.source[key[1]]) for place, own in zip(places, block.params, strict=True)]
                arrival, read = self._copy(copies, after)
                block.last_read = read
        bank.arriving[slot] = arrival
        bank.hold(slot, key, passing=bank.passing)
        self._residency.changing -= 1

    def _copy(self, copies: Sequence[Copy], after: Event) -> tuple[Arrival, Event]:
        """Submits copies from host memory. Also returns the event after which that memory has been read.

        The arrival holds no reference to the bank's memory, as those are counted to find out who else uses the bank.
        """
        transfer, read = self._residency.pace.submit(Lane.ONLOAD, copies, after)
        if isinstance(transfer, Transfer):
            transfer = Transfer(transfer.lane, (), transfer.nbytes, transfer.begun, transfer.done)
        return Arrival(transfer, self._residency.next_number()), read

    def _fetch(self, block: Block, expert: int, bank: Bank, slot: int, after: Event) -> Arrival:
        ranges: list[Range] = []
        more: list[Copy] = []
        places = self.views(block, bank, slot, 1)
        for part, own, place in zip(self._parts[block], block.params, places, strict=True):
            if own.casts or own.in_place:
                first = part.layout.offset + expert * part.nbytes
                ranges.append(Range(first, part.nbytes, slot * self.slot_bytes + part.offset))
            else:  # `p.data = t`
                more.append((place[0], own.source[expert]))
        one = BlockPart(block, tuple(ranges))
        fetch = self._residency.way_from_disk().onload(one, Target(bank.buffer, after, more))
        return Arrival(LateTransfer(Lane.ONLOAD, one.own_bytes, fetch.arrived), None)

    def _empty(self, bank: Bank, slot: int, wanted: Collection[Key]) -> None:
        """Empties the slot. Its expert may go to the host cache, but never replaces one of `wanted` there."""
        self._settle(bank, slot)
        for key in bank.experts_in([slot]).values():
            if self._host_cache is not None and self.block_of(key).is_fetched:
                with plain_tensors(), torch.no_grad():
                    generation, passing = bank.generation_of(key[0]), bank.keeping.is_passing(key)
                    self._host_cache.keep(key, generation, bank.memory(slot), wanted, passing=passing)
            bank.forget(key)

    def _settle(self, bank: Bank, slot: int) -> None:
        """Compute waits for a copy into the slot that is no longer wanted, whether it succeeds or not."""
        with contextlib.suppress(DiskError):
            self.arrive(bank, slot)
