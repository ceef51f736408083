"""How does a rank of a node tell others how far it has come, and wait for them? By numbers in memory that all share."""

import os
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from headrace.errors import StateError

__all__ = ["Counters", "mapped"]

_LOOK_SECONDS = 0.2  # between two checks that the ranks that are waited for have not ended
_LONGEST_PAUSE_SECONDS = 1e-3


class Together(Protocol):
    """The ranks that share the numbers: a `Node`."""

    rank: int
    size: int

    def share(self, nbytes: int) -> int:
        """A descriptor of `nbytes` of memory that all ranks share, zero at first."""

    def check(self, rank: int, what: str, waited_seconds: float, still: Callable[[], bool], *, in_pass: bool) -> None:
        """Raises RankError if it is in vain to wait for that rank any longer, and `still()` it has not come."""


class Counters:
    """`count` numbers for each rank of a node, which only grow. A rank posts its own, and waits for the others'."""

    def __init__(self, node: Together, count: int, cells: memoryview | None = None) -> None:
        """A collective. `cells`: memory that all ranks share, with 8 bytes for each number; None: it is made."""
        self._node = weakref.ref(node)
        self._count, self._rank, self._size = count, node.rank, node.size
        self._owner = os.getpid()
        nbytes = 8 * count * node.size
        self._cells = (mapped(node.share(nbytes), nbytes) if cells is None else cells[:nbytes]).cast("q")
        self._broken: BaseException | None = None

    def post(self, index: int, value: int) -> None:
        """Posts that this rank has come as far as `value`. A rank that sees the number sees what was written before.

        Raises StateError in a process that was forked from the rank.
        """
        if os.getpid() != self._owner:
            raise StateError(f"process {self._owner} is rank {self._rank}, and this one was forked from it: step there")
        self._cells[self._rank * self._count + index] = value

    def of(self, rank: int, index: int) -> int:
        """The number that the rank has posted last."""
        return self._cells[rank * self._count + index]

    def have_come(self, index: int, value: int) -> bool:
        """Whether all ranks have come as far as `value`."""
        return all(self.of(rank, index) >= value for rank in range(self._size))

    def wait(
        self, index: int, value: int, what: str, *, in_pass: bool = True, ranks: Iterable[int] | None = None
    ) -> None:
        """Blocks until all ranks, this one included, or the given `ranks` have come as far as `value`.

        Raises RankError, naming `what` and the rank, when one has ended or does not come within the process group's
        timeout. With `in_pass`, for numbers that are posted within a pass, it also raises that when a rank has broken
        off this pass or gone on to another.
        """
        for rank in range(self._size) if ranks is None else ranks:  # this one too: its own threads post
            self._wait_for(rank, index, value, what, in_pass=in_pass)

    def break_off(self, error: BaseException) -> None:
        """Makes each `wait` that this rank is in, or begins later, raise `error`."""
        self._broken = self._broken or error

    def _wait_for(self, rank: int, index: int, value: int, what: str, *, in_pass: bool) -> None:
        pause, began, looked = 0.0, time.monotonic(), 0.0
        while self.of(rank, index) < value:
            if self._broken is not None:
                raise self._broken
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause + 1e-5)
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                node = self._node()
                if node is not None:
                    node.check(rank, what, now - began, lambda: self.of(rank, index) < value, in_pass=in_pass)


def mapped(descriptor: int, nbytes: int) -> memoryview:
    """Maps the memory of a descriptor, and closes it. Python's own mmap would keep a descriptor for the mapping."""
    try:
        file = f"/proc/self/fd/{descriptor}"
        return torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy().data
    finally:
        os.close(descriptor)
