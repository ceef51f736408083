"""How does one copy of something serve all ranks of a node? Each maps its memory twice: for all, and for itself.

Headrace writes to the mapping that is common to all ranks, and copies from it to devices. User code sees the rank's own
mapping: it reads the same memory, but its writes (`p.data.mul_(2)`, on every rank) stay with that rank, in copies of
the written pages, until these are published or dropped. See docs/design/nodes.md.
"""

import os
import weakref

import torch

from headrace.memory.arena import whole_pages
from headrace.memory.disk import DiskStore, Extent, Mapping
from headrace.memory.ledger import Ledger
from headrace.memory.locking import lock
from headrace.runtime.node import Node

_SLAB_BYTES = 64 << 20
_SMALL_BYTES = 4 << 20  # up to this, an arena is part of a slab: a process may have only a few thousand descriptors


class SharedArena:
    """`nbytes` of zeros that the ranks of `node` share, rounded up to whole pages, page-locked for `device`.

    Each rank books its part in `ledger`. `by_ranks`: each rank copies an equal part, in the order of ranks. All ranks
    make the same arenas in the same order. Raises BudgetError, before anything is taken, if the part exceeds the
    ledger's host budget; OSError if the system has no memory.
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
        """Does nothing: the contents of an arena's pages are nowhere else."""


class SharedExtent:
    """An extent of a file that a node's ranks share, as memory. All ranks make the same ones, in the same order."""

    def __init__(self, store: DiskStore, extent: Extent) -> None:
        self._store, self.extent = store, extent
        self._common = store.mapping(extent)  # keeps it mapped when the store is closed

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """As `SharedArena.tensor`."""
        return self._store.mapping(self.extent, offset, nbytes, dtype)

    def own_view(self) -> Mapping:
        """As `SharedArena.own_view`."""
        return self._store.own_mapping(self.extent)

    def forget(self) -> None:
        """Lets go of pages that were touched: they no longer count as memory of this process."""
        self._store.forget(self.extent)


Common = SharedArena | SharedExtent  # bytes of which a node has one copy


class _Descriptor:
    """A descriptor of shared memory, `nbytes` at first. It is closed with its last user, or by `close_descriptors`."""

    def __init__(self, node: Node, nbytes: int) -> None:
        self.number = node.share(nbytes)
        self.used_bytes = nbytes
        self.close = weakref.finalize(self, os.close, self.number)
        _descriptors.setdefault(node, weakref.WeakSet()).add(self)


def close_descriptors(node: Node) -> None:
    """Called when this rank will make no more arenas of the node, nor views of them. Present ones stay valid."""
    _slabs.pop(node, None)
    for descriptor in _descriptors.pop(node, ()):
        descriptor.close()


# For each node, the descriptor that has room: many small arenas share its memory.
_slabs: "weakref.WeakKeyDictionary[Node, _Descriptor]" = weakref.WeakKeyDictionary()
_descriptors: "weakref.WeakKeyDictionary[Node, weakref.WeakSet[_Descriptor]]" = weakref.WeakKeyDictionary()


def _place(node: Node, nbytes: int) -> tuple[_Descriptor, int]:
    """Where a new arena lies: in the same place on all ranks, as they make the same arenas in the same order."""
    slab = _slabs.get(node)
    if nbytes > _SMALL_BYTES:
        return _Descriptor(node, nbytes), 0
    if slab is None or slab.used_bytes + nbytes > _SLAB_BYTES:
        _slabs[node] = slab = _Descriptor(node, nbytes)
        return slab, 0
    node.grow(slab.number, slab.used_bytes, nbytes)
    slab.used_bytes += nbytes
    return slab, slab.used_bytes - nbytes
