"""On which streams does the model compute? Mostly on one; if on several, all of them wait for each copy.

Backward uses an item on the stream that saved it, so the memory into which it comes back belongs to that stream. But
memory that is let go of, on the device or the host, may be given out on another stream: so all streams wait.
"""

from typing import Any

import torch

from headrace.runtime.lanes import Event, Lanes


class ComputeStreams:
    """The streams on which activations were saved or used since the beginning."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._known: list[Any] = []

    def now(self) -> Any:
        """The stream that computes now. A new stream first waits for the others, which have waited for copies."""
        stream = self._lanes.compute_stream()
        if stream not in self._known:
            for other in self._known:
                self._order(before=other, after=stream)
            self._known.append(stream)
        return stream

    def wait(self, event: Event) -> None:
        """Makes every stream wait for the event."""
        for stream in self._known:
            with self._lanes.computing_on(stream):
                self._lanes.wait(event)

    def copy_of(self, memory: torch.Tensor, owner: Any) -> torch.Tensor:
        """The same bytes for the stream that computes now; `memory` belongs to another stream, `owner`."""
        copied = memory.clone()
        self._order(before=self.now(), after=owner)
        return copied

    def _order(self, *, before: Any, after: Any) -> None:
        with self._lanes.computing_on(before):
            reached = self._lanes.mark()
        with self._lanes.computing_on(after):
            self._lanes.wait(reached)
