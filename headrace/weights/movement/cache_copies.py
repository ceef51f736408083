"""How are caches copied to the device and back? Beside compute, and through page-locked memory where they are on disk.

The host memory of a copy is kept until the copy has ended, even where its owner lets go of it.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from headrace.memory.arena import aligned
from headrace.memory.disk import copy_on_disk
from headrace.memory.ledger import Ledger
from headrace.memory.pool import HostPool, Slab
from headrace.planning import LAYERS_ON_DEVICE, LAYERS_STAGED
from headrace.runtime.lanes import Copy, Event, Lane, LateTransfer, Transfer
from headrace.runtime.pace import Pace
from headrace.runtime.threads import OneThread, wait_asleep
from headrace.weights.meter import Meter

PURPOSE = "caches"
NoteRead = Callable[[Sequence[torch.Tensor]], None]


class CacheCopies:
    """The copies of one model's caches."""

    def __init__(self, pace: Pace, ledger: Ledger, meter: Meter) -> None:
        self._pace = pace
        self._lanes = pace.lanes
        self._meter = meter
        self._leaving: deque[Transfer] = deque()  # copies to the host that compute has not waited for
        # Host memory of copies that may be under way, and what of it is staging memory.
        self._kept: deque[tuple[Event, Sequence[torch.Tensor], Slab | None]] = deque()
        self._staging = HostPool(self._lanes.device, ledger, "staging of caches")
        self._thread: OneThread | None = None  # copies between staging memory and disk

    def close(self) -> None:
        """The host waits for all copies; there are none any more."""
        self.settle()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def settle(self) -> None:
        """The host waits for all copies, and lets go of what was kept for them."""
        while self._leaving:
            self._let_go_of_oldest()
        while self._kept:
            self._kept[0][0].synchronize()
            self._let_go_of_kept()

    def mend(self) -> None:
        """As `settle`, after a pass was broken off: some of the copies may have failed."""
        if self._thread is not None:
            self._thread.submit(int).result()
        for lane in Lane:
            self._lanes.copy(lane, (), self._lanes.mark()).done.synchronize()
        self._leaving.clear()
        self._kept.clear()
        self._staging.keep(())

    def bring(
        self, copies: list[Copy], nbytes: int, note_read: NoteRead, *, from_disk: bool
    ) -> tuple[Transfer | LateTransfer, Event]:
        """Submits copies to the device. Also returns the event of their end."""
        if from_disk:
            late = self._fetch(copies, nbytes, note_read)
            return late, late
        rests = [rest for _, rest in copies]
        note_read(rests)
        transfer, done = self._pace.submit(Lane.ONLOAD, copies, self._lanes.mark())
        self._keep(done, rests)
        return transfer, done

    def _fetch(self, copies: list[Copy], nbytes: int, note_read: NoteRead) -> LateTransfer:
        """Submits copies from disk, behind all that go there. Compute and the device go on meanwhile."""
        rests = [rest for _, rest in copies]
        slab, staged = self._staged(rests)
        pace, after = self._pace, self._lanes.mark()

        def send() -> Transfer:
            note_read(rests)
            for to, (_, rest) in zip(staged, copies, strict=True):
                copy_on_disk(to, rest)
            sent = pace.copy(Lane.ONLOAD, [(to, of) for (to, _), of in zip(copies, staged, strict=True)], after)
            copies.clear()  # the result keeps no device memory
            return Transfer(sent.lane, (), sent.nbytes, sent.begun, sent.done)

        late = LateTransfer(Lane.ONLOAD, nbytes, self._worker().submit(send))
        self._keep(late, rests, slab)
        self._meter.fetch_bytes += nbytes
        return late

    def send_out(self, copies: list[Copy], *, to_disk: bool) -> Event | None:
        """Submits copies to where caches rest, behind all that compute was given until now. Returns their end."""
        if not copies:
            return None
        if to_disk:
            return self._spill(copies)
        done: Event = self._copy_out(copies).done
        return done

    def _spill(self, copies: list[Copy]) -> Event:
        """Submits copies to disk."""
        rests = [rest for rest, _ in copies]
        slab, staged = self._staged(rests)
        transfer = self._copy_out([(to, of) for to, (_, of) in zip(staged, copies, strict=True)])
        landed = transfer.done  # the job keeps no device memory

        def write() -> None:
            wait_asleep(landed)
            for rest, of in zip(rests, staged, strict=True):
                copy_on_disk(rest, of)

        done = self._worker().submit(write)
        self._keep(done, rests, slab)
        self._meter.spilled(transfer.nbytes)
        return done

    def _worker(self) -> OneThread:
        if self._thread is None:
            self._thread = OneThread("headrace-caches", self._lanes.device)
        return self._thread

    def _staged(self, tensors: Sequence[torch.Tensor]) -> tuple[Slab, list[torch.Tensor]]:
        """Page-locked memory for tensors of these shapes; waits for copies of more than a few layers at once."""
        nbytes = sum(aligned(tensor.nbytes) for tensor in tensors)
        while self._kept and self._staging.held_bytes + nbytes > LAYERS_STAGED * nbytes:
            self._kept[0][0].synchronize()
            self._let_go_of_kept()
        slab = self._staging.take(nbytes)
        staged, offset = [], 0
        for tensor in tensors:
            memory = slab.memory[offset : offset + tensor.nbytes]
            staged.append(memory.view(tensor.dtype).view(tensor.shape))
            offset += aligned(tensor.nbytes)
        return slab, staged

    def _copy_out(self, copies: list[Copy]) -> Transfer:
        transfer = self._lanes.copy(Lane.OFFLOAD, copies, self._lanes.mark())
        self._meter.cache_offloaded(transfer.nbytes)
        self._meter.arrived(transfer, PURPOSE)
        self._leaving.append(transfer)
        while self._leaving and (len(self._leaving) > LAYERS_ON_DEVICE or self._leaving[0].done.query()):
            self._let_go_of_oldest()
        return transfer

    def _let_go_of_oldest(self) -> None:
        """Lets go of the device memory of the oldest copy to the host, for which compute waits first."""
        transfer = self._leaving[0]
        self._lanes.wait(transfer.done)
        self._keep(transfer.done, [rest for rest, _ in transfer.copies])
        self._leaving.popleft()

    def _keep(self, done: Event, rests: Sequence[torch.Tensor], slab: Slab | None = None) -> None:
        """Keeps host memory until `done`, even where its owner lets go of it."""
        self._kept.append((done, rests, slab))
        while self._kept and self._kept[0][0].query():
            self._let_go_of_kept()

    def _let_go_of_kept(self) -> None:
        _, _, slab = self._kept.popleft()
        if slab is not None:
            self._staging.give_back(slab)
