"""Which checkpoint is being written in this process? One at a time; the end of the process waits for it."""

import sys
import threading
from pathlib import Path
from typing import Protocol

from headrace.runtime.system import after_fork

__all__ = ["set_running", "settle_running", "wait_for_running"]


class Running(Protocol):
    """A checkpoint on its way."""

    path: Path

    def ended(self) -> None:
        """Waits until it has ended, well or not."""

    def settle(self) -> None:
        """Waits until it has ended. Raises what failed in it, if nobody was told before."""


_last: list[Running] = []


def set_running(saving: Running) -> None:
    """This one was begun."""
    _last[:] = [saving]


def settle_running() -> None:
    """Waits until none is being written. Raises what failed in the last one, if nobody was told before."""
    for saving in tuple(_last):
        saving.settle()


def wait_for_running() -> None:
    """Waits until none is being written; what failed is for whoever asks."""
    for saving in tuple(_last):
        saving.ended()


def _end() -> None:
    """At exit: it is whole, or it is said why not."""
    try:
        settle_running()
    except Exception as error:
        print(f"headrace.save: {_last[0].path} was not saved: {error}", file=sys.stderr)  # noqa: T201


after_fork(_last.clear)  # a child has none of the threads that write
threading._register_atexit(_end)  # type: ignore[attr-defined]  # before models are let go of, if imported after that
