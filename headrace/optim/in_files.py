"""How are weights on disk updated? Grain by grain: each is read, updated and written, past the page cache.

A grain is the bytes that have one checksum. While one grain is updated, later ones are read, with their gradients if
these rest on disk too, and earlier ones are written. Through mapped memory, all of that would be page faults.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.errors import StateError
from headrace.memory.disk import DISK_ALIGNMENT_BYTES, Origin, Request, disk_pages, new_pages, origin_of
from headrace.optim.devices import Member
from headrace.optim.overlap import by_unit
from headrace.optim.weights import MasterWeight, flat
from headrace.runtime.pending import unit_of

__all__ = ["Grains", "Row", "in_files", "mark_written_in_place"]

_AHEAD = 3  # grains that are read, and that are written, while one is updated


@dataclass
class Row:
    """Elements [start, stop) of member `index`, in memory for the moment. Flat; a whole member may be in its shape."""

    index: int
    start: int
    stop: int
    weight: torch.Tensor
    gradient: torch.Tensor
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)  # master and moments

    def part(self, start: int, stop: int, state: Mapping[str, torch.Tensor]) -> "Row":
        """The row of elements [start, stop) of the parameter, which lie within this row, with their state."""
        elements = slice(start - self.start, stop - self.start)
        return Row(self.index, start, stop, flat(self.weight)[elements], flat(self.gradient)[elements], state)


@dataclass
class _Grain:
    """Bytes `begin` to `end` of `origin`, on their way from or to the file."""

    origin: Origin
    begin: int
    end: int
    runs: list[tuple[int, int, int, int]]  # member, start, stop, and the offset in the memory
    memory: torch.Tensor
    reads: list[Request] = field(default_factory=list)
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)  # with the memory to reuse


def in_files(members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
    """The members whose weights may be updated in their files, all of a unit or none, in the order of the file; and the
    other members. No update of them may be under way.
    """
    units, others = by_unit(members)
    found: list[Member] = []
    for unit, travelling in units:
        fit = all(_lies_in_file(member) for member in travelling)
        if fit and unit.may_be_updated_in_files([member.parameter for member in travelling]):
            found += sorted(travelling, key=lambda member: member.master.exposed().data_ptr())
        else:
            others += travelling
    return found, others


def mark_written_in_place(members: Sequence[Member]) -> None:
    """Called when members were updated in their files: one of each unit says so as soon as it counts as written."""
    for member in {id(unit_of(member.parameter)): member for member in members}.values():
        member.master.in_files = unit_of(member.parameter)


class Grains:
    """The weights of `members`, some at a time, in the order in which they lie in their files. Raises DiskError.

    It holds host memory for seven grains (8 MiB each, less under small budgets), and for the gradients of some.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._free: list[torch.Tensor] = []
        self._coming = _grains(members, self._memory)
        self._reading: deque[_Grain] = deque()
        self._writing: deque[tuple[torch.Tensor, Request]] = deque()
        self._open: deque[tuple[_Grain, list[Row]]] = deque()
        self._left: deque[int] = deque()  # for each open grain, the elements that nobody has asked for yet

    def runs(self, index: int, start: int, stop: int) -> Iterator[Row]:
        """The rows that have these elements. Ask for them in order, and update them before `updated` is called."""
        at = start
        while at < stop:
            found = self._run_at(index, at)
            if found is None:
                self._open_one()
                continue
            place, run = found
            end = min(stop, run.stop)
            yield run.part(at, end, {})
            self._left[place] -= end - at
            at = end

    def all(self) -> Iterator[list[Row]]:
        """All rows, those of one grain at a time; update them before asking for the next."""
        while self._open_one():
            yield self._open[0][1]
            self._write_one()

    def updated(self) -> None:
        """Called when all rows asked for are updated: writes the grains in which nothing is left to update."""
        while self._left and not self._left[0]:
            self._write_one()

    def finish(self) -> None:
        """Called when everything is updated; returns when it is written."""
        for _, request in self._writing:
            request.synchronize()

    def close(self) -> None:
        """Waits until nothing is read or written any more, with success or not."""
        reads = [request for grain in self._reading for request in grain.reads]
        for request in [*reads, *(request for _, request in self._writing)]:
            request.settle()

    def _run_at(self, index: int, at: int) -> tuple[int, Row] | None:
        for place, (_, runs) in enumerate(self._open):
            for run in runs:
                if run.index == index and run.start <= at < run.stop:
                    return place, run
        return None

    def _open_one(self) -> bool:
        """Waits for the next grain; False if there is none."""
        while len(self._reading) <= _AHEAD and (grain := next(self._coming, None)) is not None:
            self._reading.append(grain)
        if not self._reading:
            return False
        for request in self._reading[0].reads:
            request.synchronize()
        grain = self._reading.popleft()
        runs = [
            Row(index, start, stop, grain.memory[at:].view(dtype)[: stop - start], gradient)
            for (index, start, stop, at), (gradient, _) in zip(grain.runs, grain.gradients, strict=True)
            for dtype in (self._members[index].master.dtype,)
        ]
        self._open.append((grain, runs))
        self._left.append(sum(run.stop - run.start for run in runs))
        return True

    def _write_one(self) -> None:
        grain, _ = self._open.popleft()
        self._left.popleft()
        request = _asked(grain.origin.write(grain.memory[: disk_pages(grain.end - grain.begin)], grain.begin))
        self._free.extend(one for _, one in grain.gradients if one is not None)
        self._writing.append((grain.memory, request))
        if len(self._writing) > _AHEAD:
            written, request = self._writing.popleft()
            request.synchronize()
            self._free.append(written)

    def _memory(self, nbytes: int) -> torch.Tensor:
        fitting = next((one for one in self._free if one.nbytes >= nbytes), None)
        if fitting is None:
            return new_pages(disk_pages(nbytes))
        self._free[:] = [one for one in self._free if one is not fitting]
        return fitting


