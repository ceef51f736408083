"""Whose memory is that? Buffers of blocks by their addresses, looked up for every tensor that autograd saves."""

import math
from bisect import bisect_right
from collections.abc import Iterable, KeysView

import torch

from headrace.runtime.autograd import address_of, has_storage
from headrace.weights.movement.block import Block


class Addresses:
    """The blocks that have a buffer on one device, by its address."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Block, torch.Tensor] = {}
        # For each buffer, its begin (ascending), end and block: in one list, which Ctrl-C cannot leave half changed.
        self._in_order: list[tuple[int, int, Block]] = []
        self.first, self.last = 0, -1  # any tensor in a buffer, unless it is empty, lies between these

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block in whose buffer `tensor` lies; None for any other tensor."""
        if not has_storage(tensor):
            return None
        address = tensor.data_ptr()
        if not address:
            return self._block_of_empty(tensor)
        index = bisect_right(self._in_order, (address, math.inf)) - 1  # quicker than a search by storage
        if index < 0:
            return None
        _, end, block = self._in_order[index]
        return block if address < end and tensor.device == self._device else None

    def _block_of_empty(self, tensor: torch.Tensor) -> Block | None:
        storage = _storage_of(tensor)
        return next((block for block, buffer in self._buffers.items() if _storage_of(buffer) == storage), None)

    def blocks(self) -> KeysView[Block]:
        """All blocks that have a buffer."""
        return self._buffers.keys()

    def has(self, block: Block) -> bool:
        """Whether the block is known with the buffer that it has now."""
        return block.buffer is not None and self._buffers.get(block) is block.buffer

    def add(self, block: Block, buffer: torch.Tensor) -> None:
        """Notes that the buffer is the block's."""
        self._buffers[block] = buffer
        if buffer.nbytes:
            begin = buffer.data_ptr()
            index = bisect_right(self._in_order, (begin, math.inf))
            self._in_order.insert(index, (begin, begin + buffer.nbytes, block))
            self.first, self.last = self._in_order[0][0], self._in_order[-1][1]

    def remove(self, block: Block) -> None:
        """The inverse of `add`, also where `add` was interrupted."""
        buffer = self._buffers.pop(block, None)
        if buffer is not None and buffer.nbytes:
            index = bisect_right(self._in_order, (buffer.data_ptr(), math.inf)) - 1
            if index >= 0 and self._in_order[index][2] is block:
                del self._in_order[index]

    def reset(self, blocks: Iterable[Block]) -> None:
        """Notes the buffers of `blocks` anew, and forgets all others."""
        self._buffers, self._in_order = {}, []
        for block in blocks:
            if block.buffer is not None:
                self.add(block, block.buffer)


def _storage_of(tensor: torch.Tensor) -> int:
    return address_of(tensor.untyped_storage())
