"""Which items of a forward are on the device now, and which of them may go first? Counted as they change.

Looking at all items at every save and use would take the host longer the more items there are. So changes are noted,
and only changed items are looked at. Code that moves an item notes it; a weak reference notes an item that ends. A note
stays until it has been dealt with, which may happen twice: see Interrupts in docs/design/activations.md.
"""

import math
import weakref
from collections import deque
from collections.abc import Sequence

from headrace.activations.item import Item, Presence
from headrace.memory.least import LeastTree

Items = Sequence[weakref.ref[Item]]  # the items of a trace, in the order of saving


_GONE = (0, 0)


class _Note(weakref.ref[Item]):
    """A weak reference to an item; it is queued when something about the item may have changed."""

    __slots__ = ("index", "seen")

    index: int
    seen: tuple[int, int]  # at the last look: its bytes on the device, and 1 if it was being copied out


class ResidentIndex:
    """`nbytes` of items were on the device at the last `look()`; `leaving` of these items were being copied out."""

    def __init__(self, items: Items) -> None:
        self.nbytes = 0
        self.leaving = 0
        self._notes: deque[_Note] = deque()
        self._of: dict[int, _Note] = {}  # by the item's index
        self._to_send = LeastTree()  # the bytes to copy, by index: 0 if the item is being copied out already
        self._stale: dict[int, _Note] = {}  # the items for which `_to_send` is out of date, by index
        for ref in items:
            item = ref()
            if item is not None:
                self.note(item)

    def note(self, item: Item) -> None:
        """Has the item counted at the next look: it is on the device, or will be soon."""
        note = self._of.get(item.index)
        if note is None:
            note = _Note(item, self._notes.append)
            note.index, note.seen = item.index, _GONE
            self._of[item.index] = note
            item.goes = self._goes
        self._notes.append(note)

    def _goes(self, item: Item) -> None:
        """Called right before the device memory of the item goes."""
        note = self._of[item.index]
        if note.seen != _GONE:
            self._notes.append(note)

    def look(self) -> None:
        """Counts the items that have changed."""
        while self._notes:
            note = self._notes[0]
            old, new = note.seen, _state(note())
            nbytes, leaving = self.nbytes + new[0] - old[0], self.leaving + new[1] - old[1]
            self.nbytes, self.leaving, note.seen, self._stale[note.index] = nbytes, leaving, new, note  # no calls
            self._notes.popleft()

    def first(self, index: int, most_bytes: int) -> Item | None:
        """The first item from `index` on that is being copied out, or has at most `most_bytes` to copy."""
        while self._stale:
            stale = next(iter(self._stale))
            nbytes, leaving = self._stale[stale].seen
            self._to_send.put(stale, math.inf if nbytes == 0 else 0 if leaving else nbytes)
            del self._stale[stale]
        found = self._to_send.first(index, most_bytes)
        while found is not None:
            item = self._of[found]()
            if item is not None:
                return item
            found = self._to_send.first(found + 1, most_bytes)
        return None


def _state(item: Item | None) -> tuple[int, int]:
    if item is None or item.memory is None:
        return _GONE
    return item.nbytes, int(item.presence is Presence.LEAVING)
