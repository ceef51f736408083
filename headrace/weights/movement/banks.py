"""Which experts are in which slots of a buffer, on the device or in host memory beside a disk (host_experts.py)?"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from headrace.planning import Keeping, Key
from headrace.runtime.lanes import LateTransfer, Transfer
from headrace.weights.movement.block import Block


class ExpertSlots:
    """Equal slots in one buffer, for experts of `layers` layers. `spare`: how many slots stay empty."""

    def __init__(self, buffer: torch.Tensor, slot_bytes: int, layers: int, *, spare: int = 0) -> None:
        self.buffer = buffer
        self._slot_bytes = slot_bytes
        self.slots = len(buffer) // slot_bytes
        self.room = self.slots - spare
        self.places: dict[Key, int] = {}  # the slot that each expert is in, or on its way to
        # `places` alone says what is where, so that Ctrl-C cannot leave it half said. These are for quick answers.
        self._last: list[Key | None] = [None] * self.slots  # by slot, its last expert, which may be elsewhere by now
        self._free = dict.fromkeys(range(self.slots))  # all free slots, and perhaps others
        self.keeping = Keeping(self.room, layers)
        self._generations: dict[int, int] = {}  # by layer, the generation of its homes when its experts were loaded

    def memory(self, slot: int) -> torch.Tensor:
        """The bytes of one slot."""
        return self.buffer[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def experts_in(self, slots: Iterable[int]) -> dict[int, Key]:
        """By slot, the experts that are in these slots, or on their way there."""
        last = ((slot, self._last[slot]) for slot in slots)
        return {slot: key for slot, key in last if key is not None and self.places.get(key) == slot}

    def free_slots(self) -> list[int]:
        """The slots that no expert is in, or on its way to."""
        return [slot for slot in self._free if not self.experts_in([slot])]

    def hold(self, slot: int, key: Key, *, passing: bool) -> None:
        """Called when an expert is on its way to a slot that was free. `passing`: as for `Keeping.came`."""
        self._last[slot] = key
        self.keeping.came(key, passing=passing)  # before it has a place: else, after Ctrl-C, it would never go
        self.places[key] = slot
        self._free.pop(slot, None)

    def victim(self, layer: int, kept: Collection[Key], coming: Key | None = None) -> Key | None:
        """The expert that makes way for another one of the layer (see `Keeping.victim`); perhaps `coming`."""
        while (key := self.keeping.victim(layer, kept)) is not None and key not in self.places and key != coming:
            self.keeping.went(key)  # it has no place: Ctrl-C came in `hold` or `forget`
        return key

    def forget(self, key: Key) -> None:
        """Forgets an expert that is in a slot, which is free then."""
        self._free[self.places[key]] = None
        del self.places[key]
        self.keeping.went(key)

    def forget_stale(self, layer: int, generation: int) -> None:
        """Forgets experts of the layer that were loaded from another generation of its homes."""
        if self._generations.get(layer) != generation:
            for key in [key for key in self.places if key[0] == layer]:
                self.forget(key)
            self._generations[layer] = generation

    def generation_of(self, layer: int) -> int:
        """The generation of the layer's homes when its experts were loaded; -1: none was loaded."""
        return self._generations.get(layer, -1)


@dataclass(frozen=True)
class Arrival:
    """A copy into a slot that compute has not been told to wait for."""

    transfer: Transfer | LateTransfer
    number: int | None  # its number among copies from host memory; None: it is from disk


class Bank(ExpertSlots):
    """Slots on the device, with which modules compute."""

    def __init__(self, buffer: torch.Tensor, slot_bytes: int, layers: int) -> None:
        super().__init__(buffer, slot_bytes, layers)
        self.layers = layers
        self.arriving: dict[int, Arrival] = {}  # by slot
        self.in_call: tuple[Block, tuple[int, ...]] | None = None  # the block and the experts of the call under way
        self.passing = False  # whether that call uses nearly all experts of the block

    def slot_for(self, layer: int, kept: Collection[Key]) -> int:
        """The slot for another expert of the layer: a free one, or that of an expert which is not in `kept`."""
        free = self.free_slots()
        going = None if free else self.victim(layer, kept)
        return free[0] if going is None else self.places[going]
