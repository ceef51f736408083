"""How does state that rests on disk take part in a step? Through a ring: read ahead, updated, written behind.

Each tensor of state is an extent of a disk store. A load is a chunk of the state of one large parameter, or the state
of several small ones; it has one slot of the ring while it is read, updated and written.
"""

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.errors import DiskError, StateError
from headrace.memory.disk import DiskStore, Extent, Origin, Request, Slot, StagingRing, TensorAtRest, read_bytes
from headrace.memory.ledger import Ledger, Tier
from headrace.optim import eight_bit
from headrace.runtime.threads import keeps_interrupts

STAGED_ELEMENTS = 1 << 21  # of one parameter at a time: 8 MiB of float32, enough for a drive to run at full speed
SLOTS = 8  # one slot is updated; the others are read into or written from
MOST_BYTES_PER_ELEMENT = 12


@dataclass(frozen=True)
class Wanted:
    """One parameter of a step: its key, its elements, and the dtype of each of its tensors.

    `weight_bytes`: per element, if the weight comes to memory with its state; a load has a slot's bytes of it.
    """

    key: Any
    elements: int
    dtypes: Mapping[str, torch.dtype]
    fresh: frozenset[str]  # the tensors that begin as zeros: they are not read
    weight_bytes: int = 0


@dataclass(frozen=True)
class _Stretch:
    """One tensor of a part: its extent on disk, whose requests have an order of their own, and its place in a slot."""

    extent: Extent
    place: int  # in the slot
    name: str
    dtype: torch.dtype
    reads: bool

    def within(self, slot: Slot) -> torch.Tensor:
        """The whole pages of the slot's memory that the tensor has."""
        return slot.memory[self.place : self.place + self.extent.capacity_bytes]


@dataclass
class Part:
    """The state of elements `start` to `stop` of parameter `index` of a step, in host memory for the moment."""

    index: int
    start: int
    stop: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # flat
    stretches: list[_Stretch] = field(default_factory=list)


