"""How are weights read from a checkpoint in place, without a conversion? By name, in the background, or as memory."""

import contextlib
import ctypes
import os
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from headrace.errors import CheckpointError
from headrace.memory.arena import Arena
from headrace.memory.disk import mapping
from headrace.memory.disk.checkpoint_files import tensors_in
from headrace.memory.disk.extent import DISK_ALIGNMENT_BYTES, PIECE_BYTES, Extent, check_memory, disk_pages
from headrace.memory.disk.log import DiskLog
from headrace.memory.disk.requests import Access, Kind, Request, Requests
from headrace.memory.disk.saved_file import Place, SavedFile, TensorInFile, read_all
from headrace.memory.ledger import Ledger

_THREADS = 4
LEAST_READING_BYTES = _THREADS * DISK_ALIGNMENT_BYTES  # a page for each thread
_MEMORY_BYTES = 32 << 20


@dataclass(frozen=True)
class Part:
    """Bytes of contiguous uint8 memory of the CPU."""

    memory: torch.Tensor
    begin: int
    nbytes: int


class Checkpoint:
    """The tensors of safetensors files, or of torch.save's: one file, an index with its shards, or a directory.

    The files are never written to.

    `records` has each tensor's file, offset, dtype, shape and bytes. Every header is checked in full: sizes, ranges
    without overlaps or holes, dtypes, names, and that no file leads out of the directory.

    Raises CheckpointError if any of that is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], ledger: Ledger) -> None:
        self._files: dict[str, SavedFile] = {}
        self._mappings: dict[str, mapping.Mapping] = {}
        self._addresses: dict[int, str] = {}
        self.records = tensors_in(Path(path), self._open)
        self._ledger = ledger
        self.log = DiskLog()  # of the reads by `read_range`
        self._memory: list[torch.Tensor] = []  # the memory that `read` reads through
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
        return self._files[path].nbytes

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` as memory that is read page by page when touched. Writes to it stay with this process."""
        record, mapped = self._mapped(name)
        if mapped is None:
            file = record.file
            mapped = mapping.Mapping(file.descriptor, 0, file.nbytes, shared=False, origin=_FileBytes(self, file))
            self._mappings[record.path] = mapped
        memory = mapped.tensor(record.offset, record.nbytes)
        self._addresses[memory.data_ptr()] = name
        return memory.view(record.dtype).view(record.shape)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of the tensor that `tensor()` returned, if this is that whole tensor; None for any other."""
        name = self._addresses.get(tensor.data_ptr())
        if name is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        record = self.records[name]
        return name if (tensor.dtype, tensor.nbytes) == (record.dtype, record.nbytes) else None

    def written(self, name: str) -> bool | None:
        """Whether a page of the memory that `tensor` returned for `name` was written to; neighbours may share pages.

        None if the system does not tell.
        """
        record, mapped = self._mapped(name)
        return False if mapped is None else mapped.written(record.offset, record.nbytes)

    def read(self, destinations: Mapping[str, torch.Tensor]) -> None:
        """Reads each named tensor into its destination.

        A destination is contiguous memory of the CPU, of any dtype and shape with as many bytes as the tensor. Raises
        DiskError (I/O fault, file too short, file changed since it was opened). Outside of `reading`, it also raises
        BudgetError if the ledger has no room for the memory that threads read into (32 MiB at most).
        """
        places: dict[SavedFile, list[Place]] = defaultdict(list)
        for name, destination in destinations.items():
            record, _ = self._mapped(name)
            if destination.device.type != "cpu" or not destination.is_contiguous():
                raise TypeError(f"{name!r} is read into contiguous memory of the CPU, not of {destination.device}")
            if destination.nbytes != record.nbytes:
                raise ValueError(f"{name!r} has {record.nbytes} bytes; its destination has {destination.nbytes}")
            places[record.file].append((record, partial(_copy, destination)))
        with contextlib.nullcontext() if self._memory else self.reading(_MEMORY_BYTES, self._ledger):
            read_all(places.items(), self._memory)

    @contextlib.contextmanager
    def reading(self, memory_bytes: int, ledger: Ledger) -> Iterator[None]:
        """Within this context, `read` uses this much memory in all: an equal share of whole pages for each thread."""
        biggest = max((file.nbytes for file in self._files.values()), default=0)
        share = max(1, memory_bytes // _THREADS // DISK_ALIGNMENT_BYTES) * DISK_ALIGNMENT_BYTES
        nbytes = min(PIECE_BYTES, share, disk_pages(biggest))
        arena = Arena(nbytes * _THREADS, torch.device("cpu"), ledger, "staging")
        self._memory = [arena.tensor(index * nbytes, nbytes) for index in range(_THREADS)]
        del arena
        try:
            yield
        finally:
            self._memory = []

    def read_range(self, path: str, offset: int, memory: Sequence[Part], *, what: str) -> Request:
        """Submits reading the bytes `what`, at `offset` of the file `path`, as they are there. Never blocks.

        They go into the parts of memory one after the other. That is fastest, and one request to the drive, if `offset`
        is a multiple of DISK_ALIGNMENT_BYTES, and each part has whole pages and begins at one. The request raises
        DiskError.
        """
        file = self._files[path]
        extent = Extent(file.path.name, 0, file.nbytes)
        check_memory(extent, memory[0].memory, offset, sum(part.nbytes for part in memory))
        job = partial(self._read_parts, file, offset, tuple(memory), what)
        return self._requests.submit(Request(extent, Access.READ, [job], Kind.TRANSFER, (0, 0)), None)

    def forget_writes(self, name: str) -> None:
        """Makes memory that `tensor` returned for `name` show the file again, but for pages that neighbours share."""
        record, mapped = self._mapped(name)
        if mapped is not None:
            mapped.forget_pages(record.offset, record.nbytes)

    def forget_pages(self) -> None:
        """Lets go of the pages of all memory from `tensor`: they no longer count as this process's. Undoes writes."""
        for mapped in self._mappings.values():
            mapped.forget()

    def close(self) -> None:
        """Blocks until all requests have ended, and closes the files. Memory from `tensor` stays valid."""
        self._requests.close()
        self._mappings.clear()
        for file in self._files.values():
            file.close()

    def _open(self, path: str) -> SavedFile:
        self._files[path] = SavedFile(Path(path))
        return self._files[path]

    def _mapped(self, name: str) -> tuple[TensorInFile, mapping.Mapping | None]:
        """The record of a tensor, and the mapping of its file, if `tensor` has made one."""
        if name not in self.records:
            raise CheckpointError(f"the checkpoint has no tensor {name!r} among its {len(self.records)}")
        record = self.records[name]
        return record, self._mappings.get(record.path)

    def _read_parts(self, file: SavedFile, offset: int, memory: Sequence[Part], what: str) -> None:
        begun_at = time.perf_counter()
        file.fill([(part.memory.data_ptr() + part.begin, part.nbytes) for part in memory], offset, repr(what))
        self.log.note(Access.READ, what, sum(part.nbytes for part in memory), begun_at)


