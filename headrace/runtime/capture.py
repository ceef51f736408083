"""How are parameters copied as they are now, while training goes on? Whoever writes to them asks here first.

A checkpoint that is written in the background reads parameters and their state in an order of its own. An optimizer
calls `before_write` for the parameters that it is about to change: this blocks until they have been read. Only its own
process knows a capture, so ranks that share parameters all call `before_write`, and meet before any of them writes.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from headrace.runtime.system import after_fork
from headrace.runtime.tensors import parameters_of


class Capture(Protocol):
    """Reads parameters and their state."""

    def expect(self, parameters: Sequence[Any]) -> None:
        """The versions of these parameters will go up before they are written; `hurry` is called before the write."""

    def hurry(self, parameters: Sequence[Any] | None) -> None:
        """Blocks until these parameters (None: all), and their state, have been read."""

    def spoilt(self, parameters: Sequence[Any]) -> None:
        """These parameters were written to without `hurry`: what was read of them may be part old, part new."""


_captures: list[Capture] = []
_hooks: list[RemovableHandle] = []
_changing = threading.Lock()


def before_write(parameters: Iterable[Any] | None) -> None:
    """Called before these parameters (None: any) or their state change. Blocks until all captures have read them."""
    with _changing:  # by the lock, this comes after the reads of captures that have ended
        captures = tuple(_captures)
    for capture in captures:
        parameters = None if parameters is None else list(parameters)
        capture.hurry(parameters)


def will_write(parameters: Sequence[Any]) -> None:
    """Called before the versions of these parameters go up, if `before_write` is called only later."""
    for capture in tuple(_captures):
        capture.expect(parameters)


def has_written(parameters: Iterable[Any]) -> None:
    """Called after a write before which nobody could ask. Captures that are under way fail."""
    written = list(parameters)
    for capture in tuple(_captures):
        capture.spoilt(written)


def begin_capture(capture: Capture) -> None:
    """From now on, writes wait for `capture`, those of PyTorch's optimizers too.

    The hook on PyTorch's optimizers is never removed: that would break a step that another thread is in.
    """
    _captures.append(capture)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def end_capture(capture: Capture) -> None:
    """Called when `capture` has read everything."""
    with _changing:
        _captures.remove(capture)


def is_ours(optimizer: Any) -> bool:
    """Whether an optimizer is headrace's own, which waits for each parameter when it is about to write it."""
    return bool(getattr(optimizer, "asks_before_write", False))


def _before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not is_ours(optimizer):
        before_write(parameters_of(optimizer))


def _forked() -> None:
    """Called in a forked child, which has none of the threads that read."""
    global _changing
    _captures.clear()
    _changing = threading.Lock()


after_fork(_forked)