class _All:
    """Several requests as one event."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def synchronize(self) -> None:
        """Waits for the requests; raises the error of one that failed."""
        for request in self.requests:
            request.synchronize()

    def query(self) -> bool:
        """Whether all requests have ended."""
        return all(request.query() for request in self.requests)


@dataclass(frozen=True, eq=False)
class _StateTensor(TensorAtRest):
    """One tensor of state."""

    origin: Origin
    of: "DiskState"  # whose store stays open as long as somebody may read

    def read(self, begin: int, memory: torch.Tensor) -> None:
        if not read_bytes(self.origin, begin, memory):
            raise StateError("an optimizer's state on disk was read after it was closed")


class DiskState:
    """The state of one optimizer on disk, in a file without a name in `directory`.

    Raises what `DiskStore` raises.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = directory
        self._failed = False  # whether a `stream` failed: then the contents cannot be relied on
        self._ledger = Ledger()
        self._store = DiskStore(directory, self._ledger, alone=False)
        self._ring = self._ring_for(torch.device("cpu"), before=None)
        self._extents: dict[Any, dict[tuple[str, torch.dtype], Extent]] = {}  # for good: no disk space is given back
        self._written: dict[Any, dict[str, torch.dtype]] = {}  # the tensors whose extents hold something
        self._chunks: dict[Any, int] = {}  # how many elements each part had when it was written last
        self._busy = threading.Lock()
        weakref.finalize(self, keeps_interrupts(self._store.close))

    def _ring_for(self, device: torch.device, *, before: StagingRing | None) -> StagingRing:
        """A new ring, for which the memory of the one `before` goes first."""
        self._device = device
        if before is not None:
            before.close()
        return StagingRing(STAGED_ELEMENTS * MOST_BYTES_PER_ELEMENT, SLOTS, device, self._ledger)

    def lock_for(self, device: torch.device) -> None:
        """Called before `device` updates: from now on, state passes through memory that is page-locked for it."""
        with self._busy:
            if self._device.type == "cpu":  # memory that is page-locked for one accelerator is so for all
                self._ring = self._ring_for(device, before=self._ring)

    def let_go(self) -> None:
        """Lets go of the staging memory until the next access."""
        with self._busy:
            self._ring.close()

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that this holds."""
        return self._ledger.held_bytes(Tier.HOST)

    def synchronize(self) -> None:
        """Waits until everything that was written is on disk; raises the error of a write that failed."""
        self._store.synchronize()

    def holds(self, key: Any) -> tuple[str, ...]:
        """The names of the tensors of a parameter that are on disk, in the order in which they came."""
        return tuple(self._written.get(key, ()))

    def drop(self, key: Any, names: Iterable[str]) -> None:
        """Drops these tensors of a parameter."""
        for name in names:
            self._written.get(key, {}).pop(name, None)

    def forget(self, key: Any) -> None:
        """Drops all tensors of a parameter."""
        self._written.pop(key, None)

    def emptied(self) -> "DiskState":
        """Drops everything and returns itself; returns a new object if a step or the drive has failed."""
        with contextlib.suppress(DiskError):
            self.synchronize()
            if not self._failed:
                self._written.clear()
                return self
        return DiskState(self._directory)

    def stream(self, wanted: Sequence[Wanted], update: Callable[[list[Part]], None], *, writes: bool = True) -> None:
        """Calls `update` with the state of all elements of `wanted`, one load at a time.

        What `update` changes is written back to disk if `writes`.
        """
        with self._busy:
            # After `let_go`. Ctrl-C may also have come when a slot was taken, once more while slots were given back, or
            # in `lock_for`.
            if self._ring.free_slots < SLOTS:
                self._ring = self._ring_for(self._device, before=self._ring)
            loads = deque(self._loads(wanted))
            ahead: deque[tuple[Slot, list[Part], _All]] = deque()
            try:
                while loads or ahead:
                    while loads and len(ahead) < SLOTS - 1:
                        ahead.append(self._read(loads.popleft()))
                    slot, parts, arrived = ahead[0]
                    arrived.synchronize()
                    update(parts)
                    ahead.popleft()
                    written = self._write(slot, parts) if writes else []
                    self._ring.release(slot, _All(written) if written else None)
                for one in wanted if writes else ():
                    self._written.setdefault(one.key, {}).update(one.dtypes)
            except BaseException:
                self._failed = True
                for slot, _, arrived in ahead:
                    for request in arrived.requests:
                        request.settle()
                    self._ring.release(slot, None)
                raise

    def keep(self, key: Any, elements: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the flat `tensors` to disk as the state of a parameter of `elements`."""
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

        def fill(parts: list[Part]) -> None:
            for memory, source in _pairs(parts, tensors):
                memory.copy_(source)

        self.stream([Wanted(key, elements, dtypes, frozenset(dtypes))], fill)

    def fetch(self, key: Any, elements: int) -> dict[str, torch.Tensor]:
        """The tensors of a parameter, flat, copied into host memory."""
        dtypes = dict(self._written.get(key, {}))
        fetched = {
            name: torch.empty(eight_bit.nbytes(elements, dtype), dtype=torch.uint8, device="cpu").view(dtype)
            for name, dtype in dtypes.items()
        }

        def copy(parts: list[Part]) -> None:
            for memory, target in _pairs(parts, fetched):
                target.copy_(memory)

        self.stream([Wanted(key, elements, dtypes, frozenset())], copy, writes=False)
        return fetched

    def at_rest(self, key: Any, elements: int) -> dict[str, TensorAtRest]:
        """The tensors of a parameter, flat, for reading while nothing is written to them."""
        found: dict[str, TensorAtRest] = {}
        for name, dtype in self._written.get(key, {}).items():
            extent = self._extents[key][name, dtype]
            like = torch.empty(eight_bit.nbytes(elements, dtype) // dtype.itemsize, dtype=dtype, device="meta")
            origin = self._store.origin(extent, eight_bit.nbytes(self._chunks[key], dtype))
            found[name] = _StateTensor(like, origin, self)
        return found

    def fill(self, key: Any, elements: int, tensors: Mapping[str, TensorAtRest]) -> None:
        """As `keep`, with tensors that are elsewhere on disk: only some of their elements are in memory at a time."""
        dtypes = {name: tensor.like.dtype for name, tensor in tensors.items()}

        def read(parts: list[Part]) -> None:
            for part in parts:
                for name, memory in part.tensors.items():
                    tensors[name].read(eight_bit.nbytes(part.start, memory.dtype), memory.view(torch.uint8))

        self.stream([Wanted(key, elements, dtypes, frozenset(dtypes))], read)

    def lend(self, key: Any, elements: int) -> dict[str, torch.Tensor]:
        """The tensors of a parameter, flat, as memory that is read from disk when touched, until `take_back`."""
        self._end_parts(key)
        lent = {}
        for name, dtype in self._written.get(key, {}).items():
            extent = self._extents[key][name, dtype]
            lent[name] = self._store.mapping(extent, 0, eight_bit.nbytes(elements, dtype), dtype)
        return lent

    def take_back(self, key: Any) -> None:
        """Ends `lend`: the tensors are read and written directly again, in parts that have checksums of their own."""
        for extent in self._extents.get(key, {}).values():
            self._store.to_direct(extent, within=()).synchronize()

    def _loads(self, wanted: Sequence[Wanted]) -> Iterator[list[Part]]:
        load: list[Part] = []
        used = weights = 0
        for index, one in enumerate(wanted):
            extents = self._extents_of(one)
            chunk = self._chunk_of(one)
            for start in range(0, one.elements, chunk):
                stop = min(start + chunk, one.elements)
                within = {
                    name: self._store.part(
                        extents[name], eight_bit.nbytes(start, dtype), eight_bit.nbytes(stop - start, dtype)
                    )
                    for name, dtype in one.dtypes.items()
                }
                state_bytes = sum(extent.capacity_bytes for extent in within.values())
                weights += (stop - start) * one.weight_bytes
                if load and max(used + state_bytes, weights) > self._ring.slot_bytes:
                    yield load
                    load, used, weights = [], 0, (stop - start) * one.weight_bytes
                load.append(Part(index, start, stop))
                for name, extent in within.items():
                    load[-1].stretches.append(_Stretch(extent, used, name, one.dtypes[name], name not in one.fresh))
                    used += extent.capacity_bytes
        if load:
            yield load

    def _chunk_of(self, one: Wanted) -> int:
        """How many elements each part of this parameter has from now on."""
        wide = sum(dtype.itemsize for dtype in one.dtypes.values()) > MOST_BYTES_PER_ELEMENT  # float64, amsgrad
        chunk = STAGED_ELEMENTS // 2 if wide else STAGED_ELEMENTS
        if self._chunks.setdefault(one.key, chunk) != chunk:
            self._end_parts(one.key)
            self._chunks[one.key] = chunk
        return chunk

    def _end_parts(self, key: Any) -> None:
        """Ends the parts in which a parameter's bytes were written: later accesses divide the bytes in another way.

        Parts have an order and checksums of their own, so they are waited for, and not used any more.
        """
        self.synchronize()
        for extent in self._extents.get(key, {}).values():
            self._store.to_mapping(extent).synchronize()

    def _extents_of(self, one: Wanted) -> dict[str, Extent]:
        known = self._extents.setdefault(one.key, {})
        for name, dtype in one.dtypes.items():
            if (name, dtype) not in known:
                nbytes = eight_bit.nbytes(one.elements, dtype)
                known[name, dtype] = self._store.allocate(f"{name} of a parameter", nbytes, "optimizer")
        return {name: known[name, dtype] for name, dtype in one.dtypes.items()}

    def _read(self, parts: list[Part]) -> tuple[Slot, list[Part], _All]:
        slot = self._ring.acquire()
        requests = []
        for part in parts:
            for stretch in part.stretches:
                memory = stretch.within(slot)
                if stretch.reads:
                    requests.append(self._store.read(stretch.extent, memory, after=slot.free))
                else:
                    if slot.free is not None:
                        slot.free.synchronize()
                    memory.zero_()
                part.tensors[stretch.name] = memory[: stretch.extent.nbytes].view(stretch.dtype)
        return slot, parts, _All(requests)

    def _write(self, slot: Slot, parts: list[Part]) -> list[Request]:
        stretches = [stretch for part in parts for stretch in part.stretches]
        return [self._store.write(stretch.extent, stretch.within(slot)) for stretch in stretches]


def _pairs(parts: list[Part], tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of each part, and the same elements of `tensors`, flat."""
    for part in parts:
        for name, memory in part.tensors.items():
            start = eight_bit.nbytes(part.start, memory.dtype) // memory.itemsize
            yield memory, tensors[name][start : start + memory.numel()]
