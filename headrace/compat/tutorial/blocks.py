"""How does one tensor pass between device and disk? In blocks, through a ring of slots, several under way at once."""

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore, Ended, Extent, Request, StagingRing, disk_pages
from headrace.memory.ledger import Ledger
from headrace.memory.packed import available, pack
from headrace.runtime.lanes import Event, Lane, Lanes, Transfer
from headrace.runtime.pace import Pace
from headrace.weights.meter import Meter
from headrace.weights.rest.fetching import Fetch, Fetching, Target
from headrace.weights.rest.reads import DiskRead, Range

__all__ = ["DiskBlocks", "DiskSettings", "OnDisk"]


@dataclass(frozen=True)
class DiskSettings:
    """How tensors on disk are stored: in a file without a name in `directory`, which `threads` threads read and write.

    They pass through `slots` blocks of `block_bytes` of host memory. `packs`: bfloat16 tensors are packed on disk.
    """

    directory: str
    threads: int = 4
    block_bytes: int = 1 << 20
    slots: int = 8
    packs: bool = False


class DiskBlocks:
    """Tensors of at most `most_bytes` each on disk, and the blocks of host memory that they pass through.

    Blocks are made fewer and smaller if they would take more than a quarter of the ledger's host budget. Tensors are
    fetched as a model's blocks are; `meter` counts what was read.
    """

    def __init__(
        self, settings: DiskSettings, most_bytes: int, ledger: Ledger, memory_device: torch.device, lanes: Lanes
    ) -> None:
        block_bytes, slots = min(disk_pages(settings.block_bytes), disk_pages(max(1, most_bytes))), settings.slots
        if ledger.host_budget_bytes is not None:
            share = ledger.host_budget_bytes // 4
            pages = max(1, share // slots // DISK_ALIGNMENT_BYTES)
            block_bytes = min(block_bytes, pages * DISK_ALIGNMENT_BYTES)
            slots = max(1, min(slots, share // block_bytes))
        self.ring, self.lanes = StagingRing(block_bytes, slots, memory_device, ledger), lanes
        self.store = DiskStore(settings.directory, ledger, threads=settings.threads, alone=False, device=lanes.device)
        self.meter = Meter(lanes)
        self.fetching = Fetching(self.ring, slots, Pace(lanes), self.meter)
        self._packs = settings.packs and available()

    def allocate(self, name: str, like: torch.Tensor, purpose: str) -> "OnDisk":
        """The place of one tensor on disk."""
        extent = self.store.allocate(name, like.nbytes, purpose)
        return OnDisk(self, extent, self._packs and like.dtype == torch.bfloat16)

    def synchronize(self) -> None:
        """Waits for all writes. Raises DiskError for a write that failed and was not repeated since."""
        self.store.synchronize()

    def close(self) -> None:
        """Waits for reads and writes under way, and frees memory and disk."""
        self.fetching.close()
        self.store.close()


class OnDisk:
    """The place of one tensor on disk. As an Event, it is the end of the writes there, even if they failed."""

    memory = None

    def __init__(self, by: DiskBlocks, extent: Extent, packs: bool) -> None:
        self._by, self._extent, self._packs = by, extent, packs
        self.offset = extent.offset
        block = by.ring.slot_bytes
        # The first byte and the number of bytes of each block; and its bytes on disk, which are fewer if it is packed.
        self._blocks = [(first, min(block, extent.nbytes - first)) for first in range(0, extent.nbytes, block)]
        self._stored: dict[int, int] = {}
        self._writes: list[Request] = []

    def synchronize(self) -> None:
        for request in self._writes:
            request.settle()

    def query(self) -> bool:
        return all(request.query() for request in self._writes)

    def save(self, source: torch.Tensor, after: Event) -> Event:
        """Writes uint8 `source`, which is on the device or host. After the event that this returns, `source` is not
        read any more. The write itself goes on."""
        self.synchronize()  # packed sizes may change, and the store orders only writes of the same extent
        self._writes = []
        read: Event = after
        try:
            for first, nbytes in self._blocks:
                slot = self._by.ring.acquire()
                gone: Event | None = None
                try:
                    if slot.free is not None:
                        slot.free.synchronize()
                    memory, part = slot.memory[:nbytes], source[first : first + nbytes]
                    read = gone = self._by.lanes.copy(Lane.OFFLOAD, [(memory, part)], after).done
                    if self._packs:
                        read.synchronize()
                        packed = pack(memory)
                        if packed is not None and disk_pages(packed.nbytes) < nbytes:
                            memory = memory[: disk_pages(packed.nbytes)]
                            memory[: packed.nbytes].copy_(packed)
                    self._stored[first] = memory.nbytes
                    place = self._by.store.part(self._extent, first, memory.nbytes)
                    self._writes.append(self._by.store.write(place, memory, after=read))
                    gone = Ended(self._writes[-1])
                finally:
                    self._by.ring.release(slot, gone)
        except BaseException:
            read.synchronize()  # whoever catches the error may write to the source
            raise
        return read

    def bring(self, target: torch.Tensor, after: Event) -> Future[Transfer]:
        """Submits filling uint8 `target`, on the device or host, after that event."""
        pieces = [self._piece(first, nbytes, self._stored[first]) for first, nbytes in self._blocks]
        fetch = Fetch(pieces, self._extent.nbytes, 0, lambda: None, self._by.fetching)
        fetch.ask(Target(target, after, ()))
        return fetch.arrived

    def _piece(self, first: int, nbytes: int, stored: int) -> DiskRead:
        place, packed = self._by.store.part(self._extent, first, stored), stored < nbytes

        def read(chunk: torch.Tensor) -> Request:
            return self._by.store.read(place, chunk[-stored:] if packed else chunk[:stored])

        return DiskRead(read, stored, (Range(0, nbytes, first),), plain_bytes=nbytes if packed else 0)
