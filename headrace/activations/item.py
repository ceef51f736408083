"""Where is one piece of device memory that autograd keeps? On the device, on its way, or on the host."""

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.memory.disk import Extent
from headrace.memory.pool import Slab
from headrace.runtime.autograd import WeakTensor, address_of, storage_use_count
from headrace.runtime.lanes import LateTransfer, Transfer


class Presence(Enum):
    """Where an item's bytes are."""

    HERE = "on the device"  # never sent out, or back again
    LEAVING = "on the device, and being copied to the host"
    AWAY = "on the host, or on disk"
    ARRIVING = "on its way to the device"


class HandleRef(weakref.ref[Any]):
    """A weak reference to a handle on an item, with that item; queued when the handle ends."""

    __slots__ = ("item",)

    item: "weakref.ref[Item]"


class Item:
    """A range of bytes of one storage, saved by autograd once or several times.

    Where the bytes are follows from the attributes, so an interrupt between two assignments leaves a valid `presence`.
    """

    def __init__(
        self,
        trace: Any,
        index: int,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        root: torch.Tensor,
        together: "list[weakref.ref[Item]]",
        stream: Any,
        name: str,
    ) -> None:
        self.trace = trace  # the `ForwardTrace` of the forward that saved it, and of its backward
        self.index = index  # in the order of saving
        self.nbytes = nbytes
        self.stream = stream  # the stream on which it was saved, and is used
        self.name = name  # of the module that saved it
        self.start = start  # bytes from the beginning of the storage it was saved from
        self.memory: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
            storage, start, (nbytes,), (1,)
        )  # its device bytes, of shape (nbytes,)
        # As long as these references live, no other storage or tensor gets the address of `storage` or `root`.
        self.identity = StorageWeakRef(storage), WeakTensor(root)
        self._together = together  # the known items of this storage
        together.append(weakref.ref(self))
        self.slab: Slab | None = None  # its host memory
        self.extent: Extent | None = None  # its place on disk
        self.sent = False  # there is, or will be, a copy outside of the device
        self.leaving: Transfer | None = None  # the copy out, until compute has waited for it
        self.arriving: Transfer | LateTransfer | None = None  # the copy in, until compute has waited for it
        self.returned = False  # `memory` is a storage of its own, filled from the host
        self.handles: set[HandleRef] = (
            set()
        )  # of the saved tensors that are part of it and that autograd still has; without any, the item ends
        self.round = -1  # the backward that used it last
        self.seen: set[HandleRef] = set()  # the handles that this backward has used
        self.use: Any = None  # the `UseRecord` of its first recorded use
        self.goes: Callable[[Item], None] | None = None  # called right before its device memory goes
        self.note_version()

    @property
    def presence(self) -> Presence:
        if self.memory is None:
            return Presence.AWAY
        if self.arriving is not None:
            return Presence.ARRIVING
        return Presence.HERE if self.leaving is None else Presence.LEAVING

    def note_version(self) -> None:
        """Notes the version of the device memory: the next use raises an error if somebody has written to it since."""
        self.version = 0 if self.memory is None else self.memory._version

    @property
    def is_alone(self) -> bool:
        """Whether only this item, and items of other parts of the same storage, hold the device memory, which is then
        freed once all of them have let go of it."""
        if self.memory is None:
            return False
        others = _references(self.memory) - _SOLE_REFERENCES
        if others > 0 and not self.returned and others < len(self._together):
            self._together[:] = [ref for ref in self._together if (item := ref()) is not None and item._holds_storage]
            others -= len(self._together) - 1
        return others <= 0

    @property
    def _holds_storage(self) -> bool:
        """Whether the item still holds the storage that it was saved from."""
        return self.memory is not None and not self.returned


def _references(memory: torch.Tensor) -> int:
    return int(storage_use_count(address_of(memory.untyped_storage())))


_SOLE_REFERENCES = _references(torch.empty(1, device="cpu"))
