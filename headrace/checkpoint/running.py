"""Which checkpoint is being written in this process? One at a time; the end of the process waits for it."""

import contextlib
import sys
import threading
from pathlib import Path

from headrace.checkpoint.writing import Writing
from headrace.runtime.system import after_fork

__all__ = ["Saving", "settle_running", "wait_for_running"]


_last: list["Saving"] = []


class Saving:
    """A checkpoint that is being written. Writing begins when the object is made."""

    def __init__(self, path: Path, writing: Writing) -> None:
        self.path = path
        self._writing = writing
        self._told = False  # whether somebody was told how it ended
        writing.start()
        _last[:] = [self]

    @property
    def done(self) -> bool:
        """Whether saving has ended, with success or not."""
        return self._writing.done

    @property
    def nbytes(self) -> int:
        """The bytes of the checkpoint."""
        return self._writing.nbytes

    @property
    def seconds(self) -> float:
        """How long saving took; 0.0 before it is done."""
        return self._writing.seconds

    @property
    def waited_seconds(self) -> float:
        """How long optimizers' updates waited for the parameters to be read."""
        return self._writing.waited_seconds

    def wait(self) -> None:
        """Waits until the checkpoint is complete and safe from a loss of power. Raises the error if saving failed."""
        self._told = True
        self._writing.wait()

    def ended(self) -> None:
        """Waits until saving has ended, with success or not."""
        with contextlib.suppress(Exception):
            self._writing.wait()

    def settle(self) -> None:
        """Waits until saving has ended. Raises its error, if nobody has been told of it."""
        if self._told:
            self.ended()
        else:
            self.wait()


def settle_running() -> None:
    """Waits until no checkpoint is being written. Raises the error of the last one, if nobody was told of it."""
    for saving in tuple(_last):
        saving.settle()


def wait_for_running() -> None:
    """Waits until no checkpoint is being written. Raises nothing: the error is for whoever asks later."""
    for saving in tuple(_last):
        saving.ended()


def _end() -> None:
    """Called at exit: waits until the checkpoint is whole, or prints why it is not."""
    try:
        settle_running()
    except Exception as error:
        print(f"headrace.save: {_last[0].path} was not saved: {error}", file=sys.stderr)  # noqa: T201


after_fork(_last.clear)  # a forked child has none of the threads that write
threading._register_atexit(_end)  # type: ignore[attr-defined]  # before models are let go of, if imported after that
