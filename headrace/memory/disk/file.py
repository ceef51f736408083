"""How are bytes read from and written to a file? At offsets, past the page cache where the filesystem allows it."""

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from headrace.errors import DiskError
from headrace.memory.disk.extent import DISK_ALIGNMENT_BYTES
from headrace.runtime.system import CLOSED_IN_CHILDREN, read_at, write_at

_O_DIRECT = getattr(os, "O_DIRECT", 0)
HAS_DIRECT = bool(_O_DIRECT)  # whether the operating system has direct I/O
# The errors of filesystems without direct I/O, at opening or only at the first transfer.
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOENT}  # ENOENT: there is no /proc


class DirectFile:
    """A file that several threads may read and write at once. Errors call it `name`. Takes over `descriptor`.

    `direct` says whether whole aligned pages bypass the page cache. Other ranges (the last, partial page of a tensor,
    memory that is not aligned) go through the page cache; the kernel keeps the two consistent.
    """

    def __init__(self, descriptor: int, name: str, *, writable: bool) -> None:
        self.name = name
        self.descriptor = descriptor
        self._direct_descriptor = _open_direct(descriptor, writable)
        descriptors = [descriptor] if self._direct_descriptor is None else [descriptor, self._direct_descriptor]
        self._closer = weakref.finalize(self, _close_all, descriptors)

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._direct_descriptor is not None

    def size(self) -> int:
        """The present size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def read(self, address: int, nbytes: int, offset: int, what: str) -> None:
        """Fills memory at `address` with `nbytes` from `offset`. Raises DiskError, also if the file is too short."""
        for route in self._routes(address, nbytes, offset):
            self._move(read_at, "read", *route, what)

    def read_scattered(self, memory: Sequence[tuple[int, int]], offset: int, what: str) -> None:
        """As `read`, into several (address, bytes) one after the other: in one request if all are whole pages."""
        unaligned = any(address % DISK_ALIGNMENT_BYTES or nbytes % DISK_ALIGNMENT_BYTES for address, nbytes in memory)
        if self._direct_descriptor is not None and not unaligned and offset % DISK_ALIGNMENT_BYTES == 0:
            self._move(read_at, "read", self._direct_descriptor, memory, offset, what)
            return
        for address, nbytes in memory:
            self.read(address, nbytes, offset, what)
            offset += nbytes

    def write(self, address: int, nbytes: int, offset: int, what: str) -> None:
        """Writes `nbytes` of memory at `address` to `offset`. Raises DiskError."""
        for route in self._routes(address, nbytes, offset):
            self._move(write_at, "written", *route, what)

    def close(self) -> None:
        """Closes the descriptors. A file without a name is gone then, once no mapping is left."""
        self._closer()

    def _move(
        self,
        call: Callable[[int, list[Any], int], int],
        done: str,
        descriptor: int,
        memory: Sequence[tuple[int, int]],
        offset: int,
        what: str,
    ) -> None:
        while memory:
            # Views are made by address: PyTorch or NumPy would need the tensor's Python object here.
            views = [(ctypes.c_char * nbytes).from_address(address) for address, nbytes in memory]
            nbytes = sum(nbytes for _, nbytes in memory)
            try:
                moved = call(descriptor, views, offset)
            except OSError as error:
                raise DiskError(
                    error.errno,
                    f"{what}: {nbytes} bytes at offset {offset} of {self.name} could not be {done}:"
                    f" {error.strerror}. {_advice(error.errno)}",
                ) from error
            if moved <= 0:
                raise DiskError(
                    errno.EIO,
                    f"{what}: {self.name} ends at byte {self.size()}, but {nbytes} bytes at offset {offset}"
                    f" were to be {done}: the file was truncated. Restore it from where it came from.",
                )
            offset += moved
            memory = _behind(memory, moved)

    def _routes(self, address: int, nbytes: int, offset: int) -> list[tuple[int, list[tuple[int, int]], int]]:
        """(descriptor, memory, offset) of each part of a transfer: whole aligned pages go directly, others buffered."""
        first = last = 0
        if self._direct_descriptor is not None and (address - offset) % DISK_ALIGNMENT_BYTES == 0:
            first = min(-offset % DISK_ALIGNMENT_BYTES, nbytes)
            last = max(first, nbytes - (offset + nbytes) % DISK_ALIGNMENT_BYTES)
        routes = [(self.descriptor, 0, first), (self._direct_descriptor, first, last), (self.descriptor, last, nbytes)]
        return [
            (descriptor, [(address + begin, end - begin)], offset + begin)
            for descriptor, begin, end in routes
            if descriptor is not None and begin < end
        ]


def _open_direct(descriptor: int, writable: bool) -> int | None:
    """A second descriptor of the same file for direct I/O; None if the filesystem refuses that."""
    if not _O_DIRECT:
        return None
    try:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | _O_DIRECT | CLOSED_IN_CHILDREN
        direct = os.open(f"/proc/self/fd/{descriptor}", flags)
    except OSError as error:
        if error.errno in _REFUSALS:
            return None
        raise
    try:
        os.preadv(direct, [mmap.mmap(-1, DISK_ALIGNMENT_BYTES)], 0)
    except OSError as error:
        os.close(direct)
        if error.errno in _REFUSALS:
            return None
        raise
    return direct


def _behind(memory: Sequence[tuple[int, int]], moved: int) -> list[tuple[int, int]]:
    """What is left of `memory`, as (address, bytes), after `moved` bytes."""
    left = []
    for address, nbytes in memory:
        done = min(moved, nbytes)
        moved -= done
        if done < nbytes:
            left.append((address + done, nbytes - done))
    return left


def _close_all(descriptors: list[int]) -> None:
    with contextlib.ExitStack() as all_of_them:  # a close that fails leaves no other descriptor open
        for descriptor in descriptors:
            all_of_them.callback(os.close, descriptor)


def _advice(number: int | None) -> str:
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "Free space on that disk, or give a directory on a larger one."
    if number == errno.EIO:
        return "The drive reports a fault: see the kernel's log (dmesg), and give a directory on another drive."
    return "See whether the disk is still there and healthy."