def _grains(members: Sequence[Member], memory: Callable[[int], torch.Tensor]) -> Iterator[_Grain]:
    """Begins to read all grains of the members, each when the iterator gets to it."""
    by_origin: dict[Origin, list[tuple[int, int]]] = {}
    for index, member in enumerate(members):
        shown = origin_of(member.master.exposed())
        if shown is not None:  # always so: see `in_files`
            by_origin.setdefault(shown[0], []).append((shown[1], index))
    for origin, places in by_origin.items():
        places.sort()
        at, last = 0, max(offset + _nbytes(members[index].master) for offset, index in places)
        while at < last:
            begin, end = origin.grain(at)
            runs = list(_runs(members, places, begin, end))
            if runs:
                yield _asked_for(origin, begin, end, runs, members, memory)
            at = end


def _runs(
    members: Sequence[Member], places: Sequence[tuple[int, int]], begin: int, end: int
) -> Iterator[tuple[int, int, int, int]]:
    for offset, index in places:
        size = members[index].master.dtype.itemsize
        first, last = max(begin, offset), min(end, offset + _nbytes(members[index].master))
        if first < last:
            yield index, (first - offset) // size, (last - offset) // size, first - begin


def _asked_for(
    origin: Origin,
    begin: int,
    end: int,
    runs: list[tuple[int, int, int, int]],
    members: Sequence[Member],
    memory: Callable[[int], torch.Tensor],
) -> _Grain:
    grain = _Grain(origin, begin, end, runs, memory(end - begin))
    grain.reads.append(_asked(origin.read(grain.memory[: disk_pages(end - begin)], begin)))
    for index, start, stop, _ in runs:
        member = members[index]
        gradient = member.master.flat(member.gradient)[start:stop]
        shown = origin_of(gradient)
        chunk = None
        if shown is not None:
            first = shown[1] // DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES
            nbytes = disk_pages(shown[1] + gradient.nbytes) - first
            chunk = memory(nbytes)
            request = shown[0].read(chunk[:nbytes], first)
            if request is not None:
                grain.reads.append(request)
                here = chunk[shown[1] - first :][: gradient.nbytes]
                gradient = here.view(gradient.dtype)
        grain.gradients.append((gradient, chunk))
    return grain


def _lies_in_file(member: Member) -> bool:
    weights = member.master
    if weights.uses_8bit or weights.are_to_be_split(member.state):
        return False
    if not torch.ops.aten.is_non_overlapping_and_dense(weights.host):
        return False
    return weights.lies_alike(member.gradient) and origin_of(weights.exposed()) is not None


def _asked(request: Request | None) -> Request:
    if request is None:
        raise StateError("weights on disk were let go of while they were updated")
    return request


def _nbytes(weights: MasterWeight) -> int:
    return weights.host.numel() * weights.dtype.itemsize
