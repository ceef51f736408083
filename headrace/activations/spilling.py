"""How do activations rest on disk? They pass through a little host memory, with write-behind and read-ahead.

The host memory of an item is reused as soon as the disk has the bytes. A copy back is submitted on a separate thread,
when the read before it is done.
"""

import contextlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from headrace.activations.item import Item
from headrace.activations.meter import ActivationMeter
from headrace.activations.stash import PURPOSE, Stash
from headrace.config import ActivationConfig
from headrace.errors import DiskError
from headrace.memory import ranges
from headrace.memory.arena import whole_pages
from headrace.memory.disk import DiskStore, Extent, Request, disk_pages
from headrace.memory.ledger import Ledger
from headrace.memory.pool import Slab
from headrace.runtime.lanes import Event, Lane, Lanes, LateTransfer, Transfer
from headrace.runtime.threads import OneThread

_STAGED_ITEMS = 4  # items of the largest size that are on their way at once: two in each direction


@dataclass(eq=False)
class _Spill:
    """One item on its way to disk."""

    item: Item
    slab: Slab
    extent: Extent
    request: Request


class DiskStash(Stash):
    """A stash whose items rest in `store`. The host memory holds a few items, as far as the ledger's budget allows."""

    def __init__(
        self, lanes: Lanes, ledger: Ledger, meter: ActivationMeter, config: ActivationConfig, store: DiskStore
    ) -> None:
        super().__init__(lanes, ledger, meter, config)
        self._store = store
        self.sender: OneThread = OneThread("headrace-activations", lanes.device)
        self._file: list[ranges.Range] = []  # everything that was allocated in the store
        self._free: list[ranges.Range] = []  # the bytes of it that no item has, and no request uses
        self._spills: deque[_Spill] = deque()
        self._fetched: dict[Item, Slab] = {}  # items that are being read, in the order of submission

    def begin(self) -> None:
        """Called when a forward begins."""
        self.settle()

    def settle(self, wait: bool = False) -> None:
        """Takes back the memory of items that nobody can ask for any more, or that the disk has."""
        self.take_back()
        self._end_spills(wait=wait)

    def send_out(self, item: Item) -> None:
        """Submits the copy to the host, and behind it the write."""
        super().send_out(item)
        if item.extent is not None or item.slab is None or item.leaving is None:
            return
        item.extent = extent = self._extent(item.nbytes)
        request = self._store.write(extent, item.slab.memory[: item.nbytes], after=item.leaving.done)
        self._spills.append(_Spill(item, item.slab, extent, request))

    def arrive(self, item: Item) -> None:
        """Makes compute wait for the copy back; then the host memory that the item passed through is reused."""
        super().arrive(item)
        slab = self._fetched.pop(item, None)
        if slab is not None:
            self.pool.give_back(slab)

    def put_back(self, item: Item) -> None:
        """Lets go of the device memory. A read that failed is ignored here: whoever needs the item reads again."""
        try:
            super().put_back(item)
        except DiskError:
            self._drop(item)
            self.pool.give_back(self._fetched.pop(item))

    def _slab_for(self, item: Item) -> Slab | None:
        return self._staged(item, needed=True, must_be=not self._stays_without_room)

    def _is_open(self, item: Item, *, needed: bool) -> bool:
        if item.slab is not None:  # the disk may have it by now, but the host still has it too
            return True
        slab = self._staged(item, needed=needed, must_be=needed)
        if slab is not None:
            self._fetched[item] = slab
        return slab is not None

    def _copy_back(self, item: Item, memory: torch.Tensor, after: Event) -> Transfer | LateTransfer:
        if item.slab is not None or item.extent is None:
            return super()._copy_back(item, memory, after)
        staged = self._fetched[item].memory[: item.nbytes]
        # Compute has waited for the copies that used this host memory before, so they precede `after`.
        reading = self._store.read(item.extent, staged, after=after)

        lanes, meter = self.lanes, self.meter  # not the stash, which must not end on that thread

        def send() -> Transfer:
            seconds = reading.reached_at() - reading.began_at()
            meter.fetched(staged.nbytes, seconds)
            return lanes.copy(Lane.ONLOAD, [(memory, staged)], after)

        submitted: Future[Transfer] = self.sender.submit(send)
        return LateTransfer(Lane.ONLOAD, item.nbytes, submitted)

    def _give_up(self, item: Item) -> None:
        """Frees the item's place on disk, at once or, if it is being written, afterwards."""
        slab, item.slab = item.slab, None
        if slab is not None and all(spill.slab is not slab for spill in self._spills):
            self.pool.give_back(slab)  # an interrupt kept it from being written
        extent, item.extent = item.extent, None
        if extent is not None and all(spill.extent is not extent for spill in self._spills):
            self._free_extent(extent)

    def _mend(self) -> None:
        """As in `Stash`; also waits for the disk, forgets reads that no item knows of, and finds what is free."""
        with contextlib.suppress(DiskError):  # raised to whoever waits for that request
            self._store.synchronize()
        self.sender.submit(int).result()  # returns after the jobs submitted before it
        self._fetched = {item: slab for item, slab in self._fetched.items() if item.arriving is not None}
        self._free = self._file.copy()
        kept = {item.extent for item in self._guests.values() if item.extent is not None}
        for extent in kept | {spill.extent for spill in self._spills}:
            ranges.remove(self._free, extent.offset, extent.offset + extent.capacity_bytes)
        super()._mend()

    def _slabs(self) -> Iterable[Slab]:
        return {*super()._slabs(), *self._fetched.values(), *(spill.slab for spill in self._spills)}

    # room -------------------------------------------------------------------------------------------------------------
    def _staged(self, item: Item, *, needed: bool, must_be: bool) -> Slab | None:
        """Host memory on the way to or from disk. Waits for writes to free it; if it is `needed`, also gives up reads.

        Returns None when there is no room, or with `must_be` raises BudgetError.
        """
        wanted = whole_pages(item.nbytes)
        while (slab := self.pool.try_take(wanted)) is None:
            if self.pool.arena_bytes < _STAGED_ITEMS * wanted and self.pool.has_room(wanted):
                whole = _STAGED_ITEMS * wanted
                self.pool.grow(whole if self.pool.has_room(whole) else wanted)
            elif self._spills:
                self._spills[0].request.settle()
                self.arrive(self._spills[0].item)
                failed = self._end_spill()
                if failed is not None:
                    failed.synchronize()
            elif needed and self._fetched:
                self.put_back(next(reversed(self._fetched)))
            else:
                return self.pool.take(wanted) if must_be else None
        return slab

    def _end_spills(self, *, wait: bool) -> None:
        """Ends the spills that are done; with `wait`, all. If one failed, raises its error after the others."""
        failed: Request | None = None
        while self._spills and self._spills[0].item.arriving is None and (wait or self._spills[0].request.query()):
            failed = self._end_spill() or failed
        if failed is not None:
            failed.synchronize()

    def _end_spill(self) -> Request | None:
        """Ends the oldest spill; its host memory is reused. If the write failed and the item is still in use,
        the host keeps the item, and this returns the request, which raises the error when it is waited for."""
        spill = self._spills[0]
        spill.request.settle()
        self._spills.popleft()
        if spill.item.extent is not spill.extent:  # nobody can ask for it any more
            self._free_extent(spill.extent)
        if spill.request.error is None:
            seconds = spill.request.reached_at() - spill.request.began_at()
            self.meter.spilled(spill.item.nbytes, seconds)
        elif spill.item.slab is spill.slab:
            return spill.request
        if spill.item.slab is spill.slab:
            spill.item.slab = None
        self.pool.give_back(spill.slab)
        return None

    def _extent(self, nbytes: int) -> Extent:
        """Free bytes of the file, or new ones where there are none."""
        name, wanted = f"activations of {nbytes} bytes", disk_pages(nbytes)
        offset = ranges.take(self._free, wanted)
        if offset is not None:
            return Extent(name, offset, nbytes)
        extent = self._store.allocate(name, nbytes, PURPOSE)
        ranges.add(self._file, extent.offset, extent.offset + wanted)
        return extent

    def _free_extent(self, extent: Extent) -> None:
        """Frees an extent that no request uses, or will use."""
        self._store.release(extent)
        ranges.add(self._free, extent.offset, extent.offset + extent.capacity_bytes)
