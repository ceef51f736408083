"""What does a block on disk have beside its bytes? A packed copy, once it is clear that it comes again and again.

The plain bytes stay where homes are mapped, and are read until the packed ones are on disk. A piece is packed in the
chunk of the ring to which a fetch has read it, after the chunk was copied to the device. See docs/design/packed.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from headrace.errors import DiskError
from headrace.memory.disk import DiskStore, Ended, Extent, Request, disk_pages
from headrace.memory.packed import pack_into
from headrace.planning.cost.packing import LEFT_FREE_BYTES
from headrace.runtime.lanes import Event
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.rest.fetching import Fetching
from headrace.weights.rest.reads import DiskRead

# Writing 0.75 of the bytes costs as much as reading 0.75 of them saves in three fetches. So a block that is packed
# after three fetches costs at most twice the best choice, however often it comes.
_FETCHES_BEFORE = 3


@dataclass
class _PackedRead:
    """The packed copy of one piece."""

    extent: Extent
    of: object = None  # identifies the contents that are there, or are being written
    nbytes: int = 0  # whole pages
    write: Request | None = None

    @property
    def is_there(self) -> bool:
        return self.write is not None and self.write.query() and self.write.error is None


class PackedCopy:
    """The packed copy of one block, piece by piece. It takes space of `store` for good; without a store there is none.

    `spilled` is told how many bytes were written.
    """

    def __init__(self, name: str, store: Callable[[], DiskStore | None], spilled: Callable[[int], None]) -> None:
        self._name, self._open, self._spilled = name, store, spilled
        self._of: tuple[object, ...] = ()
        self._fetches = 0
        self._parts: dict[int, _PackedRead] = {}
        self._stay_plain: set[int] = set()
        self.saved_bytes = 0  # bytes that the last fetch did not have to read

    def pieces(
        self, plain: Sequence[DiskRead], params: Sequence[ManagedParam], by: Fetching, *of: object
    ) -> Sequence[DiskRead]:
        """The pieces to read in the place of `plain`. `of` identifies the block's contents: others are packed anew."""
        if of != self._of:
            self._of, self._fetches, self._stay_plain = of, 0, set()
        self._fetches += 1
        self.saved_bytes = 0
        if self._fetches <= _FETCHES_BEFORE or not is_frozen(params) or not by.packing_pays():
            return plain
        store = self._open()
        if store is None:
            return plain
        pieces = [self._piece(store, index, piece) for index, piece in enumerate(plain)]
        self.saved_bytes = sum(piece.plain_bytes - piece.nbytes for piece in pieces if piece.plain_bytes)
        return pieces

    def _piece(self, store: DiskStore, index: int, plain: DiskRead) -> DiskRead:
        part = self._parts.get(index)
        is_ours = part is not None and part.of is self._of
        if part is not None and is_ours and part.is_there:
            extent, nbytes = part.extent, part.nbytes
            return DiskRead(
                read=lambda chunk: store.read(extent, chunk[len(chunk) - nbytes :]),
                nbytes=nbytes,
                ranges=plain.ranges,
                plain_bytes=plain.nbytes,
            )
        if is_ours or index in self._stay_plain:
            return plain
        # Packed in its chunk: so it has to be read into one, not into the target.
        return replace(plain, keep=partial(self._keep, store, index, plain.nbytes, self._of), read_into=lambda *_: None)

    def _keep(self, store: DiskStore, index: int, nbytes: int, of: object, chunk: torch.Tensor) -> Event | None:
        """Packs a piece in `chunk` and writes it, on Fetching's second thread. The chunk is free after the event."""
        if of is not self._of:
            return None
        part = self._parts.get(index)
        packed_bytes = disk_pages(pack_into(chunk[:nbytes], chunk[:nbytes]))
        too_large = part is not None and packed_bytes > part.extent.capacity_bytes
        if not packed_bytes or packed_bytes >= nbytes or too_large:
            self._stay_plain.add(index)
            return None
        try:
            if part is None:
                store.check_free(LEFT_FREE_BYTES + nbytes)
                part = _PackedRead(store.allocate(f"{self._name} (packed)", packed_bytes, "weights"))
            write = store.write(part.extent, chunk[:packed_bytes])
        except DiskError:  # no room: the plain piece is read as before
            self._stay_plain.add(index)
            return None
        self._parts[index] = _PackedRead(part.extent, of, packed_bytes, write)
        self._spilled(packed_bytes)
        return Ended(write)


def is_frozen(params: Sequence[ManagedParam]) -> bool:
    """Whether the parameters are not trained, and most of their bytes are bfloat16."""
    half = sum(param.layout.nbytes for param in params if param.layout.dtype is torch.bfloat16)
    trained = any(param.home.requires_grad for param in params)
    return not trained and 2 * half > sum(param.layout.nbytes for param in params)
