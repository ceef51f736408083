"""How is memory asked of the system? As private pages of exact number, large ones where the system gives these.

Large pages (2 MiB) are asked for from 4 MiB on: fresh ones cost a third of the time of small ones, and the drive, the
copies and the kernels that read them look up fewer addresses. See docs/design/arenas.md.
"""

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable
from typing import Any

from millrace.runtime.numa import interleave, nodes_of_process

__all__ = ["Pages", "map_pages"]

_LARGE_FROM_BYTES = 4 << 20
_FLAGS = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
# Of Linux; an older kernel refuses what it does not know.
_HUGEPAGE = 14
_WIPE_ON_FORK = 18  # 4.14
_POPULATE_WRITE = 23  # 5.14


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

    def ask(self, advice: int) -> bool:
        """Whether the system took the advice, which is one of madvise(2)."""
        with contextlib.suppress(OSError, AttributeError):
            self.madvise(advice)
            return True
        return False


def map_pages(nbytes: int, *, touched: bool, survives_fork: bool) -> Pages:
    """`nbytes` of zeros. `touched`: they are there at once, from all NUMA nodes in use where there are several.

    Without `survives_fork` a forked process finds zeros: else both would hold a copy of what the other writes.
    """
    pages = Pages(-1, nbytes, flags=_FLAGS)
    if nbytes >= _LARGE_FROM_BYTES:
        pages.ask(_HUGEPAGE)
    if not survives_fork:
        pages.ask(_WIPE_ON_FORK)
    if touched:
        nodes = nodes_of_process()
        if len(nodes) > 1:
            interleave(pages.address, nbytes, nodes)
        if not pages.ask(_POPULATE_WRITE):
            ctypes.memset(pages.address, 0, nbytes)
    return pages