def _copy(destination: torch.Tensor, begin: int, memory: torch.Tensor) -> None:
    ctypes.memmove(destination.data_ptr() + begin, memory.data_ptr(), memory.nbytes)


class _FileBytes(mapping.Origin):
    """The bytes of a file that a private mapping shows. They are read only where the mapping was not written to."""

    grain_bytes = PIECE_BYTES

    def __init__(self, checkpoint: Checkpoint, file: SavedFile) -> None:
        self._checkpoint, self._file, self.nbytes = weakref.ref(checkpoint), file, file.nbytes

    def read(self, destination: torch.Tensor, offset: int) -> Request | None:
        checkpoint = self._checkpoint()
        if checkpoint is None or not self._is_as_in_file(checkpoint, offset, destination.nbytes):
            return None
        part = Part(destination, 0, destination.nbytes)
        return checkpoint.read_range(str(self._file.path), offset, [part], what=self._file.path.name)

    def shows(self, path: str, offset: int, offset_there: int, nbytes: int) -> bool:
        checkpoint = self._checkpoint()
        if checkpoint is None or offset != offset_there:
            return False
        same = os.path.samestat(os.stat(path), os.fstat(self._file.descriptor))
        return same and self._is_as_in_file(checkpoint, offset, nbytes)

    def _is_as_in_file(self, checkpoint: Checkpoint, offset: int, nbytes: int) -> bool:
        mapped = checkpoint._mappings.get(str(self._file.path))
        return mapped is not None and mapped.written(offset, nbytes) is False
