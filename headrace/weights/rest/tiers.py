"""Where do a block's bytes rest while it is away? In an arena, of this process or of a node, or on disk."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
import xxhash

from headrace.memory.arena import Arena
from headrace.memory.disk import DISK_ALIGNMENT_BYTES, Checkpoint, DiskStore, Part, Request, copy_on_disk, disk_pages
from headrace.memory.shared import Common
from headrace.runtime.node import Node
from headrace.weights.model.managed_param import Layout, ManagedParam
from headrace.weights.rest.filling import Source, fill, from_files
from headrace.weights.rest.reads import DiskRead, Range, ReadEvent

__all__ = ["CheckpointRest", "DiskRest", "HostRest", "Rest", "SharedRest"]


class Rest(ABC):
    """The bytes of one block at rest, as user code may see them: through tensors, one for each parameter."""

    memory: torch.Tensor | None = None  # all of them, shape (nbytes,), for copies; None: they have to be fetched
    writable = True  # whether what is written through the places is kept there
    on_disk = False
    has_own_files = False  # that this process alone writes
    range_bytes = 16  # where each rank brings a range of a block, its length is a multiple of this
    filled = False  # past the page cache: the files have what the places show, until `flush`

    @abstractmethod
    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """Each parameter's place: in a storage of its own, or in one that it shares as it did before."""

    def pieces(self, chunk_bytes: int, ranges: Sequence[Range] | None = None) -> Sequence[DiskRead]:
        """The reads that bring the whole block, or these ranges of it, each of `chunk_bytes` at most, past the page
        cache.
        """
        raise NotImplementedError(f"{type(self).__name__} has memory, and is not fetched")

    def flush(self, ranges: Sequence[Range] | None = None) -> None:  # noqa: B027  # nothing to do where places are read
        """What was written through the places goes to where the pieces are read, and leaves this process's memory;
        `ranges`: until the next flush only these are read.
        """

    def take_homes(self, slots: Sequence[ManagedParam], *, keeps: bool = False) -> None:  # noqa: B027  # they may lie anywhere
        """Homes of the block's `slots` that travel in another dtype lie where this has a place for them; `keeps`: with
        what they hold.
        """

    @property
    def is_written(self) -> bool:
        """Whether the places have what only this process has."""
        return False

    def forget_writes(self) -> None:  # noqa: B027  # nothing to do where they are kept
        """The homes lie elsewhere now, and nobody has the places: memory that writes to these took is free."""

    def was_written(self) -> None:
        """All of it was, past the places."""
        raise NotImplementedError(f"{type(self).__name__} has no files of its own")

    @property
    def flushed(self) -> bool:
        """Whether the last `flush` is under way or done, and did not fail."""
        return True

    @property
    def is_as_in_files(self) -> bool:
        """Whether the places certainly have what the files have without a `flush`."""
        return False


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

    `spilled` is told how many bytes go there. `ranks`: each of so many may read a range by itself, and check it.
    """

    on_disk = has_own_files = True

    def __init__(
        self, store: DiskStore, name: str, nbytes: int, chunk_bytes: int, spilled: Callable[[int], None], ranks: int = 1
    ) -> None:
        self._chunk_bytes = self.range_bytes = chunk_bytes
        if ranks > 1:
            self._chunk_bytes = self.range_bytes = _grain_bytes(nbytes // ranks, chunk_bytes)
        self.store = store
        self.extent = store.allocate(name, nbytes, "weights", self._chunk_bytes)
        self._spilled = spilled
        self._flushing: Request | None = None

    def fill(self, source: Source) -> None:
        """All bytes of the block come from `source`, past the page cache. To be called when the places were made."""
        self._spilled(self.extent.nbytes)
        self.store.expect(self.extent)
        fill(self.extent.nbytes, self._chunk_bytes, source, partial(self.store.write, self.extent))
        self.filled = True

    def fill_from(self, rest: "CheckpointRest", layouts: Sequence[Layout]) -> None:
        """As `fill`, with what a checkpoint has."""
        regions = [(layout.offset, layout.nbytes) for layout in layouts]
        self.fill(from_files(regions, self._chunk_bytes, rest.pieces))

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, partial(self.store.mapping, self.extent))

    def pieces(self, chunk_bytes: int, ranges: Sequence[Range] | None = None) -> Sequence[DiskRead]:
        whole = self.extent.nbytes
        chunk_bytes = max(chunk_bytes // self._chunk_bytes, 1) * self._chunk_bytes  # what has a checksum is read whole
        if ranges is None:
            return [self._piece(first, min(chunk_bytes, whole - first)) for first in range(0, whole, chunk_bytes)]
        runs = _runs([(_EXTENT, first, nbytes, to) for first, nbytes, to in ranges], chunk_bytes)
        pages = self.extent.capacity_bytes
        pieces = []
        for run in runs:
            nbytes = min(disk_pages(run.end), pages) - run.first
            as_it_lies = run.parts == [(0, nbytes, run.first)]
            pieces.append(self._piece(run.first, nbytes, () if as_it_lies else tuple(run.parts)))
        return pieces

    def flush(self, ranges: Sequence[Range] | None = None) -> None:
        self._spilled(self.extent.nbytes)
        self.filled = False
        within = None if ranges is None else [(first, first + nbytes) for first, nbytes, _ in ranges]
        self._flushing = self.store.to_direct(self.extent, within)

    def was_written(self) -> None:
        self._spilled(self.extent.nbytes)

    @property
    def flushed(self) -> bool:
        return self.filled or (self._flushing is not None and self._flushing.error is None)

    def _piece(self, first: int, nbytes: int, parts: tuple[Range, ...] = ()) -> DiskRead:
        def read_into(_: torch.Tensor, buffer: torch.Tensor) -> tuple[ReadEvent, Callable[[], None]] | None:
            if parts or (buffer.data_ptr() + first) % DISK_ALIGNMENT_BYTES:
                return None
            return self.store.read(self.extent, buffer, first, within=slice(first, first + nbytes)), lambda: None

        return DiskRead(
            read=lambda chunk: self.store.read(self.extent, chunk[:nbytes], first),
            nbytes=nbytes,
            parts=parts or ((0, nbytes, first),),
            read_into=read_into,
        )


class SharedRest(Rest):
    """Bytes of which the ranks of a node have one copy, in memory or where `disk` has them; the places are in this
    rank's own view of it. Beside them lie `homes` of those parameters that travel in another dtype: what is written,
    published and dropped is those, too.
    """

    homes: "SharedRest | None" = None
    home_layouts: Mapping[int, Layout] = MappingProxyType({})  # by the numbers of parameters in the block

    def __init__(self, node: Node, common: Common, nbytes: int, disk: DiskRest | None = None) -> None:
        self.node, self._common, self._disk = node, common, disk
        self.on_disk = disk is not None
        self.range_bytes = Rest.range_bytes if disk is None else disk.range_bytes
        self._view = common.own_view()
        self.common, self._own = common.tensor(0, nbytes), self._view.tensor(0, nbytes)
        self.reads_own(False)

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, self._view.tensor)

    def common_places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """As `places`, in the memory that all ranks see."""
        return _carve(layouts, self._common.tensor)

    def fill(self, sources: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
        """What the node's first rank has becomes what all see. A collective of these."""
        if self.node.is_first:
            with torch.no_grad():
                for place, source in zip(self.common_places(layouts), sources, strict=True):
                    copy_on_disk(place, source)
        self.node.meet("a block, as the first rank has it")

    def place_of_home(self, number: int) -> torch.Tensor | None:
        """As `common_places`, of the home of a parameter that travels in another dtype; None of any other."""
        if self.homes is None or number not in self.home_layouts:
            return None
        return self.homes.common_places([self.home_layouts[number]])[0]

    def take_homes(self, slots: Sequence[ManagedParam], *, keeps: bool = False) -> None:
        if self.homes is not None:
            places = self.homes.places(list(self.home_layouts.values()))
            for number, place in zip(self.home_layouts, places, strict=True):
                slots[number].live_at(place, keeps=keeps)

    def pieces(self, chunk_bytes: int, ranges: Sequence[Range] | None = None) -> Sequence[DiskRead]:
        return super().pieces(chunk_bytes, ranges) if self._disk is None else self._disk.pieces(chunk_bytes, ranges)

    def flush(self, ranges: Sequence[Range] | None = None) -> None:
        if self._disk is not None:
            self._disk.flush(ranges)

    @property
    def flushed(self) -> bool:
        return self._disk is None or self._disk.flushed

    @property
    def is_written(self) -> bool:
        """Whether this rank's user has written something else than what all see. Reads all of it, if it was written."""
        found = self._view.written() is not False and not torch.equal(self._own, self.common)
        self._common.forget()
        return found or (self.homes is not None and self.homes.is_written)

    def digest(self) -> int:
        """A number that differs where what this rank has written does."""
        own = xxhash.xxh3_64_intdigest(self._own.numpy().data) >> 1 if len(self._own) else 0
        return own if self.homes is None else own ^ self.homes.digest()

    def reads_own(self, own: bool) -> None:
        """Whether copies to the device read what this rank alone has written, too."""
        self.is_own = own
        self.memory = self._own if own else None if self._disk is not None else self.common

    def publish(self, part_of: Callable[[int], slice]) -> None:
        """A part, of so many bytes, of what this rank has written is what all see."""
        part = part_of(len(self.common))
        self.common[part].copy_(self._own[part])
        if self.homes is not None:
            self.homes.publish(part_of)

    def drop(self) -> None:
        """This rank sees what all see."""
        self._view.forget()
        self.reads_own(False)
        if self.homes is not None:
            self.homes.drop()


