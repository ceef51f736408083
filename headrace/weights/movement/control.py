"""When do a user's wishes make copies go, wait or be made anew? The part of the handle that says so."""

import contextlib
import math
from collections.abc import Iterator

from headrace.config import Size, parse_bytes
from headrace.errors import StateError
from headrace.runtime.lanes import Lane, Lanes
from headrace.runtime.pace import Pace
from headrace.weights.movement.block import Block
from headrace.weights.movement.executor import Executor

__all__ = ["CopyControl"]

_LEAST_BYTES = 4096  # in a window: each copy of so few bytes takes longer than they do


class CopyControl:
    """Copies ahead are put off for a while, all of them slowed down, or made anew."""

    _attachment: object  # None: the handle was removed
    _executor: Executor
    _lanes: Lanes
    _pace: Pace

    def _blocks(self) -> list[Block]:
        raise NotImplementedError

    @contextlib.contextmanager
    def copies_paused(self) -> Iterator[None]:
        """A context in which the link is left to others: weights are loaded when a pass needs them, and none ahead.

        Entering it waits until copies that are under way have arrived. Outside a pass, nothing is copied then; within
        one, only what its computation needs: weights on demand, and its own gradients and activations. Loads that were
        put off start when the context is left. Enter it in the thread that calls the model, as often as you like.
        Raises StateError after `remove()`.
        """
        self._check_offloaded("copies_paused()")
        self._executor.pause()
        try:
            self._wait_for_copies()
            yield
        finally:
            self._executor.resume(loads=self._attachment is not None)

    def limit_copies(self, bytes_per_second: Size | None, *, window_seconds: float = 0.1) -> None:
        """Limits the rate at which weights come to the device from now on, averaged over any `window_seconds`.

        The ceiling holds for weights from host memory and from disk alike: any window of that length carries at most
        `bytes_per_second * window_seconds` bytes, if no tensor with gaps between its elements is larger. Passes wait
        longer, and give the same results. Gradients and activations are not limited. None removes the limit. Raises
        TypeError or ValueError for an invalid rate or window, StateError after `remove()`.
        """
        self._check_offloaded("limit_copies()")
        rate = None if bytes_per_second is None else parse_bytes(bytes_per_second, name="bytes_per_second")
        if isinstance(window_seconds, bool) or not isinstance(window_seconds, int | float):
            raise TypeError(f"window_seconds={window_seconds!r} is a {type(window_seconds).__name__}; give seconds")
        if rate is not None and not (_LEAST_BYTES <= rate * window_seconds < math.inf):
            raise ValueError(
                f"bytes_per_second={bytes_per_second!r} with window_seconds={window_seconds!r} let"
                f" {rate * window_seconds:g} bytes through in a window; give both so that it is {_LEAST_BYTES} at least"
                " (None lifts the limit, and copies_paused() keeps the link free)"
            )
        self._wait_for_copies()
        self._pace.limit(rate, window_seconds)

    def refresh(self) -> None:
        """Renews the device's copies of parameters, after writes that cannot be noticed (through a kept `p.data`)."""
        for block in self._blocks():
            for slot in block.slots:
                slot.touch()
        self._executor.homes_changed()

    def _check_offloaded(self, what: str) -> None:
        if self._attachment is None:
            raise StateError(f"{what} came after remove(): the model is offloaded no more, and nothing is copied")

    def _wait_for_copies(self) -> None:
        """The host waits until the lanes are empty."""
        for block in self._blocks():
            if block.arrival is not None:
                block.arrival.done.synchronize()
        for lane in Lane:
            self._lanes.copy(lane, (), self._lanes.mark()).done.synchronize()
