"""How does one tensor pass between device and disk? In blocks, through a ring of slots; packed where that is smaller.

Packing is lossless: bytes of equal significance side by side (exponents repeat, mantissas do not), then deflate by run
lengths and Huffman codes. A block that does not shrink is written as it is, and every block has its own pages on disk.
"""

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.memory.disk import DiskStore, Extent, Request, Slot, StagingRing, disk_pages
from headrace.runtime.lanes import Event, Lane, Lanes

__all__ = ["Rest", "fetch", "pack", "spill", "unpack"]

_LEVEL = 1
_ALL_BITS = 15  # of deflate's window

Deliver = Callable[[int, torch.Tensor], Event | None]  # takes bytes from that offset on; None: it has done so


def pack(raw: torch.Tensor, itemsize: int) -> bytes | None:
    """uint8 bytes of elements of `itemsize` bytes, packed; None where that is not smaller."""
    planes = raw.numpy().reshape(-1, itemsize).T
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _ALL_BITS, 9, zlib.Z_RLE)
    packed = deflate.compress(np.ascontiguousarray(planes).data) + deflate.flush()
    return packed if len(packed) < raw.nbytes else None


def unpack(packed: bytes | memoryview, nbytes: int, itemsize: int) -> torch.Tensor:
    """The bytes that `pack` was given. Raises ValueError where `packed` is damaged or not of `nbytes`."""
    try:
        planes = zlib.decompress(packed, bufsize=max(1, nbytes))
    except zlib.error as error:
        raise ValueError(f"{len(packed)} packed bytes are damaged: {error}") from error
    if len(planes) != nbytes:
        raise ValueError(f"{len(packed)} packed bytes hold {len(planes)} bytes, not {nbytes}")
    elements = np.frombuffer(planes, np.uint8).reshape(itemsize, -1).T
    return torch.from_numpy(np.array(elements, order="C").reshape(-1))


@dataclass(eq=False)
class Rest:
    """Where one tensor rests on disk, and how much of each block is in use there. `packs`: blocks may be packed."""

    store: DiskStore
    extent: Extent
    block_bytes: int
    itemsize: int
    packs: bool
    stored: dict[int, int] = field(default_factory=dict)  # by a block's first byte; fewer than it has: packed
    writes: list[Request] = field(default_factory=list)

    @property
    def stored_bytes(self) -> int:
        """Bytes that one fetch reads, rounded up to pages."""
        return sum(map(disk_pages, self.stored.values()))

    def blocks(self) -> list[tuple[int, int]]:
        """First byte and number of bytes of each."""
        whole = self.extent.nbytes
        return [(first, min(self.block_bytes, whole - first)) for first in range(0, whole, self.block_bytes)]

    def part(self, first: int, nbytes: int) -> Extent:
        """The pages in which a block is."""
        return self.store.part(self.extent, first, nbytes)


class _Settled:
    """The end of a write, well or not: who waits for its memory has nothing to do with its fault."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def synchronize(self) -> None:
        self._request.settle()

    def query(self) -> bool:
        return self._request.query()


def spill(rest: Rest, source: torch.Tensor, ring: StagingRing, lanes: Lanes, after: Event) -> Event:
    """Writes uint8 `source`, which is on the device or host, to disk. Returns when nobody reads it after that event.

    Writes go on then: `rest.writes` are they.
    """
    for request in rest.writes:  # blocks change their size, and the store orders what has the same
        request.settle()
    rest.writes = []
    read: Event = after
    try:
        for first, nbytes in rest.blocks():
            slot = _acquire(ring)
            ended: Event | None = None
            try:
                memory = slot.memory[:nbytes]
                transfer = lanes.copy(Lane.OFFLOAD, [(memory, source[first : first + nbytes])], after)
                read = landed = ended = transfer.done
                stored = nbytes
                if rest.packs:
                    landed.synchronize()
                    packed = pack(memory, rest.itemsize)
                    if packed is not None and disk_pages(len(packed)) < disk_pages(nbytes):
                        stored = len(packed)
                        memory = slot.memory[: disk_pages(stored)]
                        memory[:stored].copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
                request = rest.store.write(rest.part(first, memory.nbytes), memory, after=landed)
                rest.writes.append(request)
                rest.stored[first] = stored
                ended = _Settled(request)
            finally:
                ring.release(slot, ended)
    except BaseException:
        read.synchronize()  # whoever is told may write to the source
        raise
    return read


def fetch(rest: Rest, ring: StagingRing, deliver: Deliver) -> int:
    """Brings a tensor from disk, and gives its bytes to `deliver`, block by block. Returns how many were read."""
    reading: deque[tuple[int, int, int, Slot, Request]] = deque()
    read_bytes = 0

    def take_one() -> None:
        first, nbytes, stored, slot, request = reading.popleft()
        gone: Event | None = None
        try:
            request.synchronize()
            memory = slot.memory[:nbytes]
            if stored < nbytes:
                memory.copy_(unpack(slot.memory[:stored].numpy().data, nbytes, rest.itemsize))
            gone = deliver(first, memory)
        finally:
            ring.release(slot, gone)

    try:
        for first, nbytes in rest.blocks():
            while reading and not ring.free_slots:
                take_one()
            slot = _acquire(ring)
            stored = rest.stored[first]
            size = nbytes if stored == nbytes else disk_pages(stored)
            reading.append((first, nbytes, stored, slot, rest.store.read(rest.part(first, size), slot.memory[:size])))
            read_bytes += size
        while reading:
            take_one()
    finally:
        for *_, slot, request in reading:
            ring.release(slot, _Settled(request))
    return read_bytes


def _acquire(ring: StagingRing) -> Slot:
    slot = ring.acquire()
    if slot.free is not None:
        slot.free.synchronize()
    return slot
