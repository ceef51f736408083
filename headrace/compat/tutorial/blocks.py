"""How does one tensor pass between device and disk? In blocks, through a ring of slots, several under way at once."""

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore, Ended, Extent, Request, StagingRing, disk_pages
from headrace.memory.ledger import Ledger
from headrace.memory.packed import available, pack
from headrace.runtime.lanes import Event, Lane, Lanes, Transfer
from headrace.runtime.pace import Pace
from headrace.weights.meter import Meter
from headrace.weights.rest.fetching import Fetch, Fetching, Target
from headrace.weights.rest.reads import DiskRead, Range

__all__ = ["DiskBlocks", "DiskSettings", "Rest"]


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


@dataclass(eq=False)
class Rest:
    """Where one tensor rests on disk. As an Event, it is the end of the writes there, even if they failed."""

    extent: Extent
    packs: bool
    stored: dict[int, int] = field(default_factory=dict)  # bytes by a block's first byte; fewer if packed
    writes: list[Request] = field(default_factory=list)

    def synchronize(self) -> None:
        for request in self.writes:
            request.settle()

    def query(self) -> bool:
        return all(request.query() for request in self.writes)


class DiskBlocks:
    """Tensors of at most `most_bytes` each on disk, and the blocks of host memory that they pass through.

    Blocks are fewer and smaller if they would take more than a quarter of the ledger's host budget. Tensors are fetched
    as blocks of a model are; `meter` counts what was read.
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
        self._ring, self._lanes = StagingRing(block_bytes, slots, memory_device, ledger), lanes
        self._store = DiskStore(settings.directory, ledger, threads=settings.threads, alone=False, device=lanes.device)
        self.meter = Meter(lanes)
        self._fetching = Fetching(self._ring, slots, Pace(lanes), self.meter)
        self._packs = settings.packs and available()

    def rest(self, name: str, like: torch.Tensor, purpose: str) -> Rest:
        """Allocates the place of one tensor on disk."""
        return Rest(self._store.allocate(name, like.nbytes, purpose), self._packs and like.dtype == torch.bfloat16)

    def spill(self, rest: Rest, source: torch.Tensor, after: Event) -> Event:
        """Writes uint8 `source`, which is on the device or host. After the event that this returns, `source` is not
        read any more. The write itself goes on; `rest` is the event at its end."""
        rest.synchronize()  # packed sizes may change, and the store orders only writes of the same extent
        rest.writes = []
        read: Event = after
        try:
            for first, nbytes in self._blocks(rest):
                slot = self._ring.acquire()
                gone: Event | None = None
                try:
                    if slot.free is not None:
                        slot.free.synchronize()
                    memory = slot.memory[:nbytes]
                    read = gone = self._lanes.copy(Lane.OFFLOAD, [(memory, source[first : first + nbytes])], after).done
                    if rest.packs:
                        read.synchronize()
                        packed = pack(memory)
                        if packed is not None and disk_pages(packed.nbytes) < nbytes:
                            memory = memory[: disk_pages(packed.nbytes)]
                            memory[: packed.nbytes].copy_(packed)
                    rest.stored[first] = memory.nbytes
                    place = self._store.part(rest.extent, first, memory.nbytes)
                    rest.writes.append(self._store.write(place, memory, after=read))
                    gone = Ended(rest.writes[-1])
                finally:
                    self._ring.release(slot, gone)
        except BaseException:
            read.synchronize()  # whoever catches the error may write to the source
            raise
        return read

    def fetch(self, rest: Rest, target: torch.Tensor, after: Event) -> Future[Transfer]:
        """Submits filling uint8 `target`, on the device or host, after that event."""
        pieces = [self._piece(rest, *block) for block in self._blocks(rest)]
        fetch = Fetch(pieces, rest.extent.nbytes, 0, lambda: None, self._fetching)
        fetch.ask(Target(target, after, ()))
        return fetch.arrived

    def synchronize(self) -> None:
        """Waits for all writes. Raises DiskError for a write that failed and was not repeated since."""
        self._store.synchronize()

    def close(self) -> None:
        """Waits for reads and writes under way, and frees memory and disk."""
        self._fetching.close()
        self._store.close()

    def _piece(self, rest: Rest, first: int, nbytes: int) -> DiskRead:
        stored = rest.stored[first]
        place, packed = self._store.part(rest.extent, first, stored), stored < nbytes

        def read(chunk: torch.Tensor) -> Request:
            return self._store.read(place, chunk[-stored:] if packed else chunk[:stored])

        return DiskRead(read, stored, (Range(0, nbytes, first),), plain_bytes=nbytes if packed else 0)

    def _blocks(self, rest: Rest) -> list[tuple[int, int]]:
        """The first byte and the number of bytes of each block."""
        whole, block = rest.extent.nbytes, self._ring.slot_bytes
        return [(first, min(block, whole - first)) for first in range(0, whole, block)]
