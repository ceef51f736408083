"""How does one tensor pass between device and disk? In blocks, through a ring of slots, several under way at once."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore, Extent, Request, Slot, StagingRing, disk_pages
from headrace.memory.ledger import Ledger
from headrace.memory.packed import Packed, pack, unpack
from headrace.runtime.lanes import Event, Lane, Lanes

__all__ = ["DiskBlocks", "Rest"]


@dataclass(eq=False)
class Rest:
    """Where one tensor rests on disk, and how much of each block is in use there. `packs`: blocks may be packed."""

    extent: Extent
    packs: bool
    stored: dict[int, int] = field(default_factory=dict)  # by a block's first byte; fewer than it has: packed
    writes: list[Request] = field(default_factory=list)


class _Settled:
    """The end of a request, well or not: who waits for its memory has nothing to do with its fault."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def synchronize(self) -> None:
        self._request.settle()

    def query(self) -> bool:
        return self._request.query()


class DiskBlocks:
    """Tensors of at most `most_bytes` each in the store that `open_disk` opens, through `slots` blocks of host memory.

    Fewer and smaller blocks where these are more than a quarter of the ledger's host budget. `fetch_bytes` were read.
    """

    def __init__(
        self,
        open_disk: Callable[[Ledger], DiskStore],
        ledger: Ledger,
        memory_device: torch.device,
        lanes: Lanes,
        block_bytes: int,
        slots: int,
        most_bytes: int,
    ) -> None:
        block_bytes = min(disk_pages(block_bytes), disk_pages(max(1, most_bytes)))
        if ledger.host_budget_bytes is not None:
            share = ledger.host_budget_bytes // 4
            pages = max(1, share // slots // DISK_ALIGNMENT_BYTES)
            block_bytes = min(block_bytes, pages * DISK_ALIGNMENT_BYTES)
            slots = max(1, min(slots, share // block_bytes))
        self._ring, self._lanes = StagingRing(block_bytes, slots, memory_device, ledger), lanes
        self._store = open_disk(ledger)
        self.fetch_bytes = 0

    def rest(self, name: str, nbytes: int, purpose: str, *, packs: bool) -> Rest:
        """Takes the place of one tensor."""
        return Rest(self._store.allocate(name, nbytes, purpose), packs)

    def spill(self, rest: Rest, source: torch.Tensor, after: Event) -> Event:
        """Writes uint8 `source`, which is on the device or host. Nobody reads it any more after that event; writing
        goes on then: `rest.writes`."""
        for request in rest.writes:  # blocks change their size, and the store orders what has the same
            request.settle()
        rest.writes = []
        read: Event = after
        try:
            for first, nbytes in self._blocks(rest):
                slot = self._acquire()
                gone: Event | None = None
                try:
                    memory = slot.memory[:nbytes]
                    read = gone = self._lanes.copy(Lane.OFFLOAD, [(memory, source[first : first + nbytes])], after).done
                    rest.stored[first] = nbytes
                    if rest.packs:
                        read.synchronize()
                        packed = pack(memory)
                        if packed is not None and disk_pages(packed.nbytes) < disk_pages(nbytes):
                            memory = slot.memory[: disk_pages(packed.nbytes)]
                            memory[: packed.nbytes].copy_(packed)
                            rest.stored[first] = packed.nbytes
                    request = self._store.write(self._part(rest, first, memory.nbytes), memory, after=read)
                    rest.writes.append(request)
                    gone = _Settled(request)
                finally:
                    self._ring.release(slot, gone)
        except BaseException:
            read.synchronize()  # whoever is told may write to the source
            raise
        return read

    def fetch(self, rest: Rest, target: torch.Tensor, after: Event) -> Event:
        """Fills uint8 `target`, which is on the device or host, after that event. Returns the end of it."""
        reading: deque[tuple[int, int, Slot, Request]] = deque()
        end: Event = after

        def take_one() -> None:
            nonlocal end
            first, nbytes, slot, request = reading.popleft()
            gone: Event | None = None
            try:
                request.synchronize()
                memory = slot.memory[:nbytes]
                if rest.stored[first] < nbytes:
                    plain = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                    unpack(Packed.in_memory(slot.memory), plain)
                    memory.copy_(plain)
                end = gone = self._lanes.copy(Lane.ONLOAD, [(target[first : first + nbytes], memory)], after).done
            finally:
                self._ring.release(slot, gone)

        try:
            for first, nbytes in self._blocks(rest):
                while reading and not self._ring.free_slots:
                    take_one()
                slot, stored = self._acquire(), rest.stored[first]
                stored = stored if stored == nbytes else disk_pages(stored)
                request = self._store.read(self._part(rest, first, stored), slot.memory[:stored])
                reading.append((first, nbytes, slot, request))
                self.fetch_bytes += stored
            while reading:
                take_one()
        except BaseException:
            end.synchronize()  # whoever is told may let go of the target
            raise
        finally:
            for *_, slot, request in reading:
                self._ring.release(slot, _Settled(request))
        return end

    def synchronize(self) -> None:
        """Waits for all writes. Raises DiskError for one that was not made good since."""
        self._store.synchronize()

    def close(self) -> None:
        """Gives memory and disk back."""
        self._ring.close()
        self._store.close()

    def _blocks(self, rest: Rest) -> list[tuple[int, int]]:
        """First byte and number of bytes of each."""
        whole, block = rest.extent.nbytes, self._ring.slot_bytes
        return [(first, min(block, whole - first)) for first in range(0, whole, block)]

    def _part(self, rest: Rest, first: int, nbytes: int) -> Extent:
        return self._store.part(rest.extent, first, nbytes)

    def _acquire(self) -> Slot:
        slot = self._ring.acquire()
        if slot.free is not None:
            slot.free.synchronize()
        return slot
