"""How are weights read from a checkpoint as it is? By name, in the background, or as memory; in place.

Tensors lie anywhere in such a file, direct I/O wants whole pages: so a thread reads the pages around them into memory
of its own, and lays the tensors out from there.
"""

import contextlib
import ctypes
import errno
import os
import queue
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from headrace.errors import CheckpointError, DiskError
from headrace.memory.arena import Arena
from headrace.memory.disk import mapping
from headrace.memory.disk.checkpoint_files import find_files
from headrace.memory.disk.extent import DISK_ALIGNMENT_BYTES, PIECE_BYTES, Extent, check_memory, disk_pages, pieces
from headrace.memory.disk.file import DirectFile
from headrace.memory.disk.log import DiskLog
from headrace.memory.disk.requests import Access, Kind, Request, Requests
from headrace.memory.disk.safetensors_header import TensorRecord, read_header
from headrace.memory.disk.torch_files import torch_records
from headrace.memory.ledger import Ledger
from headrace.runtime.lanes import Event
from headrace.runtime.system import CLOSED_IN_CHILDREN, read_some

__all__ = ["LEAST_READING_BYTES", "Checkpoint", "Part"]

_THREADS = 4
LEAST_READING_BYTES = _THREADS * DISK_ALIGNMENT_BYTES  # a page for each
_MEMORY_BYTES = 32 << 20
_ZIP = b"PK\x03\x04"
_GAP_BYTES = 64 << 10  # bytes between two tensors that are rather read than left out


@dataclass(frozen=True)
class Part:
    """Bytes of contiguous uint8 memory of the CPU."""

    memory: torch.Tensor
    begin: int
    nbytes: int


@dataclass(frozen=True)
class _Part:
    """Where bytes `begin` to `end` of a file go: to memory at `address`."""

    begin: int
    end: int
    address: int
    name: str


