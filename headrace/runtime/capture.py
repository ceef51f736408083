"""How are parameters copied as they are now, while training goes on? Whoever writes to them asks here first.

A checkpoint that is written in the background reads parameters and their state in an order of its own. An optimizer
calls `before_write` for what it is about to change; that waits until these have been read. A capture is known to its
own process: ranks that share parameters meet, after each has called it, before any of them writes.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from headrace.runtime.system import after_fork
from headrace.runtime.tensors import parameters_of

__all__ = ["Capture", "before_write", "begin_capture", "end_capture", "will_write"]


class Capture(Protocol):
    """Reads parameters and their state."""

    def expect(self, parameters: Sequence[Any]) -> None:
        """These parameters will count as written, though `hurry` is called before they are."""

    def hurry(self, parameters: Sequence[Any] | None) -> None:
        """Waits until these parameters (None: all), and their state, have been read."""


_captures: list[Capture] = []
_hooks: list[RemovableHandle] = []


def before_write(parameters: Iterable[Any] | None) -> None:
    """These parameters, or their state, are about to change; None: any."""
    for capture in tuple(_captures):
        parameters = None if parameters is None else list(parameters)
        capture.hurry(parameters)


def will_write(parameters: Sequence[Any]) -> None:
    """The versions of these parameters go up, before `before_write` is called for them."""
    for capture in tuple(_captures):
        capture.expect(parameters)


def begin_capture(capture: Capture) -> None:
    """From now on it is asked, by optimizers of PyTorch too.

    The hook on these stays: a thread that removed it would break the step that another is in.
    """
    _captures.append(capture)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def end_capture(capture: Capture) -> None:
    """It has read everything."""
    _captures.remove(capture)


def _before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not getattr(optimizer, "asks_before_write", False):
        before_write(parameters_of(optimizer))


def _forked() -> None:
    """A child has none of the threads that read."""
    _captures.clear()


after_fork(_forked)
