"""How do the caches of a model's layers come to the device? Two layers ahead of their use, in room that plans leave.

Between its uses, a layer's tensors rest in arenas on the host. The order of use is that of the last time. What a layer
appends is copied back alone.
"""

import os
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError, StateError
from headrace.memory.arena import Arena, aligned, whole_pages
from headrace.memory.buffers import plain_tensors
from headrace.memory.disk import TensorsOnDisk
from headrace.memory.ledger import Tier
from headrace.planning import LAYERS_ON_DEVICE, room_on_device, tokens_with_room
from headrace.runtime.lanes import Copy, Event, LateTransfer, Transfer
from headrace.weights.meter import Meter
from headrace.weights.movement.cache_copies import PURPOSE, CacheCopies
from headrace.weights.movement.residency import Residency

Tensors = Mapping[str, torch.Tensor]
Written = tuple[int, ...]  # how often each of a layer's tensors has been written to on the host


class _Rest:
    """Where one tensor rests. `shown` is the tensor on the host. One that grows lies there token after token (tokens
    are its dimension -2), so that new ones follow in memory; the others are contiguous.
    """

    def __init__(self, like: torch.Tensor, memory: torch.Tensor, *, grows: bool) -> None:
        self.memory = memory  # shape (elements,)
        self.grows = grows
        self.show(like)

    def show(self, like: torch.Tensor) -> None:
        """Makes `shown` of the shape of `like`, in the same memory."""
        laid = self.lay(like)
        self.laid = self.memory[: laid.numel()].view(laid.shape)
        self.shown = self.laid.movedim(0, -2) if self.grows else self.laid

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its dimensions in the order in which they lie here."""
        return tensor.movedim(-2, 0) if self.grows else tensor

    def has_room(self, like: torch.Tensor) -> bool:
        """Whether a tensor of that kind and shape fits into the memory."""
        return like.dtype == self.memory.dtype and like.numel() <= self.memory.numel()

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """Whether it is a view of the memory, as of the last tokens after `crop` of a sliding window."""
        return tensor.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def is_a_part(self, tensor: torch.Tensor) -> bool:
        """Whether it shows the first tokens here, as after `crop`."""
        same = self.grows and tensor.data_ptr() == self.memory.data_ptr() and tensor.stride() == self.shown.stride()
        return same and tensor.shape[:-2] == self.shown.shape[:-2] and tensor.shape[-1] == self.shown.shape[-1]


class _Stay:
    """The tensors of one layer on the device: `arrival` is their copy, `buffer` their memory."""

    def __init__(self, layer: "CachedLayer", buffer: torch.Tensor) -> None:
        self.layer = weakref.ref(layer)
        self.buffer = buffer
        self.tensors: dict[str, torch.Tensor] = {}
        self.arrival: Transfer | LateTransfer | None = None
        self.written: Written | None = None  # what was on the host when it was read; None before
        self.is_used = False

    def note_read(self, rests: Iterable[torch.Tensor]) -> None:
        """Called when they are about to be read for the copy; for one from disk, on the thread that reads."""
        self.written = _written(rests)


class Caches:
    """The caches of one offloaded model."""

    def __init__(self, residency: Residency, meter: Meter, disk: str | os.PathLike[str] | None) -> None:
        self.disk = disk
        self._files: TensorsOnDisk | None = None
        self._residency = residency
        self._lanes = residency.pace.lanes
        self._meter = meter
        self._stays: list[_Stay] = []
        self.copies = CacheCopies(residency.pace, residency.ledger, meter)
        self._last: weakref.ref[CachedLayer] | None = None  # the layer that was used last
        self._largest: weakref.ref[CachedLayer] | None = None
        self._is_in_use = False  # whether there ever was a tensor of a layer
        self.is_closed = False
        residency.caches_give_way = self.give_way
        residency.caches_mend = self._mend
        residency.caches_planned_bytes = self._planned_bytes

    def close(self) -> None:
        """The host waits for all copies; from now on no layer can be used."""
        self.is_closed = True
        self.give_way()
        self.copies.close()

    def settle(self) -> None:
        """The host waits for all copies, and lets go of what was kept for them."""
        self._end_stays(but_coming=True)
        self.copies.settle()

    def _mend(self) -> None:
        """Called after a pass was broken off: all layers leave the device, once nothing is being copied any more."""
        if not self._is_in_use:
            return
        self.copies.mend()
        while self._stays:
            stay = self._stays.pop()
            if (layer := stay.layer()) is not None:
                layer.stay = None
            self._residency.free(stay.buffer)

    def _planned_bytes(self) -> int:
        """The bytes that plans leave for layers."""
        layer = None if self._largest is None else self._largest()
        return 0 if layer is None else room_on_device(layer.nbytes)

    def give_way(self) -> None:
        """Takes all layers off the device, also those that came ahead."""
        self._end_stays(but_coming=False)

    def _end_stays(self, *, but_coming: bool) -> None:
        """`but_coming`: not of layers that came ahead and were not used yet, unless nobody has them any more."""
        for stay in list(self._stays):
            if not but_coming or stay.is_used or stay.layer() is None:
                self.end(stay)

    def end(self, stay: _Stay) -> None:
        """Lets go of a layer's device memory. Compute waits for the copy into it."""
        self._residency.changing += 1  # Ctrl-C may come before it is lowered, also between passes
        layer = stay.layer()
        if layer is not None and layer.stay is stay:
            layer.stay = None
        self._arrive(stay)
        self._stays.remove(stay)
        stay.tensors.clear()
        buffer, stay.buffer = stay.buffer, stay.buffer[:0]
        self._residency.free(buffer)
        self._residency.changing -= 1

    def _arrive(self, stay: _Stay) -> None:
        arrival, stay.arrival = stay.arrival, None
        if arrival is not None:
            self._lanes.wait(arrival.done)
            self._meter.arrived(arrival, PURPOSE)

    def bring(self, layer: "CachedLayer") -> dict[str, torch.Tensor]:
        """The layer's tensors on the device, for which compute waits. The layers that follow are sent for."""
        last = None if self._last is None else self._last()
        if last is not None and last is not layer:
            last.follower = weakref.ref(layer)
        self._last = weakref.ref(layer)
        largest = None if self._largest is None else self._largest()
        if largest is None or layer.nbytes > largest.nbytes:
            self._largest = weakref.ref(layer)
        self._end_stays(but_coming=True)
        stay = layer.stay or self._send_for(layer)
        stay.is_used = True
        self._send_for_next(layer)
        self._arrive(stay)
        return dict(stay.tensors)

    def _send_for_next(self, layer: "CachedLayer") -> None:
        """Sends for the layers that follow, as far as there is room."""
        following: CachedLayer | None = layer
        for _ in range(LAYERS_ON_DEVICE - 1):
            following = None if following is None or following.follower is None else following.follower()
            if following is None or self._residency.is_paused():
                return
            if following.stay is None:
                if not self._residency.fits(following):
                    return
                self._send_for(following)

    def _send_for(self, layer: "CachedLayer") -> _Stay:
        """Submits the copies of a layer to the device."""
        nbytes = layer.nbytes
        if not self._residency.fits(layer):
            self.give_way()
        free_bytes = self._residency.clear(nbytes)
        if free_bytes < nbytes:
            raise BudgetError(
                f"a layer of the cache needs {format_bytes(nbytes)}, and device_memory leaves"
                f" {format_bytes(max(0, free_bytes))} beside the blocks in use; raise it by"
                f" {format_bytes(nbytes - free_bytes, at_least=True)}, or use a smaller batch"
            )
        with plain_tensors():
            stay = _Stay(layer, self._residency.allot(nbytes))
            self._stays.append(stay)
            copies: list[Copy] = []
            for name, offset, rest in layer.placed():
                laid = stay.buffer[offset : offset + rest.laid.nbytes].view(rest.laid.dtype).view(rest.laid.shape)
                stay.tensors[name] = laid.movedim(0, -2) if rest.grows else laid
                copies.append((laid, rest.laid))
            if not copies:
                return stay
            if layer.left is not None and not layer.on_disk:
                self._lanes.wait(layer.left)
            stay.arrival, layer.came = self.copies.bring(copies, nbytes, stay.note_read, from_disk=layer.on_disk)
        layer.stay = stay  # only now: it has what it should
        self._meter.cache_onloaded(nbytes)
        return stay

    def rest(self, like: torch.Tensor, *, grows: bool, on_disk: bool) -> _Rest:
        """A place on the host or on disk for a tensor, with room to grow if it `grows`."""
        self._is_in_use = True
        count = like.numel()
        if grows:
            tokens = like.shape[-2]
            count = count // tokens * tokens_with_room(tokens)
        nbytes = count * like.itemsize
        ledger = self._residency.ledger
        if on_disk and self.disk is not None:
            self._files = self._files or TensorsOnDisk(self.disk)
            mapping = self._files.memory(nbytes, "a cache")
            ledger.book(mapping.memory, Tier.DISK, PURPOSE, nbytes)
            return _Rest(like, mapping.tensor(0, nbytes, like.dtype), grows=grows)
        if not ledger.fits(whole_pages(nbytes)):
            self.copies.settle()  # a cache that nobody has any more may lie there
        memory = Arena(nbytes, self._lanes.device, ledger, PURPOSE).tensor(0, nbytes, like.dtype)
        return _Rest(like, memory, grows=grows)


