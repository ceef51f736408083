"""What did the drive do, and when? The last reads and writes, each with its begin and end."""

import time
from collections import deque
from typing import NamedTuple

from headrace.memory.disk.requests import Access

_REMEMBERED = 4096


class Moved(NamedTuple):
    """Bytes of `what` that were read or written between two moments, in seconds of `time.perf_counter`."""

    access: Access
    what: str
    nbytes: int
    begun_at: float
    ended_at: float


class DiskLog:
    """The reads and writes of one model. Threads that move bytes append to it."""

    def __init__(self) -> None:
        self._moves: deque[Moved] = deque(maxlen=_REMEMBERED)

    def note(self, access: Access, what: str, nbytes: int, begun_at: float) -> None:
        """Called when a read or write that began at `begun_at` is over."""
        self._moves.append(Moved(access, what, nbytes, begun_at, time.perf_counter()))

    def since(self, moment: float) -> list[Moved]:
        """The reads and writes that began at or after `moment`, in the order of their ends."""
        return [move for move in list(self._moves) if move.begun_at >= moment]
