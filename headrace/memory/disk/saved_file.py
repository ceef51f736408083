"""What is a tensor in a file, and how do its bytes get to where they belong? In pieces, past the page cache.

Tensors lie anywhere in a file, and direct I/O requires whole pages. So threads read pieces into memory of their own,
compare checksums if the file has them, and copy the bytes to the tensors from there.
"""

import contextlib
import ctypes
import errno
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import torch

from headrace.errors import CheckpointError, DiskError
from headrace.memory.disk.checksums import checksum
from headrace.memory.disk.extent import DISK_ALIGNMENT_BYTES, disk_pages, pieces
from headrace.memory.disk.file import DirectFile
from headrace.memory.pages import map_pages
from headrace.runtime.progress import progress
from headrace.runtime.system import CLOSED_IN_CHILDREN, read_some

GRAIN_BYTES = 4 << 20  # in a checkpoint's file, the bytes that have a checksum together
_READERS = 8
_KEPT_GRAINS = 6  # grains that are kept for reads of neighbouring bytes


class SavedFile:
    """A file that is only read. `checksums` has one for each GRAIN_BYTES of it; None: the file has none.

    Raises CheckpointError if it cannot be read.
    """

    def __init__(self, path: Path, checksums: Sequence[int] | None = None) -> None:
        self.path = path
        try:
            self._file = DirectFile(os.open(path, os.O_RDONLY | CLOSED_IN_CHILDREN), str(path), writable=False)
            self.descriptor, self.direct = self._file.descriptor, self._file.direct
            self._state = self._state_now()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        self.nbytes, self.checksums = self._state[0], checksums
        self.read_otherwise: set[int] = set()  # grains that `read_all` need not read, by first byte
        self._kept: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def fill(self, memory: Sequence[tuple[int, int]], begin: int, what: str) -> None:
        """Reads the bytes from `begin` on into several (address, bytes), one after the other, without verifying them.

        It is one request if all are whole pages. Raises DiskError, also if a file without checksums has been written to
        since it was opened.
        """
        if self.checksums is None and self._state_now() != self._state:
            raise DiskError(
                errno.ESTALE, f"{what}: {self.path} was written to since it was opened; load the model again"
            )
        self._file.read_scattered(memory, begin, what)

    def fill_checked(self, memory: torch.Tensor, begin: int, end: int, what: str) -> None:
        """Reads these bytes (one grain, if the file has checksums), and verifies them. CheckpointError names `what`."""
        self.fill([(memory.data_ptr(), end - begin)], begin, what)
        if self.checksums is None:
            return
        if checksum(memory.data_ptr(), end - begin) != self.checksums[begin // GRAIN_BYTES]:
            raise CheckpointError(
                f"{self.path}: bytes {begin} to {end}, of {what}, are not those that were written (their checksum"
                " differs). What was loaded so far is not to be used; load another checkpoint, or copy this one anew"
                " from where it came"
            )

    def read(self, begin: int, memory: torch.Tensor, what: str) -> None:
        """Fills uint8 `memory` with the bytes from `begin` on, verified. Keeps grains for reads of nearby bytes."""
        if begin + memory.nbytes > self.nbytes:
            raise CheckpointError(f"{self.path} ends at byte {self.nbytes}, before {what} does; it is not sound")
        for first, last in pieces(begin, memory.nbytes, GRAIN_BYTES):
            grain = first // GRAIN_BYTES * GRAIN_BYTES
            with self._lock:
                kept = self._kept.pop(grain, None)
                if kept is None:
                    full = len(self._kept) >= _KEPT_GRAINS
                    kept = self._kept.popitem(last=False)[1] if full else new_pages(GRAIN_BYTES)
                    self.fill_checked(kept, grain, min(grain + GRAIN_BYTES, self.nbytes), what)
                self._kept[grain] = kept
                ctypes.memmove(memory.data_ptr() + first - begin, kept.data_ptr() + first - grain, last - first)

    def peek(self, begin: int, nbytes: int) -> bytes:
        """A few bytes of the file, not verified by checksums."""
        return read_some(self.descriptor, nbytes, begin)

    def bytes(self) -> bytes:
        """All bytes of a small file, verified."""
        memory = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        self.read(0, memory, self.path.name)
        return memory.numpy().tobytes()

    def let_go(self) -> None:
        """Frees the grains that `read` has kept."""
        with self._lock:
            self._kept.clear()

    def close(self) -> None:
        """Closes the file. A failure is ignored: the file was only read, and nothing is lost."""
        self.let_go()
        with contextlib.suppress(OSError):
            self._file.close()

    def _state_now(self) -> tuple[int, int]:
        """The file's size in bytes, and the time of its last write."""
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, eq=False)
class TensorAtRest(ABC):
    """A tensor like `like` (on meta), whose bytes are on disk, in the order of memory: as the strides of `like` say."""

    like: torch.Tensor

    @abstractmethod
    def read(self, begin: int, memory: torch.Tensor) -> None:
        """Fills uint8 `memory` with its bytes from `begin` on."""

    @property
    def nbytes(self) -> int:
        return self.like.nbytes

    def load(self) -> torch.Tensor:
        """Reads the whole tensor into memory."""
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        if self.nbytes:
            self.read(0, flat)
        return flat.view(self.like.dtype).as_strided(self.like.shape, self.like.stride())


