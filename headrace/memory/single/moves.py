"""How do bytes of one tensor move between where it rests and the device? On lanes, and through blocks to and from disk.

Two threads carry blocks, one for each direction. What compute is given after a call comes after the move that it began.
"""

from collections.abc import Callable

import torch

from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore, StagingRing, disk_pages
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.single.blocks import Deliver, Rest, fetch, spill
from headrace.memory.single.entries import Arrival, Entry, Visit, event_of, failed
from headrace.runtime.lanes import Event, Lane, open_lanes
from headrace.runtime.threads import Job, OneThread

__all__ = ["Moves"]


class Moves:
    """The lanes of `device`, and the disk that `open_disk` opens when the first tensor is to rest there.

    `memory_device`: for which staging memory is page-locked. `fetch_bytes` were read from disk.
    """

    def __init__(
        self,
        device: torch.device,
        memory_device: torch.device,
        ledger: Ledger,
        open_disk: Callable[[Ledger], DiskStore] | None,
        block_bytes: int,
        blocks_in_flight: int,
    ) -> None:
        if blocks_in_flight < 1 or block_bytes < 1:
            raise ValueError(f"{blocks_in_flight} blocks of {block_bytes} bytes carry nothing; give 1 or more of each")
        self._device, self._memory_device, self._ledger = device, memory_device, ledger
        self._open_disk = open_disk
        self._blocks = disk_pages(block_bytes), blocks_in_flight
        self._disk: tuple[DiskStore, StagingRing] | None = None
        self._lanes = open_lanes(device)
        self._fetching, self._spilling = OneThread("headrace-fetch"), OneThread("headrace-spill")
        self.fetch_bytes = 0

    @property
    def has_disk(self) -> bool:
        """Whether tensors may rest on disk."""
        return self._open_disk is not None

    @property
    def disk_is_open(self) -> bool:
        """Whether memory is taken for that."""
        return self._disk is not None

    def open_disk(self, most_bytes: int) -> None:
        """Opens the disk for tensors of at most so many bytes. Raises BudgetError for the memory that it takes."""
        if self._open_disk is not None:
            block, slots = min(self._blocks[0], disk_pages(max(1, most_bytes))), self._blocks[1]
            if self._ledger.host_budget_bytes is not None:
                share = self._ledger.host_budget_bytes // 4
                block = min(block, max(1, share // slots // DISK_ALIGNMENT_BYTES) * DISK_ALIGNMENT_BYTES)
                slots = max(1, min(slots, share // block))
            ring = StagingRing(block, slots, self._memory_device, self._ledger)
            self._disk = self._open_disk(self._ledger), ring

    def rest(self, name: str, entry: Entry, purpose: str, *, packs: bool) -> None:
        """Takes the place in which a tensor rests on disk."""
        if self._disk is not None:
            store, ring = self._disk
            extent = store.allocate(name, entry.nbytes, purpose)
            entry.rest = Rest(store, extent, ring.slot_bytes, entry.like.itemsize, packs)

    def bring(self, entry: Entry, buffer: torch.Tensor) -> Arrival:
        """Submits filling `buffer`, which is on the device, with what rests."""
        after = self._lanes.mark()
        if entry.home is not None:
            done: Event = self._lanes.copy(Lane.ONLOAD, [(buffer, entry.home)], after).done
            return done

        def job() -> Event:
            last: Event = after

            def deliver(first: int, memory: torch.Tensor) -> Event:
                nonlocal last
                last = self._lanes.copy(Lane.ONLOAD, [(buffer[first : first + memory.nbytes], memory)], after).done
                return last

            try:
                self._fetch(entry, deliver)
            except BaseException:
                last.synchronize()  # whoever is told may let go of the buffer
                raise
            return last

        return self._fetching.submit(job)

    def wait_for(self, visit: Visit) -> None:
        """Compute comes after the arrival from now on. Raises what kept it from arriving."""
        self._lanes.wait(event_of(visit.arrival))

    def save(self, entry: Entry, source: torch.Tensor) -> None:
        """uint8 `source` becomes what rests; whoever writes to it after this returns does so later."""
        if entry.tier is Tier.DEVICE:
            if entry.home is not None and source.data_ptr() != entry.home.data_ptr():
                entry.home.copy_(source)
            return
        if entry.home is not None:
            self._save_on_host(entry, entry.home, source)
        elif entry.rest is not None and self._disk is not None:
            _, ring = self._disk
            entry.saving = self._spilling.submit(spill, entry.rest, source, ring, self._lanes, self._lanes.mark())
            read = entry.saving.result()
            if source.device.type == "cpu":
                read.synchronize()
            self._lanes.wait(read)

    def saved(self, entry: Entry) -> None:
        """Waits until what is being saved has left the device. Raises what failed."""
        if entry.saving is not None:
            event_of(entry.saving).synchronize()

    def take_out(self, entry: Entry) -> torch.Tensor:
        """What rests, in host memory of its own: uint8, (nbytes,)."""
        self.saved(entry)
        if entry.home is not None:
            return entry.home.cpu().clone()
        flat = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")

        def deliver(first: int, memory: torch.Tensor) -> None:
            flat[first : first + memory.nbytes].copy_(memory)

        self._fetching.submit(self._fetch, entry, deliver).result()
        return flat

    def synchronize(self) -> None:
        """Waits for what was submitted to the disk. Raises DiskError for a write that was not made good since."""
        if self._disk is not None:
            self._disk[0].synchronize()

    def close(self, entries: list[Entry]) -> None:
        """Waits for what is under way of `entries`, well or not, and gives the threads, staging and disk back."""
        self._fetching.shutdown(wait=True)
        self._spilling.shutdown(wait=True)
        for entry in entries:
            for under_way in (None if entry.visit is None else entry.visit.arrival, entry.saving):
                if under_way is not None and not failed(under_way):
                    event_of(under_way).synchronize()
        self._lanes.close()
        if self._disk is not None:
            store, ring = self._disk
            ring.close()
            store.close()

    def _save_on_host(self, entry: Entry, home: torch.Tensor, source: torch.Tensor) -> None:
        if source.device.type == "cpu":
            self.saved(entry)
            if entry.visit is not None:
                event_of(entry.visit.arrival).synchronize()  # it reads what is written now
            home.copy_(source)
            return
        left: Event = self._lanes.copy(Lane.OFFLOAD, [(home, source)], self._lanes.mark()).done
        entry.saving = left
        self._lanes.wait(left)

    def _fetch(self, entry: Entry, deliver: Deliver) -> None:
        """On the thread of fetches: behind what is being written."""
        if isinstance(entry.saving, Job):
            entry.saving.result()
        if entry.rest is not None and self._disk is not None:
            self.fetch_bytes += fetch(entry.rest, self._disk[1], deliver)