class CheckpointRest(Rest):
    """Bytes of a block `what` where a checkpoint has them: nothing is written. `names`: of its tensors, in order.

    The places are the parameters' own memory, mapped so that writes stay with this process: a block whose homes change
    moves to a disk store.
    """

    writable = False
    on_disk = True

    def __init__(self, checkpoint: Checkpoint, what: str, names: Sequence[str], layouts: Sequence[Layout]) -> None:
        self._checkpoint = checkpoint
        self._what = what
        self._names = names
        self._layouts = layouts

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return [self._checkpoint.tensor(name) for name in self._names]

    @property
    def is_written(self) -> bool:
        """Whether this process has written to the places, or to their neighbours in the same pages."""
        return any(self._checkpoint.written(name) for name in self._names)

    def forget_writes(self) -> None:
        for name in self._names:
            self._checkpoint.forget_writes(name)

    @property
    def is_as_in_files(self) -> bool:
        return all(self._checkpoint.written(name) is False for name in self._names)

    def digest(self) -> int:
        """As SharedRest's."""
        digest = xxhash.xxh3_64()
        for name in self._names:
            digest.update(self._checkpoint.tensor(name).view(-1).view(torch.uint8).numpy().data)
        return digest.intdigest() >> 1

    def pieces(self, chunk_bytes: int, ranges: Sequence[Range] | None = None) -> Sequence[DiskRead]:
        """Whole pages around the tensors; copies to the device lay them out."""
        wanted = []
        for name, layout in zip(self._names, self._layouts, strict=True):
            record = self._checkpoint.records[name]
            whole = [(layout.offset, record.nbytes, layout.offset)]
            for first, nbytes, to in whole if ranges is None else ranges:
                begin, end = max(first, layout.offset), min(first + nbytes, layout.offset + record.nbytes)
                if begin < end:
                    offset = record.offset + begin - layout.offset
                    wanted.append((record.path, offset, end - begin, to + begin - first))
        return [self._piece(run) for run in _runs(wanted, chunk_bytes)]

    def _piece(self, run: "_Run") -> DiskRead:
        nbytes = min(disk_pages(run.end), self._checkpoint.size_bytes(run.path)) - run.first

        def read(chunk: torch.Tensor) -> Request:
            return self._checkpoint.read_range(run.path, run.first, [Part(chunk, 0, nbytes)], what=self._what)

        def read_into(chunk: torch.Tensor, buffer: torch.Tensor) -> tuple[ReadEvent, Callable[[], None]] | None:
            memory, finish = _scattered(run.parts, nbytes, chunk, buffer)
            if finish is None:
                return None
            return self._checkpoint.read_range(run.path, run.first, memory, what=self._what), finish

        return DiskRead(read=read, nbytes=nbytes, parts=tuple(run.parts), read_into=read_into)


