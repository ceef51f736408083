"""How are weights on disk updated? Grain by grain: each is read, updated and written, bypassing the page cache.

A grain is the bytes that have one checksum. While one grain is updated, later ones are read, with their gradients if
these rest on disk too, and earlier ones are written. Through mapped memory, all of that would be page faults.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from headrace.errors import StateError
from headrace.memory.disk import DISK_ALIGNMENT_BYTES, Origin, Request, disk_pages, new_pages, origin_of
from headrace.optim.devices import Member
from headrace.optim.overlap import by_unit
from headrace.optim.update import Update, part_of
from headrace.runtime.pending import unit_of

_AHEAD = 3  # grains that are read, and that are written, while one is updated


@dataclass
class _Run:
    """Elements [start, stop) of update `index`, which lie in one grain, from byte `at` on."""

    index: int
    start: int
    stop: int
    at: int
    gradient: torch.Tensor


@dataclass
class _Grain:
    """Bytes [begin, end) of `origin`, on their way from or to the file."""

    origin: Origin
    begin: int
    end: int
    memory: torch.Tensor
    runs: list[_Run] = field(default_factory=list)
    reads: list[Request] = field(default_factory=list)
    spare: list[torch.Tensor] = field(default_factory=list)  # memory of gradients, to be used again
    left: int = 0  # elements that nobody has asked for yet


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
    """Called when members were updated in their files: one of each unit tells the unit, when the step is done."""
    for member in {id(unit_of(member.parameter)): member for member in members}.values():
        member.master.in_files = unit_of(member.parameter)


class Grains:
    """The weights of `updates`, some at a time, in the order in which they lie in their files. Raises DiskError.

    It holds host memory for seven grains (8 MiB each, less under small budgets), and for the gradients of some.
    """

    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates = updates
        self._free: list[torch.Tensor] = []
        self._coming = self._read_all()
        self._reading: deque[_Grain] = deque()
        self._open: deque[_Grain] = deque()
        self._writing: deque[tuple[torch.Tensor, Request]] = deque()

    def parts(self, index: int, start: int, stop: int) -> Iterator[Update]:
        """Update `index` of these elements, a part in each grain. Ask in order, and perform before calling `performed`.

        A part has its weights and gradient in memory for the moment.
        """
        at = start
        while at < stop:
            runs = ((grain, run) for grain in self._open for run in grain.runs if run.index == index)
            found = next((pair for pair in runs if pair[1].start <= at < pair[1].stop), None)
            if found is None:
                self._open_one()
                continue
            grain, run = found
            end = min(stop, run.stop)
            yield self._part(grain, run).part(at - run.start, end - run.start)
            grain.left -= end - at
            at = end

    def all(self) -> Iterator[list[Update]]:
        """All parts, those of one grain at a time; perform them before asking for the next."""
        while self._open_one():
            yield [self._part(self._open[0], run) for run in self._open[0].runs]
            self._write_one()

    def performed(self) -> None:
        """Called when all parts asked for are performed: writes the grains in which nothing is left to update."""
        while self._open and not self._open[0].left:
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

    def _part(self, grain: _Grain, run: _Run) -> Update:
        whole = self._updates[run.index]
        weight = grain.memory[run.at :].view(whole.weight.dtype)[: run.stop - run.start]
        return whole.part(run.start, run.stop, weight=weight, gradient=run.gradient)

    def _open_one(self) -> bool:
        """Waits for the next grain; False if there is none."""
        while len(self._reading) <= _AHEAD and (grain := next(self._coming, None)) is not None:
            self._reading.append(grain)
        if not self._reading:
            return False
        for request in self._reading[0].reads:
            request.synchronize()
        self._open.append(self._reading.popleft())
        return True

    def _write_one(self) -> None:
        grain = self._open.popleft()
        request = _asked(grain.origin.write(grain.memory[: disk_pages(grain.end - grain.begin)], grain.begin))
        self._free += grain.spare
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

    def _read_all(self) -> Iterator[_Grain]:
        """Begins to read all grains, each when the iterator gets to it."""
        by_origin: dict[Origin, list[tuple[int, int]]] = {}
        for index, update in enumerate(self._updates):
            shown = origin_of(update.weight)
            if shown is not None:  # always so: see `in_files`
                by_origin.setdefault(shown[0], []).append((shown[1], index))
        for origin, places in by_origin.items():
            places.sort()
            begin, last = 0, max(offset + self._updates[index].weight.nbytes for offset, index in places)
            while begin < last:
                _, end = origin.grain(begin)
                within = [
                    one for one in places if one[0] < end and begin < one[0] + self._updates[one[1]].weight.nbytes
                ]
                if within:
                    yield self._read(origin, begin, end, within)
                begin = end

    def _read(self, origin: Origin, begin: int, end: int, places: Sequence[tuple[int, int]]) -> _Grain:
        """Begins to read a grain. `places`: the offset and the index of each update that has bytes in it."""
        grain = _Grain(origin, begin, end, self._memory(end - begin))
        grain.reads.append(_asked(origin.read(grain.memory[: disk_pages(end - begin)], begin)))
        for offset, index in places:
            update = self._updates[index]
            first, last = max(begin, offset), min(end, offset + update.weight.nbytes)
            start, stop = (first - offset) // update.weight.itemsize, (last - offset) // update.weight.itemsize
            gradient = self._gradient(part_of(update.gradient, start, stop), grain)
            grain.runs.append(_Run(index, start, stop, first - begin, gradient))
            grain.left += stop - start
        return grain

    def _gradient(self, gradient: torch.Tensor, grain: _Grain) -> torch.Tensor:
        """The gradient itself, or if it rests on disk, the memory into which it is read with the grain.

        Gradients that share a page would each read a copy of it, so those smaller than a page are read when touched.
        """
        shown = origin_of(gradient)
        if shown is None or gradient.nbytes < DISK_ALIGNMENT_BYTES:
            return gradient
        origin, offset = shown
        first = offset // DISK_ALIGNMENT_BYTES * DISK_ALIGNMENT_BYTES
        nbytes = disk_pages(offset + gradient.nbytes) - first
        memory = self._memory(nbytes)
        grain.spare.append(memory)
        request = origin.read(memory[:nbytes], first)
        if request is None:
            return gradient
        grain.reads.append(request)
        return memory[offset - first :][: gradient.nbytes].view(gradient.dtype)


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