@dataclass(frozen=True, eq=False)
class TensorInFile(TensorAtRest):
    """A tensor whose bytes are in the file from `offset` on."""

    name: str
    file: SavedFile
    offset: int

    @property
    def path(self) -> str:
        return str(self.file.path)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    @property
    def end(self) -> int:
        """The offset in the file just past its last byte."""
        return self.offset + self.nbytes

    @property
    def whole_grains(self) -> range:
        """The grains of the file, by their first byte, that have bytes of this tensor only."""
        return range(-(-self.offset // GRAIN_BYTES) * GRAIN_BYTES, self.end - GRAIN_BYTES + 1, GRAIN_BYTES)

    def read(self, begin: int, memory: torch.Tensor) -> None:
        self.file.read(self.offset + begin, memory, repr(self.name))


# A tensor of a file, and `put(begin, memory)`, which takes its bytes from `begin` on. Several threads call it at once,
# each with other bytes.
Place = tuple[TensorInFile, Callable[[int, torch.Tensor], None]]


def read_all(work: Iterable[tuple[SavedFile, Sequence[Place]]], memory: Sequence[torch.Tensor]) -> None:
    """Reads all tensors into their places, with a thread for each piece of `memory`: whole pages, and GRAIN_BYTES at
    least if a file has checksums. Raises the first error, a CheckpointError or DiskError.

    Files with checksums are read as a whole, except for grains in `read_otherwise`, so that the bytes around tensors
    are verified, too.
    """
    free: SimpleQueue[torch.Tensor] = SimpleQueue()
    for one in memory:
        free.put(one)

    def bring(file: SavedFile, first: int, last: int, places: Sequence[Place]) -> None:
        own = free.get()
        try:
            file.fill_checked(own, first, last, repr(places[0][0].name) if places else file.path.name)
            for tensor, put in places:
                begin, end = max(tensor.offset, first), min(tensor.end, last)
                put(begin - tensor.offset, own[begin - first : end - first])
        finally:
            free.put(own)

    with ThreadPoolExecutor(len(memory), thread_name_prefix="headrace-load") as readers:
        jobs = [
            (readers.submit(bring, file, *piece), piece[1] - piece[0])
            for file, places in work
            for piece in _pieces(file, places, memory[0].nbytes)
        ]
        try:
            with progress("headrace: reading", sum(nbytes for _, nbytes in jobs)) as bar:
                for job, nbytes in jobs:
                    job.result()
                    bar.update(nbytes)
        except BaseException:
            for job, _ in jobs:
                job.cancel()
            raise


def _pieces(file: SavedFile, places: Sequence[Place], most_bytes: int) -> Iterator[tuple[int, int, Sequence[Place]]]:
    """The pieces that are each read in one go, in order: the first byte, the one past the last, and their places."""
    size = most_bytes if file.checksums is None else GRAIN_BYTES
    found: dict[int, list[Place]] = defaultdict(list)
    for place in places:
        for begin, _ in pieces(place[0].offset, place[0].nbytes, size):
            found[begin // size * size].append(place)
    for first, _ in pieces(0, file.nbytes if file.checksums is not None else 0, size):
        if first not in file.read_otherwise:
            found[first]  # adds the grain, even if no place needs it
    for first, among in sorted(found.items(), key=lambda item: item[0]):
        last = min(first + size, file.nbytes)
        if file.checksums is None:  # only the pages that are needed
            first = max(first, min(tensor.offset for tensor, _ in among) // DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES)
            last = min(last, disk_pages(max(tensor.end for tensor, _ in among)))
        yield first, last, among


def reading_memory() -> list[torch.Tensor]:
    """Memory for `read_all`: as much as keeps a drive busy, measured; see docs/design/checkpoints.md."""
    return [new_pages(GRAIN_BYTES) for _ in range(_READERS)]


def new_pages(nbytes: int) -> torch.Tensor:
    """Memory of whole pages that are not touched yet."""
    return torch.frombuffer(map_pages(nbytes, touched=False), dtype=torch.uint8)
