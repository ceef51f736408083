"""How does user code see bytes on disk? As memory: a mapping of a range of a file."""

import ctypes
import mmap
import os
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.memory.disk.requests import Request
from headrace.memory.pages import advise, libc_call, libc_error, map_file, unmap
from headrace.memory.ranges import Range
from headrace.runtime.system import read_some
from headrace.runtime.threads import keeps_interrupts

_WAIT_WRITE_WAIT = 1 | 2 | 4  # SYNC_FILE_RANGE_: waits for writes under way, writes dirty pages, waits for these
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(bit) for bit in (63, 62, 61))  # bits of an entry in a page map
_COPIED_BYTES = 4 << 20


class Origin(ABC):
    """The `nbytes` of a file that a mapping shows, to be read past the page cache. Each `grain_bytes` have a checksum.

    Offsets count from the first byte that the mapping shows.
    """

    nbytes: int
    grain_bytes: int

    def grain(self, offset: int) -> Range:
        """The grain with the byte at `offset`, to be read as a whole."""
        first = offset // self.grain_bytes * self.grain_bytes
        return first, min(first + self.grain_bytes, self.nbytes)

    @abstractmethod
    def read(self, destination: torch.Tensor, offset: int) -> Request | None:
        """Submits reading into uint8 memory of the CPU; None if the bytes have to be read through the mapping."""

    def write(self, source: torch.Tensor, offset: int) -> Request | None:
        """Submits writing from uint8 memory of the CPU; None if the bytes have to be written through the mapping."""
        return None

    def shows(self, path: str, offset: int, offset_there: int, nbytes: int) -> bool:
        """Whether the bytes at `offset` are those at `offset_there` of the file `path`, and were not written to."""
        return False


@dataclass
class _Mapped:
    """What is known of a mapping by its address."""

    nbytes: int
    is_shared: bool
    origin: Origin | None = None
    before_unmap: Callable[[], Any] | None = None


class _Table:
    """The mappings of this process, by address. Any thread may collect one, even during any line of these methods."""

    def __init__(self) -> None:
        self._mapped: dict[int, _Mapped] = {}
        self._change = object()  # a new object after each change
        self._sorted: tuple[object, list[int]] = (None, [])  # a change, and the sorted addresses after it

    def add(self, address: int, mapped: _Mapped) -> None:
        self._mapped[address] = mapped
        self._change = object()

    def remove(self, address: int) -> _Mapped | None:
        removed = self._mapped.pop(address, None)
        self._change = object()
        return removed

    def at(self, address: int) -> tuple[int, _Mapped] | None:
        """Where the mapping with the byte at this address begins, and the mapping; None if there is none."""
        change, (sorted_at, addresses) = self._change, self._sorted
        if sorted_at is not change:
            addresses = sorted(self._mapped)
            self._sorted = change, addresses
        index = bisect_right(addresses, address) - 1
        mapped = self._mapped.get(addresses[index]) if index >= 0 else None
        return None if mapped is None or address >= addresses[index] + mapped.nbytes else (addresses[index], mapped)


_table = _Table()


def origin_of(tensor: torch.Tensor) -> tuple[Origin, int] | None:
    """The origin of a CPU tensor's bytes, and the offset of the first one there; None if it is no mapping's memory."""
    first = tensor.data_ptr()
    found = _table.at(first) if tensor.nbytes else None
    if found is None or found[1].origin is None or first + tensor.nbytes > found[0] + found[1].nbytes:
        return None
    return found[1].origin, first - found[0]


def copy_on_disk(destination: torch.Tensor, source: torch.Tensor) -> None:
    """`destination.copy_(source)`, in steps; pages of shared mappings do not stay in this process's memory.

    This holds for large contiguous tensors. Others are copied in one step, and their pages stay.
    """
    if not (destination.is_contiguous() and source.is_contiguous()) or source.nbytes <= _COPIED_BYTES:
        destination.copy_(source)
        return
    to, of = destination.view(-1), source.view(-1)
    step = _COPIED_BYTES // source.itemsize
    for begin in range(0, to.numel(), step):
        to[begin : begin + step].copy_(of[begin : begin + step])
        for one in (to, of):
            release_pages(one.data_ptr() + begin * one.itemsize, min(step, to.numel() - begin) * one.itemsize)


