"""Where do a block's bytes rest while it is away? In an arena, or in an extent of a disk store."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from millrace.memory.arena import Arena
from millrace.memory.disk import DISK_ALIGNMENT_BYTES, Checkpoint, DiskStore, Request, disk_pages
from millrace.weights.model.slot import Layout
from millrace.weights.rest.fetching import Piece

__all__ = ["CheckpointRest", "DiskRest", "HostRest", "Rest"]


class Rest(ABC):
    """The bytes of one block at rest, as user code may see them: through tensors, one for each parameter."""

    memory: torch.Tensor | None = None  # all of them, shape (nbytes,), for copies; None: they have to be fetched
    writable = True  # whether what is written through the places is kept there

    @abstractmethod
    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """Each parameter's place: in a storage of its own, or in one that it shares as it did before."""

    def pieces(self, chunk_bytes: int) -> Sequence[Piece]:
        """The reads that bring the whole block, each of `chunk_bytes` at most, past the page cache."""
        raise NotImplementedError(f"{type(self).__name__} has memory, and is not fetched")

    def flush(self) -> None:  # noqa: B027  # a place that is written where it is read has nothing to do
        """What was written through the places goes to where the pieces are read, and leaves this process's memory."""

    @property
    def flushed(self) -> bool:
        """Whether the last `flush` is under way or done, and did not fail."""
        return True


class HostRest(Rest):
    """Bytes in an arena."""

    memory: torch.Tensor

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.memory = arena.tensor(0, nbytes)
        self._arena = arena

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, self._arena.tensor)


class DiskRest(Rest):
    """Bytes in an extent of a disk store, mapped for the places, and read by `chunk_bytes`.

    `spilled` is told how many bytes go there.
    """

    def __init__(
        self, store: DiskStore, name: str, nbytes: int, chunk_bytes: int, spilled: Callable[[int], None]
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._store = store
        self._extent = store.allocate(name, nbytes, "weights")
        self._spilled = spilled
        self._flushing: Request | None = None

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, partial(self._store.mapping, self._extent))

    def pieces(self, chunk_bytes: int) -> Sequence[Piece]:
        whole = self._extent.nbytes
        return [self._piece(first, min(chunk_bytes, whole - first)) for first in range(0, whole, chunk_bytes)]

    def flush(self) -> None:
        self._spilled(self._extent.nbytes)
        self._flushing = self._store.to_direct(self._extent, self._chunk_bytes)

    @property
    def flushed(self) -> bool:
        return self._flushing is not None and self._flushing.error is None

    def _piece(self, first: int, nbytes: int) -> Piece:
        return Piece(
            read=lambda chunk: self._store.read(self._extent, chunk[:nbytes], first),
            nbytes=nbytes,
            parts=((0, nbytes, first),),
        )


class CheckpointRest(Rest):
    """Bytes of a block `what` where a checkpoint has them: nothing is written. `names`: of its tensors, in order.

    The places are the parameters' own memory, mapped so that writes stay with this process: a block whose homes change
    moves to a disk store.
    """

    writable = False

    def __init__(self, checkpoint: Checkpoint, what: str, names: Sequence[str], layouts: Sequence[Layout]) -> None:
        self._checkpoint = checkpoint
        self._what = what
        self._names = names
        self._layouts = layouts

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return [self._checkpoint.tensor(name) for name in self._names]

    def pieces(self, chunk_bytes: int) -> Sequence[Piece]:
        """Whole pages around the tensors; copies to the device lay them out."""
        runs: list[_Run] = []
        records = [self._checkpoint.records[name] for name in self._names]
        for record, layout in sorted(
            zip(records, self._layouts, strict=True), key=lambda one: (one[0].path, one[0].offset)
        ):
            at = 0
            while at < record.nbytes:
                begin = record.offset + at
                if not runs or not runs[-1].reaches(record.path, begin, chunk_bytes):
                    runs.append(_Run(record.path, begin // DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES))
                run = runs[-1]
                nbytes = min(record.nbytes - at, run.first + chunk_bytes - begin)
                run.end = begin + nbytes
                run.parts.append((begin - run.first, nbytes, layout.offset + at))
                at += nbytes
        return [self._piece(run) for run in runs]

    def _piece(self, run: "_Run") -> Piece:
        nbytes = min(disk_pages(run.end), self._checkpoint.size_bytes(run.path)) - run.first

        def read(chunk: torch.Tensor) -> Request:
            return self._checkpoint.read_range(run.path, run.first, chunk[:nbytes], what=self._what)

        return Piece(read=read, nbytes=nbytes, parts=tuple(run.parts))


_GAP_BYTES = 64 << 10  # between two tensors of a file, that are rather read than left out


@dataclass
class _Run:
    """Neighbours in a file that one read brings."""

    path: str
    first: int  # byte of the file, a whole page
    end: int = 0
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # (in the chunk, bytes, in the block)

    def reaches(self, path: str, begin: int, chunk_bytes: int) -> bool:
        """Whether the same read can bring what begins there, or a part of it."""
        return path == self.path and begin - self.end <= _GAP_BYTES and begin < self.first + chunk_bytes


def _carve(layouts: Sequence[Layout], tensor: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """Views of `tensor(first byte, bytes)`, one storage for each region."""
    regions = {region: tensor(region[0], region[1] - region[0]) for region in {layout.region for layout in layouts}}
    return [layout.view(regions[layout.region], first_byte=layout.region[0]) for layout in layouts]
