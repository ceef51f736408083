"""How does page-locked memory survive fork()? It lies in an in-memory file (memfd) that is mapped shared.

When a process forks, as for each DataLoader worker, Linux copies every page-locked page of its private memory. For each
child, that takes some seconds and as much memory again. Pages of shared mappings are not copied. The child maps the
same file at the same address as private memory: it reads what the parent has there, and its own writes stay its own.
"""

import contextlib
import ctypes
import os
import select
import threading
import weakref
from typing import Any

from headrace.memory.pages import (
    HUGEPAGE,
    LARGE_FROM_BYTES,
    LARGE_PAGE_BYTES,
    advise,
    advise_in_parts,
    libc_call,
    map_file,
    map_pages,
    touch,
    unmap,
)
from headrace.runtime.system import after_fork
from headrace.runtime.threads import keeps_interrupts

# MADV_COLLAPSE (Linux 6.1 and later) gives whole ranges large pages, whatever is set for shared memory.
_COLLAPSE = 25
_PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE: frees pages of the file


class _File:
    """This process's in-memory file: one descriptor for all mappings. Each mapping has its own range, used once.

    A range that is no longer mapped is given back to the system as soon as no child that may read it is alive.
    """

    def __init__(self) -> None:
        self.offsets: dict[int, tuple[int, int]] = {}  # offset and bytes of each mapping, by address
        self._descriptor = os.memfd_create("headrace")
        self._end = 0
        self._unmapped: list[tuple[int, int]] = []  # offset and bytes of ranges that have yet to be given back
        self._pipe: tuple[int, int] | None = None  # of the fork that is under way
        # For each child, the end of a pipe that hangs up when the child and its own children have ended.
        self._children: list[int] = []
        self._is_unwatched = False  # whether there was a fork without a pipe: then nothing is given back
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def map(self, nbytes: int) -> int:
        """Maps `nbytes` of zeros, a whole number of pages. Returns the address."""
        large = nbytes >= LARGE_FROM_BYTES
        with self._lock:
            offset = -(-self._end // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES if large else self._end
            self._end = offset + nbytes
            os.ftruncate(self._descriptor, self._end)
        at = self._place(nbytes) if large else None
        address = map_file(self._descriptor, offset, nbytes, shared=True, at=at)
        self.offsets[address] = offset, nbytes
        return address

    def _place(self, nbytes: int) -> int:
        """Reserves addresses for `nbytes`, which begin with a large page; the caller maps memory over them."""
        reserved = map_file(self._descriptor, 0, nbytes + LARGE_PAGE_BYTES, shared=True)
        before = -reserved % LARGE_PAGE_BYTES
        if before:
            unmap(reserved, before)
        unmap(reserved + before + nbytes, LARGE_PAGE_BYTES - before)
        return reserved + before

    @keeps_interrupts
    def unmap(self, address: int) -> None:
        """Called when nobody refers to a mapping any more; in a child, too, which has the mapping but not the file."""
        offset, nbytes = self.offsets.pop(address)
        unmap(address, nbytes)
        if os.getpid() == self._owner:
            self._unmapped.append((offset, nbytes))
            self._give_back()

    def _give_back(self) -> None:
        """Gives back the unmapped ranges if no child can read them. Called by finalizers, on any thread."""
        poll = select.poll()
        for end in self._children:
            poll.register(end, 0)
        for end, _hung_up in poll.poll(0):
            with contextlib.suppress(ValueError):  # another thread may have removed it
                self._children.remove(end)
                os.close(end)
        punch = libc_call("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        with contextlib.suppress(IndexError):
            while not self._children and not self._is_unwatched:
                punch(self._descriptor, _PUNCH_HOLE, *self._unmapped.pop())

    def before_fork(self) -> None:
        """Makes a pipe that shows how long the child lives: the child keeps its other end open."""
        self._pipe = None
        with contextlib.suppress(OSError):  # no descriptor is left
            self._pipe = os.pipe()

    def in_parent(self) -> None:
        """Called after a fork, even one that failed: then the pipe hangs up at once."""
        if self._pipe is None:
            self._is_unwatched = True
            return
        begin, end = self._pipe
        os.close(end)
        self._children.append(begin)
        self._give_back()

    def in_child(self) -> None:
        """Makes the child's mappings private, at the same addresses."""
        try:
            for address, (offset, nbytes) in list(self.offsets.items()):
                map_file(self._descriptor, offset, nbytes, shared=False, at=address)
        finally:
            for descriptor in (self._descriptor, *self._children, *(self._pipe or ())[:1]):
                os.close(descriptor)


_file: _File | None = None  # made at first use
_making = threading.Lock()


def map_fork_safe(nbytes: int, nodes: tuple[int, ...] = ()) -> tuple[Any, int]:
    """Maps `nbytes` of zeros, whole pages that are taken at once, to be page-locked. Returns their owner and address.

    `nodes`: the NUMA nodes from which the pages come, in turn; (): from where the kernel chooses.

    The owner supports Python's buffer protocol, and the memory lives as long as the owner: callbacks that callers give
    to `weakref.finalize(owner, ...)` run before the memory is unmapped. Where the system has no in-memory files, the
    memory is private. Raises OSError if the system has no memory.
    """
    global _file
    if not hasattr(os, "memfd_create"):
        pages = (ctypes.c_char * nbytes).from_buffer(map_pages(nbytes, touched=True, nodes=nodes))
        return pages, ctypes.addressof(pages)
    with _making:
        file = _file = _file or _File()
    address = file.map(nbytes)
    owner = (ctypes.c_char * nbytes).from_address(address)
    weakref.finalize(owner, file.unmap, address).atexit = False
    whole = nbytes // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES if nbytes >= LARGE_FROM_BYTES else 0
    takes_large = whole > 0 and advise(address, whole, HUGEPAGE) == 0
    touch(address, nbytes, nodes)
    if takes_large:  # where the system gives them at the first touch, this does nothing
        advise_in_parts(address, whole, _COLLAPSE)
    return owner, address


def _before_fork() -> None:
    if _file is not None:
        _file.before_fork()


def _in_parent() -> None:
    if _file is not None:
        _file.in_parent()


def _in_child() -> None:
    """Called in a forked child, which makes a file of its own if it needs one."""
    global _file, _making
    file, _file, _making = _file, None, threading.Lock()
    if file is not None:
        file.in_child()


after_fork(_in_child, before=_before_fork, in_parent=_in_parent)
