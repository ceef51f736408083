"""Through which memory do bytes pass between disk and device? A ring of pinned slots, made once and used in turn."""

from collections import deque
from dataclasses import dataclass

import torch

from headrace.errors import StateError
from headrace.memory.arena import Arena
from headrace.memory.disk.extent import disk_pages
from headrace.memory.ledger import Ledger
from headrace.runtime.lanes import Event
from headrace.runtime.threads import Condition

_PURPOSE = "staging"


@dataclass(frozen=True)
class Slot:
    """One slot that one user has acquired. Its `memory` may be filled after the event `free` (None: at once)."""

    index: int
    memory: torch.Tensor  # uint8, (slot_bytes,), page-aligned, pinned for the device
    free: Event | None


class StagingRing:
    """`slots` slots of `slot_bytes` (rounded up to pages) of host memory, page-locked for `device`.

    Raises BudgetError, before anything is allocated, if the slots exceed the ledger's host budget.
    """

    def __init__(self, slot_bytes: int, slots: int, device: torch.device, ledger: Ledger) -> None:
        if slots < 1:
            raise ValueError(f"a staging ring of {slots} slots holds nothing; give one at least")
        self.slot_bytes = disk_pages(max(1, slot_bytes))
        arena = Arena(self.slot_bytes * slots, device, ledger, _PURPOSE)
        self._memory = [arena.tensor(index * self.slot_bytes, self.slot_bytes) for index in range(slots)]
        self._free: deque[tuple[int, Event | None]] = deque((index, None) for index in range(slots))
        self._taken: set[int] = set()
        self._changed = Condition()
        self._closed = False

    @property
    def free_slots(self) -> int:
        """Slots that `acquire` hands out without waiting."""
        with self._changed:
            return len(self._free)

    def acquire(self) -> Slot:
        """The free slot that was released first. Blocks until there is one; raises StateError if the ring is closed."""
        with self._changed:
            while not self._free and not self._closed:
                self._changed.wait()
            if self._closed:
                raise StateError("the staging ring is closed: its model was let go of")
            index, free = self._free.popleft()
            self._taken.add(index)
            return Slot(index, self._memory[index], free)

    def release(self, slot: Slot, after: Event | None) -> None:
        """Gives a slot back. Its bytes are needed until `after`, which its next user waits for. None: the caller needs
        them no longer, and the next user waits for the event that the slot was acquired with.
        """
        with self._changed:
            if slot.index not in self._taken:
                raise StateError(f"staging slot {slot.index} was released already")
            self._taken.remove(slot.index)
            self._free.append((slot.index, slot.free if after is None else after))
            self._changed.notify()

    def close(self) -> None:
        """Wakes the threads that wait, and lets go of the memory, which is freed when no slot is in use."""
        with self._changed:
            self._closed = True
            self._free.clear()
            self._memory.clear()
            self._changed.notify_all()
