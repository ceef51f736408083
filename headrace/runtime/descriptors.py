"""How do the ranks of a node get the same files? The first one makes them, and hands out their descriptors.

Over sockets that have no name in the file system, of files that have none either.
"""

import array
import contextlib
import errno
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from headrace.errors import RankError, StateError

__all__ = ["Descriptors", "has_ended", "listen", "mapped", "started"]

_LOOK_SECONDS = 0.2  # between two looks whether the first rank is still there


class Descriptors:
    """Connections of the first rank of a node to each other one; of those to the first.

    `ranks`: their global numbers; `rank` is this one of them; `processes`: number and start of each rank's. `listening`
    is this rank's socket, and `first` the address of the first rank's.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        processes: Sequence[tuple[int, str]],
        timeout_seconds: float,
        listening: socket.socket,
        first: Any,
    ) -> None:
        self._ranks, self._rank, self._processes = ranks, rank, processes
        self._timeout_seconds = timeout_seconds
        self._sockets = self._connect(listening, first)
        self._finalizer = weakref.finalize(self, _close, self._sockets)

    def close(self) -> None:
        """Nothing is shared any more; each rank does so when it likes."""
        self._finalizer()

    def share(self, nbytes: int) -> int:
        """The descriptor of so many zeros in memory. A collective; to be closed when mapped.

        Raises OSError when the system has no memory for them.
        """
        return self.hand_out(nbytes, f"{nbytes:,} bytes of the node's memory", partial(_memory, nbytes))

    def grow(self, descriptor: int, offset: int, nbytes: int) -> None:
        """So many zeros more, from `offset` on, of what `share` gave. A collective; raises OSError as that does."""
        self.once(nbytes, f"{nbytes:,} bytes of the node's memory", partial(_take, descriptor, offset, nbytes))

    def hand_out(self, number: int, what: str, make: Callable[[], int]) -> int:
        """The descriptor that `make` returns on the first rank: each rank gets one of its own. A collective.

        Raises what `make` raises on the first rank, OSError on the others then; StateError where `number` is not what
        the first rank gives.
        """
        if self._rank:
            return self._receive(number, what)[0]
        made: list[int] = []
        self._do(number, made, lambda: made.append(make()))
        return made[0]

    def once(self, number: int, what: str, do: Callable[[], None]) -> None:
        """`do` is called on the first rank; the others return after that. As `hand_out`, without a descriptor."""
        if self._rank:
            self._receive(number, what)
        else:
            self._do(number, [], do)

    def _do(self, number: int, descriptors: list[int], do: Callable[[], None]) -> None:
        """On the first rank: what came of it, with the descriptors that there are then, is told to the others."""
        try:
            do()
        except BaseException as error:
            self._tell(-_number_of(error), [])
            raise
        self._tell(number, descriptors)

    def _connect(self, listening: socket.socket, first: Any) -> list[socket.socket]:
        with listening:
            if self._rank:
                one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    one.connect(first)
                except ConnectionError:
                    self._missing(range(1), "the memory of the node")
                return [one]
            found = []
            for _ in range(len(self._ranks) - 1):
                self._readable(listening, range(1, len(self._ranks)), "a rank of the node")
                found.append(listening.accept()[0])
            return found

    def _readable(self, one: socket.socket, ranks: Iterable[int], what: str) -> None:
        """Waits until something comes there, from one of these ranks. Raises RankError when one has ended."""
        began = time.monotonic()
        while not select.select([one], [], [], _LOOK_SECONDS)[0]:
            waited = time.monotonic() - began
            for rank in ranks:
                if has_ended(*self._processes[rank]) or waited > self._timeout_seconds:
                    self._missing([rank], what)

    def _missing(self, ranks: Iterable[int], what: str) -> NoReturn:
        names = " or ".join(f"rank {self._ranks[rank]}" for rank in ranks)
        raise RankError(
            f"{names} ended, or did not come within {self._timeout_seconds:.0f} s, and rank {self._ranks[self._rank]}"
            f" waits for it: {what}. Every rank has to offload the same model with the same settings"
        )

    def _tell(self, number: int, descriptors: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        for one in self._sockets:
            with contextlib.suppress(ConnectionError):  # who is gone is found by whoever waits for it
                one.sendmsg([struct.pack("q", number)], rights)

    def _receive(self, number: int, what: str) -> list[int]:
        """The descriptors that come with `number`."""
        self._readable(self._sockets[0], range(1), what)
        try:
            message, descriptors, _flags, _address = socket.recv_fds(self._sockets[0], 8, 1)
        except ConnectionError:
            message, descriptors = b"", []
        if len(message) != 8:
            for descriptor in descriptors:
                os.close(descriptor)
            self._missing(range(1), what)
        (found,) = struct.unpack("q", message)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        if found == number:
            return descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        if found < 0:
            raise OSError(-found, f"rank {self._ranks[0]} could not get {what}: {os.strerror(-found)}; see its error")
        raise StateError(
            f"rank {self._ranks[self._rank]} wants {what} where rank {self._ranks[0]} wants {found:,}: the models, the"
            " settings, or the parameters that are trained, differ between ranks"
        )


def mapped(descriptor: int, nbytes: int) -> memoryview:
    """The memory of a descriptor, which is closed: Python's own mmap would keep one as long as the memory."""
    try:
        file = f"/proc/self/fd/{descriptor}"
        return torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy().data
    finally:
        os.close(descriptor)


def listen() -> socket.socket:
    """A socket that only processes of this machine find, by an address that is in no file system."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0headrace-{os.getpid()}-{os.urandom(8).hex()}")
    listening.listen()
    return listening


def started(process: int) -> str:
    """When the process was started: another one may get its number."""
    return _status(process)[1]


def has_ended(process: int, began: str) -> bool:
    """Whether the process of that number, started then, is there no more."""
    state, found = _status(process)
    return state in "ZX" or found != began


def _status(process: int) -> tuple[str, str]:
    """State and start of a process; that it is dead, where there is none."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


def _memory(nbytes: int) -> int:
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
    try:
        _take(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _take(descriptor: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the system has no {nbytes:,} bytes of memory for the ranks of this node to share ({error.strerror});"
            " lower what is offloaded, or raise the memory limit of the container",
        ) from error


def _number_of(error: BaseException) -> int:
    return (error.errno if isinstance(error, OSError) else None) or errno.ECANCELED


def _close(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()
