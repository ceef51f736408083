"""How is memory asked of the system? As private pages of exact number, large ones where the system gives these.

Large pages (2 MiB) are asked for from 4 MiB on: a drive takes four times as many bytes in one request, fresh ones cost
half of the time of small ones, and whoever reads them looks up fewer addresses. See docs/design/arenas.md.
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
# Of Linux, and of Linux 5.14; systems refuse what they do not know.
_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", -1)
_POPULATE_WRITE = 23 if sys.platform == "linux" else -1
# Windows has private memory alone, and no flag for it.
_PRIVATE: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Pages(mmap.mmap):
    """Anonymous memory that calls `before_unmap` first: weak references to an mmap end only after it is unmapped."""

    before_unmap: Callable[[], Any] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None and not sys.is_finalizing():
            self.before_unmap()

    @property
    def address(self) -> int:
        """Of its first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def ask(self, advice: int, begin: int, nbytes: int) -> bool:
        """Whether the system took the advice, which is one of madvise(2), for so many bytes from `begin` on."""
        with contextlib.suppress(OSError, AttributeError):
            self.madvise(advice, begin, nbytes)
            return True
        return False


def map_pages(nbytes: int, *, touched: bool) -> Pages:
    """`nbytes` of zeros. `touched`: they are there at once, from all NUMA nodes in use where there are several."""
    pages = Pages(-1, nbytes, **_PRIVATE)
    if nbytes >= _LARGE_FROM_BYTES:
        # Whole ones only: where neighbours are mapped side by side, one across the border would outlive either.
        begin = -pages.address % _LARGE_BYTES
        pages.ask(_HUGEPAGE, begin, (nbytes - begin) // _LARGE_BYTES * _LARGE_BYTES)
    if touched:
        nodes = nodes_of_process()
        if len(nodes) > 1:
            interleave(pages.address, nbytes, nodes)
        if not pages.ask(_POPULATE_WRITE, 0, nbytes):
            ctypes.memset(pages.address, 0, nbytes)
    return pages