class Checkpoint:
    """The tensors of safetensors files, or of torch.save's: one file, an index with its shards, or a directory.

    They are never written to.

    `records` says of each tensor its file, offset, dtype, shape and bytes. Every header is checked in full: sizes,
    ranges without overlap or hole, dtypes, names, and files that lead out of the directory.

    Raises CheckpointError when something of that is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], ledger: Ledger) -> None:
        self._files: dict[str, DirectFile] = {}
        self._states: dict[str, tuple[int, int]] = {}
        self._mappings: dict[str, mapping.Mapping] = {}
        self._addresses: dict[int, str] = {}
        self.records: dict[str, TensorRecord] = {}
        for file, names in find_files(Path(path)).items():
            self._open(str(file), names)
        self._ledger = ledger
        self.log = DiskLog()  # of ranges that are read as they lie there
        self._bounces: queue.SimpleQueue[torch.Tensor] | None = None
        self._bounce_bytes = 0
        self._requests = Requests(_THREADS)
        if not self.direct:
            warnings.warn(
                f"the filesystem of {path} refuses direct I/O: the checkpoint is read through the page cache, at about"
                " half the drive's speed. Keep it on a local ext4 or XFS.",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def direct(self) -> bool:
        """Whether reads bypass the page cache."""
        return all(file.direct for file in self._files.values())

    def size_bytes(self, path: str) -> int:
        """Bytes of one of the files."""
        return self._states[path][0]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` as memory, read page by page as it is touched. Writes to it stay with this process."""
        record = self._record(name)
        if record.path not in self._mappings:
            file = self._files[record.path]
            mapped = self._mappings[record.path] = mapping.Mapping(file.descriptor, 0, file.size(), shared=False)
            mapped.show(_Bytes(weakref.ref(self), record.path, file.size()))
        memory = self._mappings[record.path].tensor(record.offset, record.nbytes)
        self._addresses[memory.data_ptr()] = name
        return memory.view(record.dtype).view(record.shape)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name under which `tensor()` gave out this memory, as a whole; None for any other."""
        name = self._addresses.get(tensor.data_ptr())
        if name is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        record = self.records[name]
        return name if (tensor.dtype, tensor.nbytes) == (record.dtype, record.nbytes) else None

    def written(self, name: str) -> bool:
        """Whether memory that `tensor` gave out for `name`, or of its neighbours in the same page, was written to."""
        record = self._record(name)
        mapped = self._mappings.get(record.path)
        return mapped is not None and bool(mapped.written(record.offset, record.nbytes))

    def as_in_file(self, name: str) -> bool:
        """Whether memory that `tensor` gave out for `name` certainly has what the file has."""
        record = self._record(name)
        mapped = self._mappings.get(record.path)
        return mapped is None or mapped.written(record.offset, record.nbytes) is False

    def read(self, destinations: Mapping[str, torch.Tensor], *, after: Event | None = None) -> Request:
        """Submits reading each named tensor into its destination. Never blocks.

        A destination is contiguous memory of the CPU, of any dtype and shape with as many bytes as the tensor. It may
        be touched when the request is done, and is filled not before `after`. DiskError (I/O fault, file too short,
        file changed since it was opened) comes from the request. The first call takes the memory that threads read
        into (32 MiB at most), and raises BudgetError when the ledger has no room for it.
        """
        if self._bounces is None:
            self._bounces = self._make_bounces(_MEMORY_BYTES, self._ledger)
        parts: dict[str, list[_Part]] = defaultdict(list)
        for name, destination in destinations.items():
            record = self._record(name)
            if destination.device.type != "cpu" or not destination.is_contiguous():
                raise TypeError(f"{name!r} is read into contiguous memory of the CPU, not of {destination.device}")
            if destination.nbytes != record.nbytes:
                raise ValueError(f"{name!r} has {record.nbytes} bytes; its destination has {destination.nbytes}")
            if record.nbytes:
                begin = record.offset
                parts[record.path].append(_Part(begin, begin + record.nbytes, destination.data_ptr(), name))
        memory = tuple(destinations.values())  # which the jobs keep alive
        jobs: list[Callable[[], None]] = [
            partial(self._read_piece, self._bounces, path, begin, end, among, memory)
            for path, found in parts.items()
            for begin, end, among in _ranges(found, self._bounce_bytes)
        ]
        extent = Extent(", ".join(list(destinations)[:3]), 0, 0)
        return self._requests.submit(Request(extent, Access.READ, jobs, Kind.TRANSFER, (0, 0)), after)

    @contextlib.contextmanager
    def reading(self, memory_bytes: int, ledger: Ledger) -> Iterator[None]:
        """Within, threads of `read` have so much memory in all, rounded down to pages for each; afterwards none."""
        self._bounces = self._make_bounces(memory_bytes, ledger)
        try:
            yield
        finally:
            self._bounces = None

    def read_range(
        self, path: str, offset: int, destination: torch.Tensor, *, what: str, after: Event | None = None
    ) -> Request:
        """Submits reading the bytes from `offset` of the file `path`, as they lie there, into `destination`: `what`.

        As `read`, without memory in between: fastest when `offset` is a multiple of DISK_ALIGNMENT_BYTES and
        `destination`, uint8 of shape (nbytes,), begins at a page and has whole pages or ends where the file does.
        """
        extent = Extent(Path(path).name, 0, self._states[path][0])
        check_memory(extent, destination, offset, destination.nbytes)
        jobs = [
            partial(self._read_bytes, path, what, begin, end, destination, begin - offset)
            for begin, end in pieces(offset, destination.nbytes)
        ]
        return self._requests.submit(Request(extent, Access.READ, jobs, Kind.TRANSFER, (0, 0)), after)

    def read_scattered(self, path: str, offset: int, memory: Sequence[Part], *, what: str) -> Request:
        """As `read_range`, into several parts of memory one after the other; in one request where all are pages."""
        extent = Extent(Path(path).name, 0, self._states[path][0])
        nbytes = sum(part.nbytes for part in memory)
        check_memory(extent, memory[0].memory, offset, nbytes)
        job = partial(self._read_parts, path, what, offset, nbytes, tuple(memory))
        return self._requests.submit(Request(extent, Access.READ, [job], Kind.TRANSFER, (0, 0)), None)

    def forget_writes(self, name: str) -> None:
        """Memory that `tensor` gave out for `name` has what the file has, but for pages that neighbours share."""
        record = self._record(name)
        if record.path in self._mappings:
            self._mappings[record.path].forget_pages(record.offset, record.nbytes)

    def forget_pages(self) -> None:
        """What was read through memory from `tensor` counts no more as this process's. Undoes writes to it."""
        for mapped in self._mappings.values():
            mapped.forget()

    def close(self) -> None:
        """Waits for what was submitted and closes the files. Memory from `tensor` stays."""
        self._requests.close()
        self._bounces = None
        self._mappings.clear()
        for file in self._files.values():
            file.close()

    def _open(self, path: str, names: frozenset[str] | None) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | CLOSED_IN_CHILDREN)
        except OSError as error:
            raise DiskError(error.errno, f"{path} cannot be opened: {error.strerror}") from error
        self._files[path] = DirectFile(descriptor, path, writable=False)
        self._states[path] = _state(descriptor)
        is_zip = read_some(descriptor, len(_ZIP), 0) == _ZIP  # as files of torch.save are
        found = {record.name: record for record in (torch_records(path) if is_zip else read_header(descriptor, path))}
        missing = sorted(names - found.keys()) if names is not None else []
        if missing:
            raise CheckpointError(
                f"{path} lacks {missing[0]!r} (of {len(missing)} missing ones), which the index says is in it;"
                " download the checkpoint again"
            )
        for name in found if names is None else names:
            if name in self.records:
                raise CheckpointError(
                    f"{name!r} is in {self.records[name].path} and in {path}; give the path of one of the files"
                )
            self.records[name] = found[name]

    def _record(self, name: str) -> TensorRecord:
        if name not in self.records:
            raise CheckpointError(f"the checkpoint has no tensor {name!r} among its {len(self.records)}")
        return self.records[name]

    def _read_piece(
        self,
        bounces: "queue.SimpleQueue[torch.Tensor]",
        path: str,
        begin: int,
        end: int,
        parts: list[_Part],
        _memory: tuple[torch.Tensor, ...],
    ) -> None:
        """Reads the pages around bytes `begin` to `end`, and lays out the parts that lie there."""
        file, what = self._unchanged(path, repr(parts[0].name)), repr(parts[0].name)
        first = begin - begin % DISK_ALIGNMENT_BYTES
        last = min(disk_pages(end), self._states[path][0])
        bounce = bounces.get()  # there is one for each thread
        try:
            file.read(bounce.data_ptr(), last - first, first, what)
            for part in parts:
                at, to = max(begin, part.begin), min(end, part.end)
                ctypes.memmove(part.address + at - part.begin, bounce.data_ptr() + at - first, to - at)
        finally:
            bounces.put(bounce)

    def _read_bytes(self, path: str, what: str, begin: int, end: int, destination: torch.Tensor, at: int) -> None:
        begun_at = time.perf_counter()
        self._unchanged(path, repr(what)).read(destination.data_ptr() + at, end - begin, begin, repr(what))
        self.log.note(Access.READ, what, end - begin, begun_at)

    def _read_parts(self, path: str, what: str, offset: int, nbytes: int, memory: Sequence[Part]) -> None:
        begun_at = time.perf_counter()
        addresses = [(part.memory.data_ptr() + part.begin, part.nbytes) for part in memory]
        self._unchanged(path, repr(what)).read_scattered(addresses, offset, repr(what))
        self.log.note(Access.READ, what, nbytes, begun_at)

    def _unchanged(self, path: str, what: str) -> DirectFile:
        file = self._files[path]
        if _state(file.descriptor) != self._states[path]:
            raise DiskError(errno.ESTALE, f"{what}: {path} was written to since it was opened; load the model again")
        return file

    def _make_bounces(self, memory_bytes: int, ledger: Ledger) -> "queue.SimpleQueue[torch.Tensor]":
        """Memory that threads read whole pages into. No range that is read at once is larger."""
        biggest = max((size for size, _ in self._states.values()), default=0)
        share = max(1, memory_bytes // _THREADS // DISK_ALIGNMENT_BYTES) * DISK_ALIGNMENT_BYTES
        nbytes = min(PIECE_BYTES, share, disk_pages(biggest))
        self._bounce_bytes = nbytes
        arena = Arena(nbytes * _THREADS, torch.device("cpu"), ledger, "staging")
        bounces: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for index in range(_THREADS):
            bounces.put(arena.tensor(index * nbytes, nbytes))
        return bounces


@dataclass(frozen=True)
class _Bytes:
    """What a private mapping shows: one of the files, where nothing was written to it."""

    checkpoint: "weakref.ref[Checkpoint]"
    path: str
    nbytes: int

    def grain(self, offset: int) -> tuple[int, int]:
        first = offset // PIECE_BYTES * PIECE_BYTES
        return first, min(first + PIECE_BYTES, self.nbytes)

    def read(self, destination: torch.Tensor, offset: int) -> Request | None:
        checkpoint = self.checkpoint()
        mapped = None if checkpoint is None else checkpoint._mappings.get(self.path)
        if checkpoint is None or mapped is None or mapped.written(offset, destination.nbytes) is not False:
            return None
        return checkpoint.read_range(self.path, offset, destination, what=Path(self.path).name)

    def shows(self, path: str, offset: int, offset_there: int, nbytes: int) -> bool:
        checkpoint = self.checkpoint()
        mapped = None if checkpoint is None else checkpoint._mappings.get(self.path)
        if checkpoint is None or mapped is None or offset != offset_there:
            return False
        there, here = os.stat(path), os.fstat(checkpoint._files[self.path].descriptor)
        same = (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
        return same and mapped.written(offset, nbytes) is False

    def write(self, source: torch.Tensor, offset: int) -> Request | None:
        return None


def _state(descriptor: int) -> tuple[int, int]:
    """Size in bytes, and when it was written to last."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _ranges(parts: list[_Part], most_bytes: int) -> list[tuple[int, int, list[_Part]]]:
    """Ranges of a file, each with the parts that it holds bytes of. Neighbours go together.

    With the rest of its pages, none has more than `most_bytes`.
    """
    runs: list[list[_Part]] = []
    for part in sorted(parts, key=lambda part: part.begin):
        if runs and part.begin - runs[-1][-1].end <= _GAP_BYTES:
            runs[-1].append(part)
        else:
            runs.append([part])
    ranges = []
    for run in runs:
        for begin, end in pieces(run[0].begin, run[-1].end - run[0].begin, most_bytes):
            among = [part for part in run if part.begin < end and begin < part.end]
            if among:  # else it lies between two parts
                ranges.append((begin, end, among))
    return ranges
