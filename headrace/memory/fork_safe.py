"""How does page-locked memory get through fork()? It lies in a file in memory, which is mapped shared.

When a process forks, as for each DataLoader worker, Linux copies every page-locked page of its private memory: some
seconds and as much memory again, for each child. Pages of shared mappings are not copied. The child maps the same file
in the same place as private memory: it reads what the parent has there, and what it writes stays its own.
"""

import ctypes
import mmap
import os
import threading
import weakref
from typing import Any

from headrace.memory.pages import (
    HUGEPAGE,
    LARGE_FROM_BYTES,
    LARGE_PAGE_BYTES,
    advise,
    map_file,
    map_pages,
    touch,
    unmap,
)
from headrace.runtime.system import after_fork

__all__ = ["map_fork_safe"]

# Linux's own. Gives whole ranges large pages, whatever the system's setting for shared memory is (Linux 6.1 and later).
_COLLAPSE = 25
_REMOVE = getattr(mmap, "MADV_REMOVE", -1)  # frees pages of a shared mapping


class _File:
    """A file in memory of this process: one descriptor for many mappings. Each has a range of its own, used once.

    After a fork, the process makes another file for what comes later. What children may read of this one is given back
    to the system only with its last mapping, and by the last child.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("headrace")
        self.offsets: dict[int, tuple[int, int]] = {}  # offset and bytes of each mapping, by address
        self._end = 0
        self._lock = threading.Lock()

    def map(self, nbytes: int) -> int:
        """Maps `nbytes` of zeros, a whole number of pages. Returns the address."""
        large = nbytes >= LARGE_FROM_BYTES
        with self._lock:
            offset = -(-self._end // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES if large else self._end
            self._end = offset + nbytes
            os.ftruncate(self.descriptor, self._end)
        at = self._place(nbytes) if large else None
        address = map_file(self.descriptor, offset, nbytes, shared=True, at=at)
        self.offsets[address] = offset, nbytes
        return address

    def _place(self, nbytes: int) -> int:
        """Reserves addresses for `nbytes`, which begin with a large page; the caller maps memory over them."""
        reserved = map_file(self.descriptor, 0, nbytes + LARGE_PAGE_BYTES, shared=True)
        before = -reserved % LARGE_PAGE_BYTES
        if before:
            unmap(reserved, before)
        unmap(reserved + before + nbytes, LARGE_PAGE_BYTES - before)
        return reserved + before

    def unmap(self, address: int) -> None:
        """Called when nobody refers to a mapping any more."""
        nbytes = self.offsets.pop(address)[1]
        if self is _file:
            advise(address, nbytes, _REMOVE)
        unmap(address, nbytes)
        if self is not _file and not self.offsets:
            self.close()

    def close(self) -> None:
        """Gives the descriptor back. What is mapped stays."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def make_private(self) -> None:
        """Called in a forked child: its mappings become private, in the same places."""
        try:
            for address, (offset, nbytes) in list(self.offsets.items()):
                map_file(self.descriptor, offset, nbytes, shared=False, at=address)
        finally:
            self.close()


_file: _File | None = None  # for new mappings: made at first use, and anew after a fork
_files: "weakref.WeakSet[_File]" = weakref.WeakSet()  # all that this process has made and that have mappings
_making = threading.Lock()


def map_fork_safe(nbytes: int) -> tuple[Any, int]:
    """Maps `nbytes` of zeros, whole pages that are taken at once, to be page-locked. Returns their owner and address.

    The owner has Python's buffer interface, and the memory lives as long as it does: what `weakref.finalize` has called
    at its end is called before the memory is unmapped. Systems without files in memory give private memory. Raises
    OSError if the system has no memory.
    """
    global _file
    if not hasattr(os, "memfd_create"):
        pages = (ctypes.c_char * nbytes).from_buffer(map_pages(nbytes, touched=True))
        return pages, ctypes.addressof(pages)
    with _making:
        file = _file = _file or _File()
        _files.add(file)
    address = file.map(nbytes)
    owner = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(owner, file.unmap, address).atexit = False
    whole = nbytes // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES if nbytes >= LARGE_FROM_BYTES else 0
    takes_large = whole > 0 and advise(address, whole, HUGEPAGE) == 0
    touch(address, nbytes)
    if takes_large:  # where the system gives them at the first touch, this does nothing
        advise(address, whole, _COLLAPSE)
    return owner, address


def _has_forked() -> None:
    """Called in the parent: children may read what the file holds."""
    global _file
    if _file is not None and _file.offsets:
        _file = None


def _forked() -> None:
    """Called in a forked child, which makes a file of its own if it needs one."""
    global _file, _making
    _file, _making = None, threading.Lock()
    for file in list(_files):
        file.make_private()
    _files.clear()


after_fork(in_child=_forked, in_parent=_has_forked)