def _scattered(
    parts: Sequence[tuple[int, int, int]], nbytes: int, chunk: torch.Tensor, buffer: torch.Tensor
) -> tuple[list[Part], Callable[[], None] | None]:
    """Where a read of `nbytes` goes so that most of `parts`, as in DiskRead, lands in whole pages of where it belongs,
    less than a page behind its place; and what moves it there. None where nothing does.

    What has no whole pages in the room of its own part goes to the chunk, so reads beside each other never meet.
    """
    memory: list[Part] = []
    moves: list[tuple[int, int, int]] = []  # addresses, to and from, and bytes
    at, landed = 0, False
    to, of = buffer.data_ptr(), chunk.data_ptr()
    for begin, length, place in parts:
        first = disk_pages(begin)
        where = place + first - begin
        behind = -(to + where) % DISK_ALIGNMENT_BYTES
        last = (begin + length - behind) // DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES
        if last - first < _LEAST_LANDING_BYTES:
            moves.append((to + place, of + begin, length))
            continue
        if at < first:
            memory.append(Part(chunk, at, first - at))
        memory.append(Part(buffer, where + behind, last - first))
        at, landed = last, True
        if behind:
            moves.append((to + where, to + where + behind, last - first))
        moves.append((to + place, of + begin, first - begin))
        moves.append((to + where + last - first, of + last, begin + length - last))
    if at < nbytes:
        memory.append(Part(chunk, at, nbytes - at))

    def finish() -> None:
        for destination, source, length in moves:
            ctypes.memmove(destination, source, length)

    return memory, finish if landed else None


