"""How does the engine know that a backward is over? Autograd calls what was queued for its end, or lets go of it."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from millrace.engine.engine import Engine

__all__ = ["Backward", "EndOfBackward"]


class Backward:
    """One outermost backward."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine


class EndOfBackward:
    """Called by autograd when a backward completes. When it raises, autograd only lets go of this object."""

    _backward: Backward | None = None  # of one whose making was interrupted

    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def queue(self) -> None:
        """Autograd holds it until the backward under way is over."""
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def __call__(self) -> None:
        self._end(completed=True)

    def __del__(self) -> None:
        self._end(completed=False)

    def _end(self, *, completed: bool) -> None:
        if self._backward is not None:
            self._backward.engine.end_of_backward(self._backward, completed=completed)
