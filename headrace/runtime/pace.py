"""How many bytes per second does a lane carry at most? As many as it is told, averaged over a window.

Copies that are held back wait on a thread, so that the submitting thread goes on. Each copy is cut into pieces of a
sixteenth of the bytes that a window allows. A piece begins when it fits into these bytes together with all pieces
that ended within the last window, and the thread waits for its end. So no window carries more, however long the lane
had to wait. A tensor with gaps between its elements is one piece; if it is too large, it follows a window without
copies.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from headrace.runtime.lanes import Copy, Event, Lane, Lanes, LateTransfer, Transfer
from headrace.runtime.threads import OneThread, wait_asleep

_PIECES = 16  # in a window
_LEAST_SECONDS = 1e-6  # of sleep, which rounding could make zero


class Pace:
    """Limits the speed of one model's copies to its device. Without a limit, they go to the lane at once."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._limit: tuple[int, float] | None = None  # the most bytes in any window, and its seconds
        self.is_limited = False
        self._thread: OneThread | None = None
        self._one_at_a_time = threading.Lock()
        self._ended: deque[tuple[float, int]] = deque()  # when pieces ended, and their bytes

    def limit(self, bytes_per_second: float | None, window_seconds: float) -> None:
        """Sets the limit from now on; None: no limit. To be called when no copy is under way."""
        self.is_limited = bytes_per_second is not None
        if bytes_per_second is None:
            self._limit = None
            return
        self._limit = max(1, int(bytes_per_second * window_seconds)), window_seconds
        if self._thread is None:
            self._thread = OneThread("headrace-pace", self.lanes.device)

    def submit(self, lane: Lane, copies: Sequence[Copy], after: Event) -> tuple[Transfer | LateTransfer, Event]:
        """Submits copies, within the limit. Never blocks. Also returns the event of their end."""
        if self._limit is None or self._thread is None:
            transfer = self.lanes.copy(lane, copies, after)
            return transfer, transfer.done
        nbytes = sum(source.nbytes for _, source in copies)
        late = LateTransfer(lane, nbytes, self._thread.submit(self.copy, lane, list(copies), after))
        return late, late

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Event) -> Transfer:
        """As `Lanes.copy`, on a thread of headrace's. With a limit, empties the list `copies` at once, and returns when
        they have arrived.
        """
        limit = self._limit
        if limit is None:
            return self.lanes.copy(lane, copies, after)
        wait_asleep(after)
        with torch.no_grad():
            pieces = deque(piece for copy in copies for piece in _pieces(*copy, max(1, limit[0] // _PIECES)))
        if isinstance(copies, list):
            copies.clear()  # so that nothing refers to the memory any more when the result is there
        nbytes = 0
        with self._one_at_a_time, torch.no_grad():
            first = last = self.lanes.copy(lane, (), after)
            while pieces:
                self._wait_for_turn(*limit, pieces[0][1].nbytes)
                last = self.lanes.copy(lane, [pieces[0]], after)
                first = first if nbytes else last
                wait_asleep(last.done)
                self._ended.append((time.perf_counter(), last.nbytes))
                nbytes += last.nbytes
                del pieces[0]
        return Transfer(lane, (), nbytes, first.begun, last.done)

    def _wait_for_turn(self, most_bytes: int, seconds: float, nbytes: int) -> None:
        while True:
            now = time.perf_counter()
            while self._ended and self._ended[0][0] <= now - seconds:
                self._ended.popleft()
            recent = sum(size for _, size in self._ended)
            if not recent or recent + nbytes <= most_bytes:
                return
            time.sleep(max(self._ended[0][0] + seconds - now, _LEAST_SECONDS))

    def wait(self) -> None:
        """Blocks until all copies that were submitted have arrived or failed."""
        if self._thread is not None:
            self._thread.submit(int).result()

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread when its work is done; `wait` blocks until then."""
        if self._thread is not None:
            self._thread.shutdown(wait=wait)


def _pieces(destination: torch.Tensor, source: torch.Tensor, nbytes: int) -> Iterator[Copy]:
    """Cuts one copy into copies of at most `nbytes` each."""
    elements = max(1, nbytes // source.itemsize)
    if not (destination.is_contiguous() and source.is_contiguous()) or source.numel() <= elements:
        yield destination, source
        return
    flat = destination.view(-1), source.view(-1)
    for begin in range(0, source.numel(), elements):
        yield flat[0][begin : begin + elements], flat[1][begin : begin + elements]
