"""How is memory requested from the system? As an exact number of private pages, large ones if the system gives them.

From 4 MiB on, large pages (2 MiB) are requested: a drive takes four times as many bytes in one request, fresh memory
costs half the time of small pages, and readers look up fewer addresses. See docs/design/arenas.md.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

from headrace.runtime.numa import interleave, nodes_of_process

__all__ = ["Pages", "map_pages"]

_LARGE_BYTES = 2 << 20
_LARGE_FROM_BYTES = 2 * _LARGE_BYTES
# MADV_HUGEPAGE is Linux's own, MADV_POPULATE_WRITE is in Linux 5.14 and later. Systems refuse advice they do not know.
_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", -1)
_POPULATE_WRITE = 23 if sys.platform == "linux" else -1
# On Windows all such memory is private, and there is no flag for that.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Pages(mmap.mmap):
    """Anonymous memory that calls `before_unmap` first: weak references to an mmap end only after it is unmapped."""

    before_unmap: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None and not sys.is_finalizing():
            self.before_unmap()

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def ask(self, advice: int, begin: int, nbytes: int) -> bool:
        """Gives the system an advice of madvise(2) for `nbytes` from `begin` on. Whether the system took it."""
        with contextlib.suppress(OSError, AttributeError):
            self.madvise(advice, begin, nbytes)
            return True
        return False


def map_pages(nbytes: int, *, touched: bool) -> Pages:
    """Maps `nbytes` of zeros. `touched`: the pages are taken at once, in turn from all NUMA nodes of the process."""
    pages = Pages(-1, nbytes, **_PRIVATE)
    if nbytes >= _LARGE_FROM_BYTES:
        # Whole large pages only: one across the border of two neighbouring mappings would outlive either of them.
        begin = -pages.address % _LARGE_BYTES
        pages.ask(_HUGEPAGE, begin, (nbytes - begin) // _LARGE_BYTES * _LARGE_BYTES)
    if touched:
        nodes = nodes_of_process()
        if len(nodes) > 1:
            interleave(pages.address, nbytes, nodes)
        if not pages.ask(_POPULATE_WRITE, 0, nbytes):
            ctypes.memset(pages.address, 0, nbytes)
    return pages
