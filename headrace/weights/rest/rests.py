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


class Rest(ABC):
    """Where the bytes of one block rest. User code sees them through its tensors, one for each parameter."""

    memory: torch.Tensor | None = None  # all bytes, shape (nbytes,), for copies; None: they have to be fetched
    writable = True  # whether writes through the tensors are kept there
    on_disk = False
    has_own_files = False  # whether it has files that this process alone writes
    range_bytes = 16  # where each rank brings one range of a block, the range's length is a multiple of this
    filled = False  # whether it was filled past the page cache, so that the files hold the block before any `flush`

    @abstractmethod
    def tensors(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """A tensor for each parameter, where its bytes lie. Parameters that shared a storage share one here, too."""

    def pieces(self, chunk_bytes: int, ranges: Sequence[Range] | None = None) -> Sequence[DiskRead]:
        """The reads that bring the block, or `ranges` of it, past the page cache, at most `chunk_bytes` each."""
        raise NotImplementedError(f"{type(self).__name__} has memory, and is not fetched")

    def flush(self, ranges: Sequence[Range] | None = None) -> None:  # noqa: B027  # nothing to do without files
        """Submits bringing what was written through the tensors to the files that `pieces` reads; its pages leave this
        process's memory. With `ranges`, only these are read until the next flush.
        """

    def take_homes(self, params: Sequence[ManagedParam], *, keeps: bool = False) -> None:  # noqa: B027  # they may lie anywhere
        """Moves the homes of those `params` that travel in another dtype to the places that this rest has for them, if
        any; `keeps`: with their contents.
        """

    @property
    def is_written(self) -> bool:
        """Whether this process has written to the tensors something that is nowhere else."""
        return False

    def forget_writes(self) -> None:  # noqa: B027  # nothing to do where they are kept
        """Frees the memory that writes to the tensors took. Called once homes lie elsewhere and nobody has a tensor."""

    def was_written(self) -> None:
        """Called when an update has written the whole block to the files, past the tensors."""
        raise NotImplementedError(f"{type(self).__name__} has no files of its own")

    @property
    def flushed(self) -> bool:
        """Whether the last `flush` is under way or done, and did not fail."""
        return True

    @property
    def is_as_in_files(self) -> bool:
        """Whether it is certain that the tensors hold what the files hold, without a `flush`."""
        return False


class HostRest(Rest):
    """A rest in an arena of this process."""

    memory: torch.Tensor

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.memory = arena.tensor(0, nbytes)
        self._arena = arena

    def tensors(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, self._arena.tensor)


class DiskRest(Rest):
    """A rest in an extent of a disk store. The tensors are mappings of it; reads bring whole grains.

    `grain_bytes`: the most bytes that have one checksum. `spilled` is told how many bytes are written. `ranks`: each of
    so many ranks may read and check a range by itself.
    """

    on_disk = has_own_files = True

    def __init__(
        self, store: DiskStore, name: str, nbytes: int, grain_bytes: int, spilled: Callable[[int], None], ranks: int
    ) -> None:
        self._grain_bytes = self.range_bytes = grain_bytes
        if ranks > 1:
            self._grain_bytes = self.range_bytes = _even_grain_bytes(nbytes // ranks, grain_bytes)
        self.store = store
        self.extent = store.allocate(name, nbytes, "weights", self._grain_bytes)
        self._spilled = spilled
        self._flushing: Request | None = None

    def fill(self, source: Source) -> None:
        """Writes the whole block from `source`, past the page cache. Called after the tensors were made."""
        self._spilled(self.extent.nbytes)
        self.store.expect(self.extent)
        fill(self.extent.nbytes, self._grain_bytes, source, partial(self.store.write, self.extent))
        self.filled = True

    def fill_from(self, rest: "CheckpointRest", layouts: Sequence[Layout]) -> None:
        """As `fill`, from the files of a checkpoint."""
        regions = [(layout.offset, layout.nbytes) for layout in layouts]
        self.fill(from_files(regions, self._grain_bytes, rest.pieces))

    def read(self, memory: torch.Tensor) -> None:
        """Reads the whole block, uint8 of shape (nbytes,), past the page cache. Raises DiskError."""
        self.store.read(self.extent, memory).synchronize()

    def tensors(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, partial(self.store.mapping, self.extent))

    def pieces(self, chunk_bytes: int, ranges: Sequence[Range] | None = None) -> Sequence[DiskRead]:
        whole = self.extent.nbytes
        chunk_bytes = max(chunk_bytes // self._grain_bytes, 1) * self._grain_bytes  # checksummed grains are read whole
        if ranges is None:
            return [self._piece(first, min(chunk_bytes, whole - first)) for first in range(0, whole, chunk_bytes)]
        runs = _runs([(_EXTENT, first, nbytes, to) for first, nbytes, to in ranges], chunk_bytes)
        pages = self.extent.capacity_bytes
        pieces = []
        for run in runs:
            nbytes = min(disk_pages(run.end), pages) - run.first
            as_it_lies = run.ranges == [(0, nbytes, run.first)]
            pieces.append(self._piece(run.first, nbytes, () if as_it_lies else tuple(run.ranges)))
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

    def _piece(self, first: int, nbytes: int, ranges: tuple[Range, ...] = ()) -> DiskRead:
        def read_into(_: torch.Tensor, buffer: torch.Tensor) -> tuple[ReadEvent, Callable[[], None]] | None:
            if ranges or (buffer.data_ptr() + first) % DISK_ALIGNMENT_BYTES:
                return None
            return self.store.read(self.extent, buffer, first, within=slice(first, first + nbytes)), lambda: None

        return DiskRead(
            read=lambda chunk: self.store.read(self.extent, chunk[:nbytes], first),
            nbytes=nbytes,
            ranges=ranges or (Range(0, nbytes, first),),
            read_into=read_into,
        )


class SharedRest(Rest):
    """A rest of which the ranks of a node have one copy, in memory or on `disk`. The tensors lie in this rank's own
    view of that copy. `wide` is a second rest, for the homes of parameters that travel in another dtype: it is written,
    published and dropped together with this one.
    """

    wide: "SharedRest | None" = None
    wide_layouts: Mapping[int, Layout] = MappingProxyType({})  # by the parameter's number in the block

    def __init__(self, node: Node, common: Common, nbytes: int, disk: DiskRest | None = None) -> None:
        self.node, self._common, self._disk = node, common, disk
        self.on_disk = disk is not None
        self.range_bytes = Rest.range_bytes if disk is None else disk.range_bytes
        self._view = common.own_view()
        self.common, self._own = common.tensor(0, nbytes), self._view.tensor(0, nbytes)
        self.read_own(False)

    def tensors(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, self._view.tensor)

    def common_tensors(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """As `tensors`, but in the memory that all ranks see."""
        return _carve(layouts, self._common.tensor)

    def fill(self, sources: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> None:
        """Copies the first rank's `sources` to the memory that all ranks of the node see. A collective of the node."""
        if self.node.is_first:
            with torch.no_grad():
                for place, source in zip(self.common_tensors(layouts), sources, strict=True):
                    copy_on_disk(place, source)
        self.node.meet("a block, as the first rank has it")

    def place_of_home(self, number: int) -> torch.Tensor | None:
        """The common tensor of the home of parameter `number`, if it travels in another dtype; None otherwise."""
        if self.wide is None or number not in self.wide_layouts:
            return None
        return self.wide.common_tensors([self.wide_layouts[number]])[0]

    def take_homes(self, params: Sequence[ManagedParam], *, keeps: bool = False) -> None:
        if self.wide is not None:
            places = self.wide.tensors(list(self.wide_layouts.values()))
            for number, place in zip(self.wide_layouts, places, strict=True):
                params[number].live_at(place, keeps=keeps)

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
        """Whether this rank's user has changed what all ranks see. Compares all bytes if pages were written."""
        found = self._view.written() is not False and not torch.equal(self._own, self.common)
        self._common.forget()
        return found or (self.wide is not None and self.wide.is_written)

    def digest(self) -> int:
        """A hash of this rank's own view, by which ranks compare what they have written."""
        own = xxhash.xxh3_64_intdigest(self._own.numpy().data) >> 1 if len(self._own) else 0
        return own if self.wide is None else own ^ self.wide.digest()

    def read_own(self, own: bool) -> None:
        """Sets whether copies to the device read this rank's own view, with what it alone has written."""
        self.is_own = own
        self.memory = self._own if own else None if self._disk is not None else self.common

    def publish(self, part_of: Callable[[int], slice]) -> None:
        """Copies a part of this rank's own view to what all ranks see: `part_of(bytes of the whole)`."""
        part = part_of(len(self.common))
        self.common[part].copy_(self._own[part])
        if self.wide is not None:
            self.wide.publish(part_of)

    def drop(self) -> None:
        """Drops what this rank alone has written: it sees what all ranks see."""
        self._view.forget()
        self.read_own(False)
        if self.wide is not None:
            self.wide.drop()


class CheckpointRest(Rest):
    """A rest of block `what` in the files of a checkpoint, which are never written. `names`: its tensors, in order.

    The tensors are mapped privately, so that writes stay with this process. A block whose homes change moves to a disk
    store.
    """

    writable = False
    on_disk = True

    def __init__(self, checkpoint: Checkpoint, what: str, names: Sequence[str], layouts: Sequence[Layout]) -> None:
        self._checkpoint = checkpoint
        self._what = what
        self._names = names
        self._layouts = layouts

    def tensors(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return [self._checkpoint.tensor(name) for name in self._names]

    @property
    def is_written(self) -> bool:
        """Whether this process has written to the tensors, or to their neighbours in the same pages."""
        return any(self._checkpoint.written(name) for name in self._names)

    def forget_writes(self) -> None:
        for name in self._names:
            self._checkpoint.forget_writes(name)

    @property
    def is_as_in_files(self) -> bool:
        return all(self._checkpoint.written(name) is False for name in self._names)

    def digest(self) -> int:
        """As `SharedRest.digest`, of the tensors."""
        digest = xxhash.xxh3_64()
        for name in self._names:
            digest.update(self._checkpoint.tensor(name).view(-1).view(torch.uint8).numpy().data)
        return digest.intdigest() >> 1

    def pieces(self, chunk_bytes: int, ranges: Sequence[Range] | None = None) -> Sequence[DiskRead]:
        """Reads of the whole pages around the tensors; copies to the device pick the tensors from them."""
        wanted = []
        for name, layout in zip(self._names, self._layouts, strict=True):
            record = self._checkpoint.records[name]
            whole = [Range(layout.offset, record.nbytes, layout.offset)]
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
            memory, finish = _scattered(run.ranges, nbytes, chunk, buffer)
            if finish is None:
                return None
            return self._checkpoint.read_range(run.path, run.first, memory, what=self._what), finish

        return DiskRead(read=read, nbytes=nbytes, ranges=tuple(run.ranges), read_into=read_into)


def _scattered(
    ranges: Sequence[Range], nbytes: int, chunk: torch.Tensor, buffer: torch.Tensor
) -> tuple[list[Part], Callable[[], None] | None]:
    """The memory for a read of `nbytes`, and a function that finishes it; None for that if the chunk takes everything.

    Whole pages of `ranges` (see DiskRead) go to the buffer, less than a page behind their places; the function moves
    them there. All other bytes go to the chunk. So neighbouring reads never write the same page of the buffer.
    """
    memory: list[Part] = []
    moves: list[tuple[int, int, int]] = []  # addresses, to and from, and bytes
    at, landed = 0, False
    to, of = buffer.data_ptr(), chunk.data_ptr()
    for begin, length, place in ranges:
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
_EXTENT = ""  # stands for the path where all bytes lie in one extent
_GAP_BYTES = 64 << 10  # between two tensors of a file: so small a gap is read, too, instead of starting a new read


@dataclass
class _Run:
    """Neighbouring byte ranges of a file that one read brings."""

    path: str
    first: int  # first byte in the file, at the start of a page
    end: int = 0
    ranges: list[Range] = field(default_factory=list)  # of the chunk

    def reaches(self, path: str, begin: int, chunk_bytes: int) -> bool:
        """Whether the same read can also bring the range that begins at `begin` in `path`, or a part of it."""
        return path == self.path and begin - self.end <= _GAP_BYTES and begin < self.first + chunk_bytes


def _runs(wanted: Iterable[tuple[str, int, int, int]], chunk_bytes: int) -> list[_Run]:
    """The reads that bring all `wanted` ranges: (file, first byte in it, bytes, first byte in the target)."""
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
            run.ranges.append(Range(begin - run.first, nbytes, to + at))
            at += nbytes
    return runs


def _even_grain_bytes(nbytes: int, most_bytes: int) -> int:
    """The length of a checksummed grain: whole pages, at most `most_bytes`, chosen so that whole grains leave as few of
    `nbytes` over as possible.
    """
    pages, least = nbytes // DISK_ALIGNMENT_BYTES, max(1, -(-nbytes // most_bytes))
    grains = {max(1, pages // count) for count in range(least, least + 8)}
    return max(grains, key=lambda grain: (pages // grain * grain, grain)) * DISK_ALIGNMENT_BYTES


def _carve(layouts: Sequence[Layout], tensor: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """The parameters' views of the memory that `tensor(first byte, bytes)` gives: one storage for each region."""
    regions = {region: tensor(region[0], region[1] - region[0]) for region in {layout.region for layout in layouts}}
    return [layout.view(regions[layout.region], first_byte=layout.region[0]) for layout in layouts]
