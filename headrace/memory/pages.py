"""How is memory requested from the system? As an exact number of private pages, large ones if the system gives them.

From 4 MiB on, large pages (2 MiB) are requested: a drive takes four times as many bytes in one request, fresh memory
costs half the time of small pages, and readers look up fewer addresses. See docs/design/arenas.md.
"""

import ctypes
import errno
import functools
import mmap
import os
import sys
from typing import Any

from headrace.errors import DiskError
from headrace.runtime.numa import bind, interleave
from headrace.runtime.system import NO_FILE_MEMORY, available_cores, libc
from headrace.runtime.threads import beside

LARGE_PAGE_BYTES = 2 << 20
LARGE_FROM_BYTES = 2 * LARGE_PAGE_BYTES
_MOST_THREADS = 8  # that take pages at once: they fill the bandwidth of one socket's memory
_PART_BYTES = 64 << 20  # for each of them, at least
# Only Linux has MADV_HUGEPAGE and (from 5.14 on) MADV_POPULATE_WRITE. Systems refuse advice they do not know.
HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", -1)
_POPULATE_WRITE = 23 if sys.platform == "linux" else -1
# On Windows all such memory is private, and there is no flag for that.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def map_pages(nbytes: int, *, touched: bool, nodes: tuple[int, ...] = ()) -> mmap.mmap:
    """Maps `nbytes` of zeros. `touched`: the pages are taken at once, in turn from these NUMA nodes, if any."""
    pages = mmap.mmap(-1, nbytes, **_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if nbytes >= LARGE_FROM_BYTES:
        # Whole large pages only: a large page across the border of two mappings would outlive either of them.
        begin = -address % LARGE_PAGE_BYTES
        advise(address + begin, (nbytes - begin) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES, HUGEPAGE)
    if touched:
        touch(address, nbytes, nodes)
    return pages


def touch(address: int, nbytes: int, nodes: tuple[int, ...]) -> None:
    """Takes all pages of fresh memory at once, in turn from these NUMA nodes; (): from where the kernel chooses."""
    if len(nodes) == 1:
        bind(address, nbytes, nodes[0])
    elif nodes:
        interleave(address, nbytes, nodes)
    if not advise_in_parts(address, nbytes, _POPULATE_WRITE):
        ctypes.memset(address, 0, nbytes)


# Calls of libc. Python's own mmap is not used for files, as it keeps a descriptor for each mapping.
_READ_AND_WRITE = 1 | 2  # PROT_; these are the same numbers on Linux, macOS and BSD
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 1, 2, 16
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def libc_call(name: str, restype: Any, *argtypes: Any) -> Any:
    """A function of libc, which is called without the interpreter lock; None if libc has none of that name."""
    function = getattr(libc(), name, None)
    if function is not None:
        function.restype, function.argtypes = restype, argtypes
    return function


def libc_error(call: str) -> OSError:
    """The error that `call`, a function of libc, has left behind on this thread."""
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def map_file(descriptor: int, offset: int, nbytes: int, *, shared: bool, at: int | None = None) -> int:
    """Maps bytes of an open file into memory; if `at` is given, at this address, in place of what is mapped there.

    Returns the address. Shared: writes reach the file. Private: they stay with this process. Raises DiskError where
    files cannot be mapped, OSError where the system refuses.
    """
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    call = libc_call("mmap", address, address, size, number, number, number, ctypes.c_int64)
    if call is None:
        raise DiskError(errno.ENOSYS, NO_FILE_MEMORY)
    flags = (_MAP_SHARED if shared else _MAP_PRIVATE) | (0 if at is None else _MAP_FIXED)
    mapped: int = call(at, nbytes, _READ_AND_WRITE, flags, descriptor, offset)
    if mapped == _FAILED:
        raise libc_error("mmap")
    return mapped


def unmap(address: int, nbytes: int) -> None:
    """Gives memory that `map_file` has mapped back to the system."""
    libc_call("munmap", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)(address, nbytes)


def advise(address: int, nbytes: int, advice: int) -> int:
    """Calls madvise(2). Returns 0 if the system took the advice."""
    call = libc_call("madvise", ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return -1 if call is None or advice < 0 else int(call(address, nbytes, advice))


def advise_in_parts(address: int, nbytes: int, advice: int) -> bool:
    """Calls madvise(2) on several threads, for advice at which the system fills pages. False: it refused a part.

    A process that ends starts no threads: they would never run.

    Threads that Ctrl-C leaves behind do no harm: such advice changes no contents, whatever is mapped there by then.
    """
    threads = 1 if sys.is_finalizing() else min(available_cores(), _MOST_THREADS, nbytes // _PART_BYTES)
    if threads < 2:
        return advise(address, nbytes, advice) == 0
    part = -(-nbytes // (threads * LARGE_PAGE_BYTES)) * LARGE_PAGE_BYTES
    refused: list[int] = []

    def take(begin: int) -> None:
        refused.append(advise(address + begin, min(part, nbytes - begin), advice))

    ends = [beside(take, begin) for begin in range(part, nbytes, part)]
    take(0)
    for end in ends:
        end.wait()
    return not any(refused)