def release_pages(first: int, nbytes: int) -> None:
    """Lets go of a shared mapping's whole pages among these bytes: they no longer count as memory of this process."""
    found = _table.at(first)
    if found is not None and found[1].is_shared:
        begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        end = min(first + nbytes, found[0] + found[1].nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            advise(begin, end - begin, mmap.MADV_DONTNEED)


def _unmap(address: int, nbytes: int) -> None:
    mapped = _table.remove(address)
    if mapped is not None and mapped.before_unmap is not None:
        mapped.before_unmap()
    unmap(address, nbytes)


class Mapping:
    """`nbytes` at `offset` (a multiple of the page size) of an open file as memory.

    Shared: writes reach the file. Private: writes stay with this process, page by page, and the file is only read. The
    memory lives as long as any tensor made by `tensor` does, even after the file is closed. `origin_of` returns
    `origin` for it.
    """

    def __init__(
        self, descriptor: int, offset: int, nbytes: int, *, shared: bool, origin: Origin | None = None
    ) -> None:
        self._nbytes = max(nbytes, 1)
        self._offset = offset
        self.address = self._map(descriptor, shared=shared)
        self.memory = (ctypes.c_char * self._nbytes).from_address(self.address)  # lives as long as it is mapped
        self._mapped = _Mapped(self._nbytes, shared, origin)
        _table.add(self.address, self._mapped)
        weakref.finalize(self.memory, keeps_interrupts(_unmap), self.address, self._nbytes).atexit = False

    def before_unmap(self, call: Callable[[], Any] | None) -> None:
        """Has `call` called before the memory is unmapped."""
        self._mapped.before_unmap = call

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Bytes `offset` to `offset + nbytes` as a tensor of shape (elements,) with a storage of its own."""
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self.memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)

    def make_private(self, descriptor: int) -> None:
        """From now on, writes stay with this process; addresses stay the same. Raises OSError if that fails."""
        self._map(descriptor, shared=False, at=self.address)
        self._mapped.origin, self._mapped.is_shared = None, False

    def _map(self, descriptor: int, *, shared: bool, at: int | None = None) -> int:
        address = map_file(descriptor, self._offset, self._nbytes, shared=shared, at=at)
        # Readers (PyTorch's optimizers, torch.save) read all of a tensor, in order: see docs/design/disk.md.
        advise(address, self._nbytes, mmap.MADV_SEQUENTIAL)
        return address

    def flush(self, descriptor: int) -> None:
        """Blocks until what was written through the mapping is on the drive. Raises OSError if that fails.

        Unlike msync, it does not wait until the bytes are safe from a loss of power: that takes ten times as long.
        """
        sync = libc_call("sync_file_range", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        if sync is None:  # only Linux has it
            os.fsync(descriptor)
        elif sync(descriptor, self._offset, self._nbytes, _WAIT_WRITE_WAIT) != 0:
            raise libc_error("sync_file_range")

    def written(self, offset: int = 0, nbytes: int | None = None) -> bool | None:
        """Whether a page of these bytes of a private mapping was written to; None if the system does not tell."""
        begin = self.address + offset
        end = begin + (self._nbytes - offset if nbytes is None else nbytes)
        first, last = begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                found = read_some(file.fileno(), 8 * (last - first), 8 * first)
        except OSError:
            return None
        pages = np.frombuffer(found, np.uint64)
        swapped, ours = pages >> _SWAPPED & 1, (pages >> _PRESENT & 1) & (~pages >> _OF_FILE & 1)
        return bool((swapped | ours).any())

    def dirty(self) -> None:
        """Makes every page dirty by writing to it what it holds. So `flush` brings all pages to disk; and the pages of
        a private mapping stay as they are now, whatever others write.
        """
        first_bytes = self.tensor(0, self._nbytes)[:: mmap.PAGESIZE]
        first_bytes.copy_(first_bytes.clone())

    def forget(self) -> None:
        """Lets go of the pages: they no longer count as memory of this process, and are read anew at the next touch.

        This undoes writes to a private mapping.
        """
        self.forget_pages(0, self._nbytes)

    def forget_pages(self, offset: int, nbytes: int) -> None:
        """As `forget`, for the whole pages among these bytes; the mapping's last page may be partial."""
        end = offset + nbytes if offset + nbytes == self._nbytes else (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin < end and advise(self.address + begin, end - begin, mmap.MADV_DONTNEED) != 0:
            raise libc_error("madvise")
