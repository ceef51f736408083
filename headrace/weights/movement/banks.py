"""Which experts are in which slots of the device, or of host memory where the CPU is the device?"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger
from headrace.planning import Keeping, Key
from headrace.runtime.lanes import Event, LateTransfer, Transfer
from headrace.weights.movement.block import Block

__all__ = ["Arrival", "Bank", "banks_in_host"]


@dataclass(frozen=True)
class Arrival:
    """A copy into a slot that compute has not been told to wait for."""

    transfer: Transfer | LateTransfer
    number: int | None  # among those from host memory; None: from disk


class Bank:
    """Equal slots in one buffer, and what is in them: experts of so many blocks. `in_host`: of the host budget."""

    def __init__(self, buffer: torch.Tensor, slots: int, blocks: int, *, in_host: bool = False) -> None:
        self.buffer = buffer
        self.slots = slots
        self.blocks = blocks
        self.in_host = in_host
        self.places: dict[Key, int] = {}
        self.arriving: dict[int, Arrival] = {}  # by slot
        self.keeping = Keeping(slots, blocks)
        self.called: tuple[Block, tuple[int, ...]] | None = None  # which block's experts the call under way has
        self.passing = False  # whether that uses nearly all of them
        self.read: dict[int, Event] = {}  # ends of copies out of slots
        self._holds: list[Key | None] = [None] * slots
        self._generations: dict[int, int] = {}  # of a block's homes when its experts were loaded

    def forget_stale(self, block: Block, generation: int) -> None:
        """Experts of the block that were loaded from another generation of its homes are gone."""
        if self._generations.get(block.index) != generation:
            for key in [key for key in self.places if key[0] == block.index]:
                self.forget(self.places[key])
            self._generations[block.index] = generation

    def generation_of(self, block: Block) -> int:
        """The generation of its homes when its experts were loaded; -1: none was."""
        return self._generations.get(block.index, -1)

    def expert_in(self, slot: int) -> Key | None:
        """What is in the slot, or on its way."""
        return self._holds[slot]

    def slot_for(self, block: Block, kept: Collection[Key]) -> int:
        """The slot for another expert of the block; of none that is kept."""
        free = self.free_slot()
        return self.places[self.keeping.victim(block.index, self.places, kept)] if free is None else free

    def free_slot(self) -> int | None:
        """One that nothing is in."""
        for slot, key in enumerate(self._holds):
            if key is None or self.places.get(key) != slot:  # the latter where Ctrl-C came between the two
                return slot
        return None

    def has_slots_for(self, block: Block, experts: Collection[int]) -> bool:
        """Whether these experts of the block are here, or have free slots."""
        missing = sum((block.index, expert) not in self.places for expert in experts)
        return missing <= self.slots - len(self.places)

    def memory(self, slot: int, slot_bytes: int) -> torch.Tensor:
        """The bytes of one slot."""
        return self.buffer[slot * slot_bytes : (slot + 1) * slot_bytes]

    def hold(self, slot: int, key: Key) -> None:
        """An expert is on its way to the slot, which nothing was in."""
        self._holds[slot] = key
        self.places[key] = slot
        self.keeping.came(key, passing=self.passing)

    def forget(self, slot: int) -> None:
        """What is in the slot is nothing any more."""
        key, self._holds[slot] = self._holds[slot], None
        if key is not None:
            self.places.pop(key, None)
            self.keeping.went(key)


def banks_in_host(
    slots: int, slot_bytes: int, device_slots: int, layers: Sequence[Block], ledger: Ledger
) -> dict[Block, Bank]:
    """By block, its bank. Together they have so many slots, and as large a share of the layers as of all slots: the
    other layers use the banks on the device.
    """
    own = layers[: max(1, round(len(layers) * slots / (slots + device_slots)))]
    banks = max(1, min(slots // max(block.experts.count for block in own if block.experts is not None), len(own)))
    slots //= banks
    nbytes = slots * slot_bytes
    arena = Arena(banks * nbytes, torch.device("cpu"), ledger, "weights")
    found: dict[Block, Bank] = {}
    for first in range(banks):
        bank = Bank(arena.tensor(first * nbytes, nbytes), slots, len(own[first::banks]), in_host=True)
        found |= dict.fromkeys(own[first::banks], bank)
    return found
