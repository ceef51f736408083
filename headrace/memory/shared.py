"""How does one copy of something serve all ranks of a node? Each maps its memory twice: for all, and for itself.

What headrace writes goes into the mapping that is common to all ranks, and so do copies to devices. What user code sees
is a view of the rank's own: it reads the same memory, and what it writes (`p.data.mul_(2)`, on every rank) stays with
that rank, in copies of the pages that were written, until it is published or dropped. See docs/design/nodes.md.
"""

import os
import weakref
from dataclasses import dataclass

import torch

from headrace.memory.arena import whole_pages
from headrace.memory.disk import DiskStore, Extent, Mapping
from headrace.memory.ledger import Ledger
from headrace.memory.locking import lock
from headrace.runtime.node import Node

__all__ = ["Common", "SharedArena", "SharedExtent", "close_descriptors"]

_SLAB_BYTES = 64 << 20
_SMALL_BYTES = 4 << 20  # of an arena that is part of a slab: a process may have some thousand descriptors only


class SharedArena:
    """`nbytes` of zeros that the ranks of `node` share, rounded up to whole pages, page-locked for `device`.

    Each rank books its part in `ledger`. `by_ranks`: each copies an equal part, in order. To be made by all ranks, in
    the same order. Raises BudgetError, before anything is taken, when the part is over the ledger's host budget,
    OSError where the system has no memory.
    """

    def __init__(
        self,
        node: Node,
        nbytes: int,
        device: torch.device,
        ledger: Ledger,
        purpose: str,
        *,
        by_ranks: bool = False,
    ) -> None:
        self.nbytes = whole_pages(nbytes)
        part = node.part(self.nbytes)
        booked_bytes = part.stop - part.start
        ledger.check_host(booked_bytes, purpose)
        self._descriptor, self._offset = _place(node, self.nbytes)
        self._common = Mapping(self._descriptor.number, self._offset, self.nbytes, shared=True)
        address = self._common.address
        node.spread.place(address, self.nbytes, by_ranks=by_ranks)  # before locking touches it
        unlock = lock(self._common.memory, address, self.nbytes, booked_bytes, device, ledger, purpose)
        self._common.before_unmap(unlock)
        self.pinned = unlock is not None

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Bytes `offset` to `offset + nbytes` as all ranks see them: shape (elements,), with a storage of its own."""
        return self._common.tensor(offset, nbytes, dtype)

    def own_view(self) -> Mapping:
        """The same bytes, as user code of this rank sees them: what it writes there stays its own."""
        return Mapping(self._descriptor.number, self._offset, self.nbytes, shared=False)

    def forget(self) -> None:
        """Nothing: it is memory."""


class SharedExtent:
    """An extent of a store whose file the ranks of a node share, as memory. To be made by all ranks, as SharedArena."""

    def __init__(self, store: DiskStore, extent: Extent) -> None:
        self._store, self.extent = store, extent
        self._common = store.mapping(extent)  # which keeps it mapped when the store is closed

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """As of a SharedArena."""
        return self._store.mapping(self.extent, offset, nbytes).view(dtype).detach()  # a view would keep its base

    def own_view(self) -> Mapping:
        """As of a SharedArena."""
        return self._store.own_mapping(self.extent)

    def forget(self) -> None:
        """What was touched counts no more as memory of this process."""
        self._store.forget(self.extent)


Common = SharedArena | SharedExtent  # bytes of which a node has one copy


class _Descriptor:
    """Closed with its last user, or when nothing of the node's memory is mapped any more."""

    def __init__(self, node: Node, number: int) -> None:
        self.number = number
        self.close = weakref.finalize(self, os.close, number)
        _descriptors.setdefault(node, weakref.WeakSet()).add(self)


def close_descriptors(node: Node) -> None:
    """No arena of the node's memory is made any more on this rank, and no view of one; those that there are stay."""
    _slabs.pop(node, None)
    for descriptor in _descriptors.pop(node, ()):
        descriptor.close()


@dataclass
class _Slab:
    """Memory of one descriptor, for many small arenas."""

    descriptor: _Descriptor
    used_bytes: int


_slabs: "weakref.WeakKeyDictionary[Node, _Slab]" = weakref.WeakKeyDictionary()  # that have room
_descriptors: "weakref.WeakKeyDictionary[Node, weakref.WeakSet[_Descriptor]]" = weakref.WeakKeyDictionary()


def _place(node: Node, nbytes: int) -> tuple[_Descriptor, int]:
    """Where an arena lies: on all ranks the same, as they make the same ones in the same order."""
    slab = _slabs.get(node)
    if nbytes > _SMALL_BYTES:
        return _Descriptor(node, node.share(nbytes)), 0
    if slab is None or slab.used_bytes + nbytes > _SLAB_BYTES:
        _slabs[node] = slab = _Slab(_Descriptor(node, node.share(nbytes)), 0)
    else:
        node.grow(slab.descriptor.number, slab.used_bytes, nbytes)
    offset = slab.used_bytes
    slab.used_bytes += nbytes
    return slab.descriptor, offset
