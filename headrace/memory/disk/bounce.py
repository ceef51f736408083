"""How are a few bytes on disk read and verified, or written? Read with all of their grain, which has one checksum.

Within `neighbours_follow`, the grain that was read last is kept for the reads of its next bytes.
"""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

import torch

from headrace.memory.disk.extent import DISK_ALIGNMENT_BYTES, disk_pages
from headrace.memory.disk.mapping import Origin
from headrace.memory.disk.saved_file import new_pages


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.pages = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.keeps = False
        self.held: tuple[Origin, int] | None = None  # the grain in `pages`: its origin and first byte


_own = _OfThread()


@contextlib.contextmanager
def neighbours_follow() -> Iterator[None]:
    """Within this context, this thread keeps the last grain: its bytes must not change until all have been read."""
    _own.keeps, _own.held = True, None
    try:
        yield
    finally:
        _own.keeps, _own.held = False, None
        _own.pages = torch.empty(0, dtype=torch.uint8, device="cpu")


def read_bytes(origin: Origin, offset: int, memory: torch.Tensor) -> bool:
    """Fills uint8 `memory` with the bytes from `offset` on. False: they have to be read through the mapping."""
    at = 0
    while at < memory.nbytes:
        first, last = origin.grain(offset + at)
        if _own.held != (origin, first):
            _own.held = None
            if _own.pages.nbytes < last - first:
                _own.pages = new_pages(disk_pages(last - first))
            request = origin.read(_own.pages[: last - first], first)
            if request is None:
                return False
            request.synchronize()
            _own.held = (origin, first) if _own.keeps else None
        nbytes = min(last - offset, memory.nbytes) - at
        ctypes.memmove(memory.data_ptr() + at, _own.pages.data_ptr() + offset + at - first, nbytes)
        at += nbytes
    return True


def write_bytes(origin: Origin, offset: int, memory: torch.Tensor) -> bool:
    """Writes uint8 `memory` to the bytes from `offset` on. False: that has to be done through the mapping."""
    _own.held = None
    within = offset % DISK_ALIGNMENT_BYTES  # so that pages of memory go to pages of the disk
    if _own.pages.nbytes < within + memory.nbytes:
        _own.pages = new_pages(disk_pages(within + memory.nbytes))
    source = _own.pages[within : within + memory.nbytes]
    ctypes.memmove(source.data_ptr(), memory.data_ptr(), memory.nbytes)
    request = origin.write(source, offset)
    if request is None:
        return False
    request.synchronize()
    return True