_LEAST_LANDING_BYTES = 64 << 10
_EXTENT = ""  # the path of all that lies in one extent
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


def _runs(wanted: Iterable[tuple[str, int, int, int]], chunk_bytes: int) -> list[_Run]:
    """Reads that bring all that is wanted: (file, first byte there, bytes, first byte in the target)."""
    runs: list[_Run] = []
    for path, first, total_bytes, to in sorted(wanted):
        at = 0
        while at < total_bytes:
            begin = first + at
            if not runs or not runs[-1].reaches(path, begin, chunk_bytes):
                runs.append(_Run(path, begin // DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES))
            run = runs[-1]
            nbytes = min(total_bytes - at, run.first + chunk_bytes - begin)
            run.end = begin + nbytes
            run.parts.append((begin - run.first, nbytes, to + at))
            at += nbytes
    return runs


def _grain_bytes(nbytes: int, chunk_bytes: int) -> int:
    """The length of checksummed pieces: whole pages, at most a chunk, so that whole pieces leave the least of `nbytes`
    behind them.
    """
    pages, least = nbytes // DISK_ALIGNMENT_BYTES, max(1, -(-nbytes // chunk_bytes))
    grains = {max(1, pages // count) for count in range(least, least + 8)}
    return max(grains, key=lambda grain: (pages // grain * grain, grain)) * DISK_ALIGNMENT_BYTES


def _carve(layouts: Sequence[Layout], tensor: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """Views of `tensor(first byte, bytes)`, one storage for each region."""
    regions = {region: tensor(region[0], region[1] - region[0]) for region in {layout.region for layout in layouts}}
    return [layout.view(regions[layout.region], first_byte=layout.region[0]) for layout in layouts]
