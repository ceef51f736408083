"""How do activations rest on disk? They pass through a little host memory, written behind and read ahead.

The host memory of an item is handed on as soon as the disk has the bytes. A copy back is submitted by a thread of its
own, when the read before it is done.
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

__all__ = ["DiskStash"]

_STAGED_ITEMS = 4  # on their way at once, of the largest size: two each way


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
        self._file: list[ranges.Range] = []  # all that was taken of the store
        self._free: list[ranges.Range] = []  # of it: no item has these bytes, and no request of them is under way
        self._spills: deque[_Spill] = deque()
        self._fetched: dict[Item, Slab] = {}  # items that are being read, in the order of submission

    def begin(self) -> None:
        """A forward begins."""
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
        """Compute waits for the copy back; then the host memory that it passed through is handed on."""
        super().arrive(item)
        slab = self._fetched.pop(item, None)
        if slab is not None:
            self.pool.give_back(slab)

    def put_back(self, item: Item) -> None:
        """Our hold on device memory ends. A read that failed hurts nobody here: whoever needs the item reads again."""
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
        # Copies that used this host memory before were waited for by compute, so they are before `after`.
        reading = self._store.read(item.extent, staged, after=after)

        lanes, meter = self.lanes, self.meter  # not the stash, which must not end on that thread

        def send() -> Transfer:
            seconds = reading.reached_at() - reading.began_at()
            meter.fetched(staged.nbytes, seconds)
            return lanes.copy(Lane.ONLOAD, [(memory, staged)], after)

        submitted: Future[Transfer] = self.sender.submit(send)
        return LateTransfer(Lane.ONLOAD, item.nbytes, submitted)

    def _give_up(self, item: Item) -> None:
        """Its place on disk is free, at once or when it has been written."""
        slab, item.slab = item.slab, None
        if slab is not None and all(spill.slab is not slab for spill in self._spills):
            self.pool.give_back(slab)  # an interrupt kept it from being written
        extent, item.extent = item.extent, None
        if extent is not None and all(spill.extent is not extent for spill in self._spills):
            self._free_extent(extent)

    def _mend(self) -> None:
        """Nothing is read any more, but for items that know of it."""
        with contextlib.suppress(DiskError):  # which whoever waits for that request hears of
            self._store.synchronize()
        self.sender.submit(int).result()  # behind whatever was submitted
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
        """Host memory on the way to or from disk. For what is needed, the host waits for writes, or gives up reads.

        Raises BudgetError where there is no room, and there must be.
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
        """Ends those that the disk has, or all. Raises one that failed when it is done with the others."""
        failed: Request | None = None
        while self._spills and self._spills[0].item.arriving is None and (wait or self._spills[0].request.query()):
            failed = self._end_spill() or failed
        if failed is not None:
            failed.synchronize()

    def _end_spill(self) -> Request | None:
        """The disk has an item; its host memory is handed on. Where that failed, the host keeps what somebody can ask
        for, and the request is given back, which raises what kept it from being written."""
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
        """Bytes of the file that are free, else new ones."""
        name, wanted = f"activations of {nbytes} bytes", disk_pages(nbytes)
        offset = ranges.take(self._free, wanted)
        if offset is not None:
            return Extent(name, offset, nbytes)
        extent = self._store.allocate(name, nbytes, PURPOSE)
        ranges.add(self._file, extent.offset, extent.offset + wanted)
        return extent

    def _free_extent(self, extent: Extent) -> None:
        """No request of it is under way, and none comes."""
        self._store.release(extent)
        ranges.add(self._free, extent.offset, extent.offset + extent.capacity_bytes)
