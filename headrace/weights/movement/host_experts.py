"""Which single experts does host memory hold, beside a disk? Those that left the device and have not come back.

See docs/design/experts.md. Copies out of slots run on the onload lane, copies into them on the offload lane. Whoever
refills a slot of the device waits on the offload lane for what leaves that slot.
"""

from collections.abc import Collection

import torch

from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger
from headrace.planning import Key
from headrace.runtime.lanes import Event, Lane, Lanes, LateTransfer
from headrace.weights.meter import Meter
from headrace.weights.movement.banks import ExpertSlots

FEWEST_SLOTS = 2  # one expert leaves the host while another takes its place


class HostExpertCache(ExpertSlots):
    """Slots of `slot_bytes` in `nbytes` of host memory, at least FEWEST_SLOTS, for experts of `layers` layers."""

    def __init__(self, nbytes: int, slot_bytes: int, layers: int, lanes: Lanes, ledger: Ledger, meter: Meter) -> None:
        nbytes = nbytes // slot_bytes * slot_bytes
        super().__init__(Arena(nbytes, lanes.device, ledger, "weights").tensor(0, nbytes), slot_bytes, layers, spare=1)
        self._lanes = lanes
        self._meter = meter
        self._read: dict[int, Event] = {}  # ends of the last copies out of free slots, oldest first
        self._taken: int | None = None  # the slot that is about to be read

    def take(self, key: Key, generation: int) -> int | None:
        """The slot of an expert that goes to the device, and is then only there; None: it is not in host memory.

        The slot is not refilled before `was_taken`; it may be read after the event `all_left`.
        """
        self.forget_stale(key[0], generation)
        self._taken = self.places.get(key)
        if self._taken is not None:
            self.forget(key)
        return self._taken

    def was_taken(self, slot: int, read: Event) -> None:
        """Called when the copy out of the slot was submitted; it ends with `read`."""
        self._read[slot] = read
        self._taken = None

    def keep(self, key: Key, generation: int, source: torch.Tensor, wanted: Collection[Key], *, passing: bool) -> None:
        """Called when the device gives up an expert, which has arrived in `source`: keeps or drops it.

        Experts in `wanted` do not make room for it. `passing`: as for `Keeping.came`.
        """
        self.forget_stale(key[0], generation)
        if len(self.places) >= self.room:
            self.keeping.came(key, passing=passing)  # it competes with those that are held
            going = self.victim(key[0], wanted, key)
            self.keeping.went(key)
            if going is None or going == key:
                return
            self.forget(going)
        free = set(self.free_slots()) - {self._taken}
        slot = next((one for one in free if one not in self._read), None)
        slot = next(one for one in self._read if one in free) if slot is None else slot
        read = self._read.pop(slot, None)
        if isinstance(read, LateTransfer):
            read.synchronize()
        elif read is not None:
            self._lanes.copy(Lane.OFFLOAD, (), read)
        transfer = self._lanes.copy(Lane.OFFLOAD, [(self.memory(slot), source)], self._lanes.mark())
        self._meter.expert_kept_bytes += transfer.nbytes
        self._meter.arrived(transfer, "expert")
        self.hold(slot, key, passing=passing)

    def all_left(self) -> Event:
        """The event after which compute has done all work so far, and all experts that left the device have arrived."""
        return self._lanes.copy(Lane.OFFLOAD, (), self._lanes.mark()).done  # type: ignore[no-any-return]

    def wait(self) -> None:
        """The host waits until nothing is being copied into slots, or out of free ones."""
        self.all_left().synchronize()
        for read in list(self._read.values()):
            read.synchronize()
