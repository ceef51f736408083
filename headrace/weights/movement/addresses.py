"""Whose memory is that? Buffers of blocks by the addresses at which they lie: asked for all that autograd saves."""

from bisect import bisect_right
from collections.abc import Iterable, ValuesView

import torch

from headrace.runtime.autograd import address_of, has_storage
from headrace.weights.movement.block import Block

__all__ = ["Addresses"]


class Addresses:
    """The blocks that have a buffer on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_storage: dict[int, Block] = {}
        self._begins: list[int] = []  # of buffers, ascending; where each ends, and whose it is
        self._ends: list[int] = []
        self._in_order: list[Block] = []

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block in whose buffer `tensor` lies; None for any other tensor."""
        if not has_storage(tensor):  # sparse, or of a function transform
            return None
        address = tensor.data_ptr()
        if not address:
            return self._by_storage.get(address_of(tensor.untyped_storage()))
        index = bisect_right(self._begins, address) - 1  # quicker than by its storage
        if index < 0 or address >= self._ends[index] or tensor.device != self._device:
            return None
        return self._in_order[index]

    def blocks(self) -> ValuesView[Block]:
        """All of them."""
        return self._by_storage.values()

    def has(self, block: Block) -> bool:
        """Whether the block is known by the buffer that it has."""
        return block.buffer is not None and self._by_storage.get(_storage_of(block.buffer)) is block

    def add(self, block: Block, buffer: torch.Tensor) -> None:
        """The buffer is the block's from now on."""
        self._by_storage[_storage_of(buffer)] = block
        if buffer.nbytes:
            begin = buffer.data_ptr()
            index = bisect_right(self._begins, begin)
            self._in_order.insert(index, block)
            self._ends.insert(index, begin + buffer.nbytes)
            self._begins.insert(index, begin)

    def remove(self, block: Block, buffer: torch.Tensor) -> None:
        """The inverse of `add`, also where that was interrupted."""
        self._by_storage.pop(_storage_of(buffer), None)
        if block in self._in_order:
            index = self._in_order.index(block)
            del self._in_order[index], self._ends[index], self._begins[index]

    def reset(self, blocks: Iterable[Block]) -> None:
        """Exactly these have a buffer, whatever was known."""
        self._by_storage, self._begins, self._ends, self._in_order = {}, [], [], []
        for block in blocks:
            if block.buffer is not None:
                self.add(block, block.buffer)


def _storage_of(buffer: torch.Tensor) -> int:
    return address_of(buffer.untyped_storage())
