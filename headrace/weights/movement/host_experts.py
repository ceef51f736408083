"""Which single experts does host memory hold, beside a disk? Those that the device gave up and has not got again.

See docs/design/experts.md. Copies out of slots run on the onload lane, copies into them on the offload lane, which is
also where whoever fills a slot of the device again waits for what leaves it.
"""

from collections import deque
from collections.abc import Collection, Iterable

import torch

from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger
from headrace.planning import Keeping, Key
from headrace.runtime.lanes import Event, Lane, Lanes, LateTransfer
from headrace.weights.meter import Meter

__all__ = ["FEWEST_SLOTS", "HostExpertCache"]

FEWEST_SLOTS = 2  # one expert leaves the host while another takes its place


class HostExpertCache:
    """`nbytes` of slots of `slot_bytes` in host memory, at least FEWEST_SLOTS, for experts of so many layers.

    An expert is of the generation that its block's homes had when it came to the device: of another one it is nothing.
    """

    def __init__(self, nbytes: int, slot_bytes: int, layers: int, lanes: Lanes, ledger: Ledger, meter: Meter) -> None:
        slots = nbytes // slot_bytes
        self._memory = Arena(slots * slot_bytes, lanes.device, ledger, "weights").tensor(0, slots * slot_bytes)
        self._slot_bytes = slot_bytes
        self._lanes = lanes
        self._meter = meter
        self._room = slots - 1
        self._keeping = Keeping(self._room, layers)
        self._free = deque(range(slots))  # what was read longest ago comes first
        self._read: dict[int, Event] = {}  # ends of the last copies out of free slots
        self._places: dict[Key, int] = {}
        self._generations: dict[Key, int] = {}

    def used(self, layer: int, experts: Iterable[int], *, passing: bool) -> None:
        """A call of the layer has used these, wherever they were."""
        self._keeping.used(layer, experts, passing=passing)

    def take(self, key: Key, generation: int, *, passing: bool) -> int | None:
        """The slot of an expert that goes to the device, and then stays there alone; None where it is not here.

        `passing`: for a call that uses nearly all of its layer's.
        """
        self._keeping.came(key, passing=passing)  # what it is worth when the device gives it up
        slot = self._places.pop(key, None)
        if slot is None or self._generations.pop(key) == generation:
            return slot
        self._free.append(slot)
        return None

    def memory(self, slot: int) -> torch.Tensor:
        """The slot's bytes, which may be read behind `all_left`."""
        return self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def was_taken(self, slot: int, read: Event) -> None:
        """The copy out of the slot was submitted, and ends with `read`."""
        self._read[slot] = read
        self._free.append(slot)

    def keep(self, key: Key, generation: int, source: torch.Tensor, wanted: Collection[Key]) -> None:
        """The device gives an expert up, which has arrived in `source`. It may be the one that finds no room here.

        Those that are wanted do not make room.
        """
        self._forget(key)
        if len(self._places) >= self._room:
            going = key
            if not all(other in wanted for other in self._places):
                going = self._keeping.victim(key[0], {*self._places, key}, wanted)
            if going == key:
                self._keeping.went(key)
                return
            self._forget(going)
        if not self._free:  # Ctrl-C has kept some from coming free
            return
        slot = self._free.popleft()
        read = self._read.pop(slot, None)
        if isinstance(read, LateTransfer):
            read.synchronize()
        elif read is not None:
            self._lanes.copy(Lane.OFFLOAD, (), read)
        self._meter.expert_given_up(self._lanes.copy(Lane.OFFLOAD, [(self.memory(slot), source)], self._lanes.mark()))
        self._generations[key] = generation
        self._places[key] = slot

    def all_left(self) -> Event:
        """When compute has done what it was given, and all that the device gave up has arrived here."""
        return self._lanes.copy(Lane.OFFLOAD, (), self._lanes.mark()).done  # type: ignore[no-any-return]

    def wait(self) -> None:
        """The host waits until nothing is copied into slots, or out of those that are free."""
        self.all_left().synchronize()
        for read in list(self._read.values()):
            read.synchronize()

    def _forget(self, key: Key) -> None:
        slot = self._places.pop(key, None)
        if slot is not None:
            del self._generations[key]
            self._keeping.went(key)
            self._free.append(slot)
