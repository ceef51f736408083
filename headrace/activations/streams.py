"""On which streams does the model compute? On one, mostly; on several, every step of an item holds for all of them.

What a stream saves, its backward uses on the same stream, so what comes back is allocated for that stream. But memory
that is let go of may be given out on another one, and so may host memory: they all wait.
"""

from typing import Any

import torch

from headrace.runtime.lanes import Event, Lanes

__all__ = ["ComputeStreams"]


class ComputeStreams:
    """The streams on which activations were saved or used since the beginning."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._known: list[Any] = []

    def now(self) -> Any:
        """The stream that computes now. One that is new waits for the others, which have waited for copies."""
        stream = self._lanes.compute_stream()
        if stream not in self._known:
            for other in self._known:
                self._order(before=other, after=stream)
            self._known.append(stream)
        return stream

    def wait(self, event: Event) -> None:
        """Every stream waits for the event."""
        for stream in self._known:
            with self._lanes.computing_on(stream):
                self._lanes.wait(event)

    def copy_of(self, memory: torch.Tensor, owner: Any) -> torch.Tensor:
        """The same bytes for the stream that computes now, where the memory belongs to another one."""
        copied = memory.clone()
        self._order(before=self.now(), after=owner)
        return copied

    def _order(self, *, before: Any, after: Any) -> None:
        with self._lanes.computing_on(before):
            reached = self._lanes.mark()
        with self._lanes.computing_on(after):
            self._lanes.wait(reached)
