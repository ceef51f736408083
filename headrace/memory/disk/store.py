"""Where do bytes of the disk tier rest, and how are they reached? In one packed file; directly, or as memory.

docs/design/disk.md says when a range is accessed directly, when by mapping, and why.
"""

import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from headrace.config import format_bytes
from headrace.errors import DiskError, StateError
from headrace.memory.disk.checksums import Checksums
from headrace.memory.disk.directory import StoreDirectory
from headrace.memory.disk.extent import DISK_ALIGNMENT_BYTES, PIECE_BYTES, Extent, check_memory, pieces
from headrace.memory.disk.file import HAS_DIRECT, DirectFile
from headrace.memory.disk.log import DiskLog
from headrace.memory.disk.mapping import Mapping, Origin
from headrace.memory.disk.requests import Access, Kind, Request, Requests
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.ranges import Range
from headrace.runtime.lanes import Event
from headrace.runtime.node import Node
from headrace.runtime.system import reserve

_THREADS = 4  # threads that move bytes; measured, see docs/design/disk.md


class DiskStore(contextlib.AbstractContextManager["DiskStore"]):
    """Extents of a spill file in `directory`, read and written in the background. Safe to call from any thread.

    If the directory is missing, it is made, for its owner only. With `alone`, no other such store uses it until
    `close`. The file has no name, and is gone with the process. Extents are packed in the order of their allocation,
    and booked in `ledger`.

    With `node`, its ranks share one file, which the first one makes. All of them make this store and its extents in the
    same order, and each books its part. They have to agree on who writes what: mappings show writes to all ranks at
    once; `read` shows what has been handed over. `device`: where the events are that requests wait for.

    Reads and writes of the same bytes happen in the order of their submission; reads may run at once. `read` verifies
    bytes that `write` wrote, and bytes that were written through a mapping if they have been handed over.

    Raises ValueError when `directory` is a file, StateError when another store or process uses it, DiskError when no
    file can be made there.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        ledger: Ledger,
        log: DiskLog | None = None,
        *,
        threads: int = _THREADS,
        node: Node | None = None,
        device: torch.device | None = None,
        alone: bool = True,
    ) -> None:
        self._node = node
        self._path, self._alone = Path(directory).expanduser().resolve(), alone
        self._directory: StoreDirectory | None = None  # None on a node's other ranks
        self._ledger = ledger
        self._log = log or DiskLog()
        self._file = DirectFile(self._create_file(), f"the spill file in {self._path}", writable=True)
        self._requests = Requests(threads, device)
        self._checksums = Checksums()
        self._lock = threading.Lock()
        self._size_bytes = 0
        self._mappings: dict[Extent, Mapping] = {}
        self._unflushed: set[Extent] = set()  # extents with pages that did not reach the disk
        self._booked: Counter[str] = Counter()
        self._unbook = weakref.finalize(self, _unbook, ledger, self._booked)
        self._unbook.atexit = False
        self._warn()

    @property
    def direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._file.direct

    @property
    def is_open(self) -> bool:
        """Whether `close` has not been called."""
        return self._unbook.alive

    @property
    def nbytes(self) -> int:
        """Bytes that its extents take on disk."""
        return self._size_bytes

    def check_free(self, nbytes: int) -> None:
        """Raises DiskError (ENOSPC) if `nbytes` more do not fit on the disk. To be called before the first byte."""
        self._once(nbytes, f"{format_bytes(nbytes)} of disk", partial(self._check_free, nbytes, "the disk tier"))

    def allocate(self, name: str, nbytes: int, purpose: str, grain_bytes: int = PIECE_BYTES) -> Extent:
        """Takes `nbytes` of disk, rounded up to pages, for good. Errors call it `name`. Contents are arbitrary.

        A grain that was written as a whole is verified when it is read as a whole.

        Raises DiskError (ENOSPC), and takes nothing, if the disk has no room.
        """
        with self._lock:
            self._refuse_closed(name)
            extent = Extent(name, self._size_bytes, nbytes, grain_bytes)
            self._once(nbytes, f"{nbytes:,} bytes of disk for {name!r}", partial(self._reserve, extent))
            self._size_bytes += extent.capacity_bytes
            part = slice(0, extent.capacity_bytes) if self._node is None else self._node.part(extent.capacity_bytes)
            self._booked[purpose] += part.stop - part.start
            self._ledger.add(Tier.DISK, purpose, part.stop - part.start)
            return extent

    def part(self, extent: Extent, offset: int, nbytes: int) -> Extent:
        """Bytes from `offset` of `extent` as an extent of their own, whose requests have an order of their own.

        `offset` is a multiple of DISK_ALIGNMENT_BYTES. A caller that uses an extent both as a whole and in parts has to
        keep the order between the two.
        """
        if offset % DISK_ALIGNMENT_BYTES or not 0 <= offset <= offset + nbytes <= extent.capacity_bytes:
            raise ValueError(f"{extent.name!r}: {nbytes} bytes at offset {offset} are not whole pages within it")
        return Extent(extent.name, extent.offset + offset, nbytes)

    def read(
        self,
        extent: Extent,
        destination: torch.Tensor,
        offset: int = 0,
        *,
        within: slice | None = None,
        after: Event | None = None,
    ) -> Request:
        """Submits reading the bytes from `offset` of `extent` into `destination`, all or `within`. Never blocks.

        `destination` is uint8 on the CPU, contiguous, (nbytes,); the range may end in the extent's padding. Whole
        pages from a page border on are fastest. The destination is not filled before `after`, and may be touched
        when the request is done. The request raises DiskError (I/O fault, file too short, wrong checksum).
        """
        return self._submit(Access.READ, extent, destination, within, offset, after)

    def write(self, extent: Extent, source: torch.Tensor, offset: int = 0, *, after: Event | None = None) -> Request:
        """Submits writing `source` to `offset` of `extent`, as `read`. `source` must not change until it is done.

        After a write that failed, reads of its bytes fail too, until a write of all of them has succeeded.
        """
        return self._submit(Access.WRITE, extent, source, None, offset, after)

    def mapping(
        self, extent: Extent, offset: int = 0, nbytes: int | None = None, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """Bytes of the extent as memory: (elements,), a new storage at every call. Writes reach the file.

        It may be touched from when the Request of `to_mapping` is done until `to_direct` is called. It outlives the
        store. `read` verifies its bytes between `to_direct` and `to_mapping` only.
        """
        with self._lock:
            self._refuse_closed(extent.name)
            if extent not in self._mappings:
                place = self._file.descriptor, extent.offset, extent.capacity_bytes
                self._mappings[extent] = Mapping(*place, shared=True, origin=self.origin(extent))
                self._checksums.forget(extent)
            return self._mappings[extent].tensor(offset, extent.nbytes - offset if nbytes is None else nbytes, dtype)

    def own_mapping(self, extent: Extent) -> Mapping:
        """The extent as private memory: what this process writes there stays its own."""
        return Mapping(self._file.descriptor, extent.offset, extent.capacity_bytes, shared=False)

    def origin(self, extent: Extent, part_bytes: int | None = None) -> Origin:
        """The extent as an Origin; `part_bytes`: it is written in parts of that size; None: as a whole."""
        return _ExtentBytes(self, extent, part_bytes)

    def to_mapping(self, extent: Extent) -> Request:
        """Hands the extent over to users of its mapping. The request is done when all earlier reads and writes are."""
        self._checksums.forget(extent)
        return self._requests.submit(Request(extent, Access.WRITE, (), Kind.TURN, (0, extent.nbytes)), None)

    def to_direct(self, extent: Extent, within: Sequence[Range] | None = None) -> Request:
        """Hands the extent over to `read` and `write`: submits a flush of what was written through the mapping.

        Reads and writes that are submitted later wait for that. Until `to_mapping` or a write, `read` verifies all
        whole grains; with `within`, only those in these spans, and the others are not read here. The pages stop
        counting as memory of this process.
        If it fails, the pages are kept, and the next `to_direct` tries again: it raises DiskError (EBADMSG) if they
        have been lost or written to meanwhile.
        """
        mapping = self._mappings.get(extent)
        jobs = () if mapping is None else (partial(self._hand_over, extent, mapping, within),)
        kind = Kind.TURN if mapping is None else Kind.FLUSH
        return self._requests.submit(Request(extent, Access.WRITE, jobs, kind, (0, extent.capacity_bytes)), None)

    def expect(self, extent: Extent) -> None:
        """As `to_direct`, for an extent that is not written yet: grains that `write` writes as a whole are verified."""
        self._checksums.begin(extent)

    def release(self, extent: Extent) -> None:
        """Gives up what the extent holds, so that the caller may use its bytes in other extents.

        To be called when no request for it is under way.
        """
        self._checksums.drop(extent)
        self._requests.forgive(extent)

    def forget(self, extent: Extent) -> None:
        """Lets go of the mapping's pages: they no longer count as memory of this process. Writes to them reach disk."""
        mapping = self._mappings.get(extent)
        if mapping is not None:
            mapping.forget()

    def forked(self) -> None:
        """Called in a forked child: from now on, its writes to mappings stay in the child, not reaching the file."""
        self._lock = threading.Lock()
        for mapping in self._mappings.values():
            mapping.make_private(self._file.descriptor)

    def synchronize(self) -> None:
        """Blocks until all requests have ended; raises the first error of a write."""
        self._requests.synchronize()

    def close(self) -> None:
        """Blocks until all requests have ended, and frees the disk once no mapping is in use. May be called twice."""
        with self._lock:
            if not self.is_open:
                return
            self._unbook()
        self._requests.close()
        self._mappings.clear()
        self._file.close()
        if self._directory is not None:
            self._directory.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _create_file(self) -> int:
        def create() -> int:
            self._directory = StoreDirectory(self._path, alone=self._alone)
            return self._directory.create_file()

        if self._node is None:
            return create()
        with _as_disk_error():
            return self._node.hand_out(0, f"{self._path} as its disk tier", create)

    def _once(self, number: int, what: str, do: Callable[[], None]) -> None:
        """Calls `do` on a node's first rank; the others wait for it, and fail if it does."""
        if self._node is None:
            do()
        else:
            with _as_disk_error():
                self._node.hand_out(number, what, do)

    def _check_free(self, nbytes: int, what: str) -> None:
        if self._directory is not None:
            self._directory.check_free(nbytes, what)

    def _reserve(self, extent: Extent) -> None:
        self._check_free(extent.capacity_bytes, repr(extent.name))
        try:
            if extent.capacity_bytes:
                reserve(self._file.descriptor, extent.offset, extent.capacity_bytes)
        except OSError as error:
            os.ftruncate(self._file.descriptor, extent.offset)
            raise DiskError(
                error.errno,
                f"{extent.name!r}: {extent.capacity_bytes} bytes could not be taken in {self._path}:"
                f" {error.strerror}. Free space there, or give a directory on a larger disk.",
            ) from error

    def _submit(
        self,
        access: Access,
        extent: Extent,
        memory: torch.Tensor,
        within: slice | None,
        offset: int,
        after: Event | None,
    ) -> Request:
        first, last = (0, memory.nbytes) if within is None else (within.start, within.stop)
        check_memory(extent, memory, offset, last - first)
        job = self._read_piece if access is Access.READ else self._write_piece
        grains_bytes = max(1, PIECE_BYTES // extent.grain_bytes) * extent.grain_bytes  # of one request to the drive
        jobs: list[Callable[[], None]] = [
            partial(job, extent, begin, end, memory, first + begin - offset)
            for begin, end in pieces(offset, last - first, grains_bytes)
        ]
        return self._requests.submit(
            Request(extent, access, jobs, Kind.TRANSFER, (offset, offset + last - first)), after
        )

    def _read_piece(self, extent: Extent, begin: int, end: int, memory: torch.Tensor, at: int) -> None:
        begun_at, address = time.perf_counter(), memory.data_ptr() + at
        self._file.read(address, end - begin, extent.offset + begin, repr(extent.name))
        self._checksums.verify(extent, begin, end, address, self._file.name)
        self._log.note(Access.READ, extent.name, end - begin, begun_at)

    def _write_piece(self, extent: Extent, begin: int, end: int, memory: torch.Tensor, at: int) -> None:
        begun_at, address = time.perf_counter(), memory.data_ptr() + at
        if extent not in self._mappings:  # without a mapping, nobody else writes to it
            self._checksums.begin(extent)
        self._checksums.note(extent, begin, end, address)
        self._file.write(address, end - begin, extent.offset + begin, repr(extent.name))
        self._log.note(Access.WRITE, extent.name, end - begin, begun_at)

    def _hand_over(self, extent: Extent, mapping: Mapping, within: Sequence[Range] | None) -> None:
        begun_at = time.perf_counter()
        again = extent in self._unflushed
        if again:
            self._checksums.verify(extent, 0, extent.nbytes, mapping.address, self._file.name)
        else:
            self._checksums.note_all(extent, mapping.address, within)
        try:
            if again:
                mapping.dirty()  # pages that the kernel has tried to write count as clean
            mapping.flush(self._file.descriptor)
            mapping.forget()
            self._unflushed.discard(extent)
            self._log.note(Access.WRITE, extent.name, extent.nbytes, begun_at)
        except OSError as error:
            if not (again or within or within is None):  # no checksum is known, and the kernel may drop pages now
                self._checksums.note_all(extent, mapping.address)
            self._unflushed.add(extent)
            raise DiskError(
                error.errno,
                f"{extent.name!r}: what was written to {extent.nbytes} bytes at offset {extent.offset} of"
                f" {self._file.name} through memory did not reach the disk: {error.strerror}. See the kernel's log"
                " (dmesg) for a fault of the drive.",
            ) from error

    def _refuse_closed(self, name: str) -> None:
        if not self.is_open:
            raise StateError(f"{name!r} cannot be reached: the disk store is closed")

    def _warn(self) -> None:
        if self._directory is None:
            return
        slower = "reads and writes go through the page cache, at about half the drive's speed"
        if self._directory.in_ram:
            problem = "keeps its files in RAM: what rests there still takes host memory"
        elif not self.direct:
            problem = f"refuses direct I/O: {slower}"
        else:
            return
        problem = f"the filesystem of disk={str(self._path)!r} {problem}. Give a directory on a local ext4 or XFS."
        if not HAS_DIRECT and not self._directory.in_ram:
            problem = f"{sys.platform} has no direct I/O: {slower}; results are the same."
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


class _ExtentBytes(Origin):
    """The bytes of an extent, while its store is open. `part_bytes`: the size of the parts in which it is written."""

    def __init__(self, store: DiskStore, extent: Extent, part_bytes: int | None) -> None:
        self._store, self._extent, self._parts = weakref.ref(store), extent, part_bytes is not None
        self.nbytes, self.grain_bytes = extent.nbytes, part_bytes or extent.grain_bytes

    def read(self, destination: torch.Tensor, offset: int) -> Request | None:
        store = self._open()
        if store is None or not self._parts:
            return None if store is None else store.read(self._extent, destination, offset)
        return store.read(store.part(self._extent, offset, destination.nbytes), destination)

    def write(self, source: torch.Tensor, offset: int) -> Request | None:
        store = self._open()
        return None if store is None else store.write(self._extent, source, offset)

    def _open(self) -> DiskStore | None:
        store = self._store()
        return store if store is not None and store.is_open else None


@contextlib.contextmanager
def _as_disk_error() -> Iterator[None]:
    """Within this context, an OSError, such as another rank's error, becomes a DiskError."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(error.errno, error.strerror) from error


def _unbook(ledger: Ledger, booked: Counter[str]) -> None:
    for purpose, nbytes in booked.items():
        ledger.add(Tier.DISK, purpose, -nbytes)
