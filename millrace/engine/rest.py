"""Where do a block's bytes rest while it is away? In an arena, or in an extent of a disk store."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from millrace.engine.fetching import Piece
from millrace.engine.slot import Layout
from millrace.memory.arena import Arena
from millrace.memory.disk import DiskStore

__all__ = ["DiskRest", "HostRest", "Rest", "RestFor", "Stored"]


class Rest(ABC):
    """The bytes of one block at rest, as user code may see them: through tensors, one for each parameter."""

    @abstractmethod
    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """Each parameter's place: in a storage of its own, or in one that it shares as it did before."""


class Stored(Rest):
    """Bytes on disk. The places are mapped files; what travels is read past the page cache."""

    @abstractmethod
    def pieces(self, chunk_bytes: int) -> Sequence[Piece]:
        """The reads that bring the whole block, each of `chunk_bytes` at most."""

    @abstractmethod
    def settle(self) -> None:
        """What was written through the places goes to the files, and their pages leave this process."""


RestFor = Callable[[str, Sequence[nn.Parameter], Sequence[Layout], int], Rest]  # name, ..., bytes of the block


class HostRest(Rest):
    """Bytes in an arena. `whole` is all of them, shape (nbytes,)."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self.whole = arena.tensor(0, nbytes)
        self._arena = arena

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, self._arena.tensor)


class DiskRest(Stored):
    """Bytes in an extent of a disk store. `spilled` is told how many bytes go there."""

    def __init__(self, store: DiskStore, name: str, nbytes: int, spilled: Callable[[int], None]) -> None:
        self._store = store
        self._extent = store.allocate(name, nbytes, "weights")
        self._spilled = spilled

    def places(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        return _carve(layouts, partial(self._store.mapping, self._extent))

    def pieces(self, chunk_bytes: int) -> Sequence[Piece]:
        whole = self._extent.nbytes
        return [self._piece(first, min(chunk_bytes, whole - first)) for first in range(0, whole, chunk_bytes)]

    def settle(self) -> None:
        self._spilled(self._extent.nbytes)
        self._store.to_direct(self._extent)

    def _piece(self, first: int, nbytes: int) -> Piece:
        return Piece(
            read=lambda chunk: self._store.read(self._extent, chunk[:nbytes], first),
            nbytes=nbytes,
            parts=((0, nbytes, first),),
        )


def _carve(layouts: Sequence[Layout], tensor: Callable[[int, int], torch.Tensor]) -> list[torch.Tensor]:
    """Views of `tensor(first byte, bytes)`, one storage for each region."""
    regions = {region: tensor(region[0], region[1] - region[0]) for region in {layout.region for layout in layouts}}
    return [layout.view(regions[layout.region], first_byte=layout.region[0]) for layout in layouts]
