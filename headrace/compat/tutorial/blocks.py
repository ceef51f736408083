"""How does one tensor pass between device and disk? In blocks, through a ring of slots, several under way at once."""

from collections import deque
from dataclasses import dataclass, field

import torch

from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore, Ended, Extent, Request, Slot, StagingRing, disk_pages
from headrace.memory.ledger import Ledger
from headrace.memory.packed import available, pack, unpack_in_place
from headrace.runtime.lanes import Event, Lane, Lanes
from headrace.runtime.threads import Job, OneThread, wait_asleep

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


@dataclass(frozen=True)
class _Reading:
    """A block on its way from disk: `nbytes` bytes of a tensor, from byte `first` on."""

    first: int
    nbytes: int
    slot: Slot
    memory: torch.Tensor  # the slot's first bytes, or its last ones if the block is packed
    request: Request


class DiskBlocks:
    """Tensors of at most `most_bytes` each on disk, and the blocks of host memory that they pass through.

    Blocks are fewer and smaller if they would take more than a quarter of the ledger's host budget. `fetch_bytes`
    counts the bytes that were read.
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
        self._fetching = OneThread("headrace-fetch", lanes.device)
        self._packs = settings.packs and available()
        self.fetch_bytes = 0

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
                slot = self._acquire()
                gone: Event | None = None
                try:
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

    def fetch(self, rest: Rest, target: torch.Tensor, after: Event) -> Job[Event]:
        """Submits filling uint8 `target`, on the device or host, after that event. The job's result is its end."""
        return self._fetching.submit(self._fetch, rest, target, after)

    def synchronize(self) -> None:
        """Waits for all writes. Raises DiskError for a write that failed and was not repeated since."""
        self._store.synchronize()

    def close(self) -> None:
        """Waits for reads and writes under way, and frees memory and disk."""
        self._fetching.shutdown(wait=True)
        self._ring.close()
        self._store.close()

    def _fetch(self, rest: Rest, target: torch.Tensor, after: Event) -> Event:
        reading: deque[_Reading] = deque()
        end: Event = after
        try:
            for first, nbytes in self._blocks(rest):
                while reading and not self._ring.free_slots:
                    end = self._send(reading.popleft(), target, after)
                slot, stored = self._acquire(), rest.stored[first]
                memory = slot.memory[:stored] if stored == nbytes else slot.memory[-stored:]
                request = self._store.read(self._store.part(rest.extent, first, stored), memory)
                reading.append(_Reading(first, nbytes, slot, memory, request))
                self.fetch_bytes += stored
            while reading:
                end = self._send(reading.popleft(), target, after)
        except BaseException:
            wait_asleep(end)  # whoever catches the error may free the target
            raise
        finally:
            for one in reading:
                self._ring.release(one.slot, Ended(one.request))
        return end

    def _send(self, one: _Reading, target: torch.Tensor, after: Event) -> Event:
        """Waits until a block has been read, and submits its copy to its part of `target`; returns the copy's end."""
        gone: Event | None = None
        try:
            one.request.synchronize()
            whole = one.slot.memory
            if one.memory.nbytes < one.nbytes:
                unpack_in_place(whole, whole.nbytes - one.memory.nbytes)
            copied = target[one.first : one.first + one.nbytes], whole[: one.nbytes]
            gone = self._lanes.copy(Lane.ONLOAD, [copied], after).done
        finally:
            self._ring.release(one.slot, gone)
        return gone

    def _blocks(self, rest: Rest) -> list[tuple[int, int]]:
        """The first byte and the number of bytes of each block."""
        whole, block = rest.extent.nbytes, self._ring.slot_bytes
        return [(first, min(block, whole - first)) for first in range(0, whole, block)]

    def _acquire(self) -> Slot:
        slot = self._ring.acquire()
        if slot.free is not None:
            wait_asleep(slot.free)
        return slot