class CachedLayer:
    """The cache of one layer. `appends`: new tokens come behind those that are there, in tensors of three or more
    dimensions, and compute never gets such a tensor itself, only what the layer makes of it.
    """

    def __init__(self, caches: "weakref.ref[Caches]", *, appends: bool, on_disk: bool) -> None:
        self._caches_ref = caches
        self.on_disk = on_disk
        self._appends = appends
        self.follower: weakref.ref[CachedLayer] | None = None  # the layer that was used after this one
        self.stay: _Stay | None = None
        self.left: Event | None = None  # the end of the last copy to the host
        self.came: Event | None = None  # the end of the last copy to the device
        self._rests: dict[str, _Rest] = {}

    def __deepcopy__(self, memo: object) -> "CachedLayer":
        # The copied tensors move in when they are used.
        return CachedLayer(self._caches_ref, appends=self._appends, on_disk=self.on_disk)

    def rests_with(self, caches: "weakref.ref[Caches]", *, on_disk: bool) -> bool:
        """Whether it is one of these caches, in that tier."""
        return self._caches_ref == caches and self.on_disk == on_disk

    @property
    def _caches(self) -> Caches:
        caches = self._caches_ref()
        if caches is None or caches.is_closed:
            raise StateError(
                "the model of this cache is offloaded no more; begin a new cache, or call remove() after the last use"
            )
        return caches

    @property
    def nbytes(self) -> int:
        """Bytes of the layer on the device."""
        return sum(aligned(rest.laid.nbytes) for rest in self._rests.values())

    def placed(self) -> Iterator[tuple[str, int, _Rest]]:
        """Each tensor's name, its offset in a buffer on the device, and where it rests."""
        offset = 0
        for name, rest in self._rests.items():
            yield name, offset, rest
            offset += aligned(rest.laid.nbytes)

    def wait_for_left(self) -> None:
        """The host waits until all is there that left the device."""
        if self.left is not None:
            self.left.synchronize()
            self.left = None

    def wait_for_copies(self) -> None:
        """Called before the user gets a tensor, to read it or write to it: the host waits for all copies."""
        self.wait_for_left()
        came, self.came = self.came, None
        if came is not None:
            came.synchronize()

    def settle(self) -> None:
        """Called before the host writes to the tensors: it waits for all copies; those on the device are dropped."""
        self.wait_for_copies()
        self._end_stay()

    def come(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Those of the layer's tensors that rest on the host, on the device."""
        self.adopt(tensors)
        return self._caches.bring(self)

    def adopt(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Called when tensors may have been replaced or written to on the host: moves new ones to arenas, and returns
        what is to be shown for them. Tensors on an accelerator are left alone.
        """
        shown: dict[str, torch.Tensor] = {}
        stay = self.stay
        if stay is not None and stay.written not in (None, _written(rest.laid for rest in self._rests.values())):
            self.settle()  # the user wrote after it was read
        self._forget(self._rests.keys() - tensors.keys())
        for name, tensor in tensors.items():
            rest = self._rests.get(name)
            if tensor.device.type != "cpu":
                self._forget({name} & self._rests.keys())
            elif rest is None or tensor is not rest.shown:
                self.settle()
                with plain_tensors(), torch.no_grad():
                    if rest is not None and rest.is_a_part(tensor):
                        rest.show(tensor)
                    else:
                        rest = self._place(name, tensor)
                        rest.shown.copy_(tensor.clone() if rest.shares_memory(tensor) else tensor)
                shown[name] = rest.shown
        return shown

    def go(self, came: Tensors, tensors: Tensors, tokens: int) -> dict[str, torch.Tensor]:
        """Called when the layer was given so many tokens: sends out what is new. Returns what is shown on the host."""
        copies: list[Copy] = []
        self._forget(self._rests.keys() - tensors.keys())
        with plain_tensors(), torch.no_grad():
            for name, tensor in tensors.items():
                rest, old = self._rests.get(name), came.get(name)
                if rest is None or tensor is not rest.shown:
                    unchanged = self._appends and tensor is old
                    if rest is None or not (unchanged or (self._grew(old, tensor, tokens) and rest.has_room(tensor))):
                        rest = self._place(name, tensor)
                        copies.append((rest.laid, rest.lay(tensor).contiguous()))
                    elif not unchanged:
                        rest.show(tensor)
                        new = tensor.narrow(-2, tensor.shape[-2] - tokens, tokens)
                        copies.append((rest.laid[rest.laid.shape[0] - tokens :], rest.lay(new).contiguous()))
        if self._appends:
            self._end_stay()
        self.left = self._caches.copies.send_out(copies, to_disk=self.on_disk) or self.left
        return {name: self._rests[name].shown for name in tensors}

    def _grew(self, old: torch.Tensor | None, tensor: torch.Tensor, tokens: int) -> bool:
        """Whether the tensor is the old one, with new tokens behind."""
        if not self._appends or old is None or tensor.dim() < 3 or old.dim() != tensor.dim():
            return False
        return (*old.shape[:-2], old.shape[-2] + tokens, old.shape[-1]) == tensor.shape

    def _place(self, name: str, tensor: torch.Tensor) -> _Rest:
        """Where the tensor rests from now on: in the memory that it had, if it fits."""
        grows = self._appends and tensor.dim() > 2
        rest = self._rests.get(name)
        if rest is None or rest.grows != grows or not rest.has_room(tensor):
            self._rests[name] = rest = self._caches.rest(tensor, grows=grows, on_disk=self.on_disk)
        else:
            rest.show(tensor)
        return rest

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            self._end_stay()
            del self._rests[name]

    def _end_stay(self) -> None:
        if self.stay is not None:
            self._caches.end(self.stay)


def _written(tensors: Iterable[torch.Tensor]) -> Written:
    """How often each of these tensors has been written to."""
    return tuple(tensor._version for tensor in tensors)
