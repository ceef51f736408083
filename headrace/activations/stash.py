"""How do activations move between device and host? Each move submits a copy or makes compute wait for one.

The order across lanes is the subject of docs/design/activations.md.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from headrace.activations.item import HandleRef, Item, Presence
from headrace.activations.meter import ActivationMeter
from headrace.activations.streams import ComputeStreams
from headrace.config import ActivationConfig
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.pool import HostPool, Slab
from headrace.runtime.lanes import Event, Lane, Lanes, LateTransfer, Transfer
from headrace.runtime.threads import OneThread, on_headrace_thread

PURPOSE = "activations"

T = TypeVar("T")


class Stash:
    """The host memory of one model's activations, and the copies to and from it."""

    sender: OneThread | None = None  # the thread that submits copies, if there is one

    def __init__(self, lanes: Lanes, ledger: Ledger, meter: ActivationMeter, config: ActivationConfig) -> None:
        self.lanes = lanes
        self.ledger = ledger
        self.meter = meter
        self.pool = HostPool(lanes.device, ledger, PURPOSE, config.host_memory_bytes)
        self._stays_without_room = config.stays_without_room
        self.streams = ComputeStreams(lanes)
        self.lock = threading.RLock()  # held while items are handled: several threads may run forwards and backwards
        self._moving = False  # whether the holder of the lock is in the middle of a move
        self._torn = False  # whether a move was cut short: by Ctrl-C, or for lack of room
        self._guests: dict[int, Item] = {}  # items that were sent out, by their id, while anybody can ask for them
        self._lost: deque[HandleRef] = deque()  # the handles that autograd has let go of
        self._put_off: deque[Callable[[], None]] = deque()  # jobs that came in the middle of a move

    def begin(self) -> None:
        """Called when a forward begins."""
        self.settle()
        self.pool.consolidate()

    def guard(self, move: Callable[..., T], *args: Any) -> T:
        """Calls `move`, which handles items, under the lock. If it raises, `take_back` mends the state later."""
        with self.lock:
            self._moving = True
            try:
                return move(*args)
            except BaseException:
                self._torn = True
                raise
            finally:
                self._moving = False

    def between_moves(self, move: Callable[[], None]) -> None:
        """Calls `move` now, or later if another move is under way. For destructors, which the garbage collector may run
        in the middle of a move, or on a thread that it waits for."""
        self._put_off.append(move)
        if not on_headrace_thread() and self.lock.acquire(blocking=False):
            try:
                if not self._moving:
                    self.guard(self.take_back)
            finally:
                self.lock.release()

    # moves ------------------------------------------------------------------------------------------------------------
    def send_out(self, item: Item) -> None:
        """Submits the copy to the host, behind everything that compute was given until now."""
        if item.memory is None or item.sent:
            return
        slab = self._slab_for(item)
        if slab is None:
            return
        self._guests[id(item)] = item
        item.sent = True
        item.slab = slab
        item.leaving = self.lanes.copy(Lane.OFFLOAD, [(slab.memory[: item.nbytes], item.memory)], self.lanes.mark())
        self.ledger.add(Tier.DEVICE, PURPOSE, item.nbytes)
        self.meter.offloaded(item.leaving, item.name)

    def let_go(self, item: Item) -> None:
        """Makes compute wait for the copy to the host, then lets go of the device memory."""
        if item.leaving is None:
            return
        self._wait(item.leaving.done, Lane.OFFLOAD, item.name)
        self._drop(item)

    def send_for(self, item: Item, *, needed: bool) -> None:
        """Allocates device memory and submits the copy back. Without room, an item that is not `needed` yet stays."""
        if item.presence is not Presence.AWAY or not item.sent or not self._is_open(item, needed=needed):
            return
        with self.lanes.computing_on(item.stream):
            memory = torch.empty(item.nbytes, dtype=torch.uint8, device=self.lanes.device)
            item.arriving = self._copy_back(item, memory, self.lanes.mark())
        item.memory, item.returned = memory, True
        self.ledger.add(Tier.DEVICE, PURPOSE, item.nbytes)
        self.meter.onloaded(item.nbytes)

    def arrive(self, item: Item) -> None:
        """Makes compute wait for the copy back."""
        if item.arriving is not None:
            transfer = item.arriving
            self._wait(transfer.done, Lane.ONLOAD, item.name)
            item.arriving = None
            item.note_version()
            self.meter.arrived(transfer, item.name)

    def memory_of(self, item: Item) -> torch.Tensor:
        """The device bytes of an item that is there, for the stream that computes now."""
        if item.memory is None:
            raise RuntimeError(f"an activation of {item.nbytes} bytes is not on the device")
        if not item.returned or item.stream == self.streams.now():
            return item.memory
        return self.streams.copy_of(item.memory, item.stream)

    def put_back(self, item: Item) -> None:
        """Lets go of the device memory of an item that came back: its users hold it, and the host has the bytes."""
        if item.returned and item.memory is not None:
            self.arrive(item)
            self._drop(item)

    def _drop(self, item: Item) -> None:
        if item.goes is not None:
            item.goes(item)
        item.leaving = item.arriving = item.memory = None
        self.ledger.add(Tier.DEVICE, PURPOSE, -item.nbytes)

    def _wait(self, event: Event, lane: Lane, name: str) -> None:
        asked = self.lanes.tick()
        self.streams.wait(event)
        self.meter.waited(asked, self.lanes.tick(), lane, name)

    # the host's side, which the disk tier does in its own way ---------------------------------------------------------
    def _slab_for(self, item: Item) -> Slab | None:
        """Host memory for the copy out; None when there is no room and the item may stay on the device."""
        if self._stays_without_room and not self.pool.has_room(item.nbytes):
            return self.pool.try_take(item.nbytes)
        return self.pool.take(item.nbytes)

    def _is_open(self, item: Item, *, needed: bool) -> bool:
        """Whether the item can be copied back now."""
        return item.slab is not None

    def _copy_back(self, item: Item, memory: torch.Tensor, after: Event) -> Transfer | LateTransfer:
        """Submits the copy into `memory`, which may be written once the event `after` has happened."""
        if item.slab is None:
            raise RuntimeError("an activation that is away is not on the host")
        return self.lanes.copy(Lane.ONLOAD, [(memory, item.slab.memory[: item.nbytes])], after)

    def _give_up(self, item: Item) -> None:
        """Frees the host's copy: nobody needs it any more, and compute is ordered behind the copies that used it."""
        slab, item.slab = item.slab, None
        if slab is not None:
            self.pool.give_back(slab)

    # ends -------------------------------------------------------------------------------------------------------------
    def note_handle(self, item: Item, handle: object) -> HandleRef:
        """Notes a handle. When autograd lets go of it, on any thread at any time, the reference is only appended to
        `_lost`: Ctrl-C could silently end a Python function that ran then."""
        weak_item = weakref.ref(item)
        ref = HandleRef(handle, self._lost.append)
        ref.item = weak_item
        item.handles.add(ref)
        return ref

    def settle(self, wait: bool = False) -> None:
        """Takes back the memory of items that nobody can ask for any more, or that the disk has; with `wait`, waits for
        items that are on their way to disk. Raises DiskError when a write failed."""
        self.take_back()

    def take_back(self) -> None:
        """Takes back the memory of items that nobody can ask for any more."""
        if self._torn:
            self._mend()
        while self._put_off:
            self._put_off[0]()  # stays in the queue until it has been dealt with
            self._put_off.popleft()
        while self._lost:
            ref = self._lost[0]  # stays in the queue until it has been dealt with
            item = ref.item()
            if item is not None:
                item.handles.discard(ref)
                item.seen.discard(ref)
                if not item.handles:
                    self._forget(item)
            self._lost.popleft()

    def _forget(self, item: Item) -> None:
        """Frees all memory of an item. Compute is ordered behind its copies, so both ends may be reused."""
        self.let_go(item)
        self.put_back(item)
        self._give_up(item)
        self._guests.pop(id(item), None)
        item.memory, item.sent = None, False

    def _mend(self) -> None:
        """After a move was cut short: waits for all copies, and counts only what the items hold as held."""
        for lane in Lane:  # behind every copy that was submitted
            self.lanes.copy(lane, (), self.lanes.mark()).done.synchronize()
        self.pool.keep(self._slabs())
        here_bytes = sum(item.nbytes for item in self._guests.values() if item.memory is not None)
        self.ledger.add(Tier.DEVICE, PURPOSE, here_bytes - self.ledger.held_bytes(Tier.DEVICE, PURPOSE))
        self._torn = False

    def _slabs(self) -> Iterable[Slab]:
        """The slabs that are in use."""
        return [item.slab for item in self._guests.values() if item.slab is not None]
