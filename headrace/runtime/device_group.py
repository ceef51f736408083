"""How do the devices of a node send each other what they hold? By collectives of a process group of their own.

If the mesh's backend reaches the devices (NCCL), bytes go from device to device. If not (gloo), each rank copies its
bytes to its host memory, the collective runs there, and the result is copied back: the same bits, only slower.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from headrace.errors import StateError
from headrace.runtime.node import Node

# PyTorch 2.13 asks for the newer names of these functions.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class DeviceGroup:
    """The ranks of a node, with tensors on `device`. All ranks make it, and call its methods in the same order.

    Raises StateError where collectives of the devices could block each other.
    """

    def __init__(self, node: Node, device: torch.device) -> None:
        self._node = node
        self.bounces = node.backend_of(device) == "gloo"  # by way of host memory
        if not self.bounces and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise StateError(
                "CUDA_DEVICE_MAX_CONNECTIONS=1 gives the device one queue for all streams, in which collectives that"
                " load weights and those that add up gradients can wait for each other forever; unset it, or set it to"
                " 8, before the ranks start"
            )
        self._borrowed = node.borrow_group(device, self)
        self._group = self._borrowed.group

    def close(self) -> None:
        """Gives the process group back, so that others can borrow it."""
        self._borrowed.user = None

    def gather(self, ranges: torch.Tensor, what: str) -> None:
        """Fills `ranges` (ranks, n), in which each rank has its own row, from all ranks. On the current stream."""
        rank = self._node.rank
        with torch.no_grad(), self._together(what):
            if not self.bounces:
                _all_gather(ranges.view(-1), ranges[rank], group=self._group)
                return
            host = torch.empty(ranges.shape, dtype=ranges.dtype, device="cpu")
            host[rank].copy_(ranges[rank])
            _all_gather(host.view(-1), host[rank], group=self._group)
            ranges.copy_(host)

    def reduce(self, ranges: torch.Tensor, what: str) -> None:
        """Puts the sum over all ranks into this rank's row of `ranges` (ranks, n). On the current stream."""
        rank = self._node.rank
        with torch.no_grad(), self._together(what):
            if not self.bounces:
                _reduce_scatter(ranges[rank], ranges.view(-1), group=self._group)
                return
            total = torch.empty(ranges.shape[1:], dtype=ranges.dtype, device="cpu")
            _reduce_scatter(total, ranges.to("cpu", copy=True).view(-1), group=self._group)
            ranges[rank].copy_(total)

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """As `Node.together`. After a failed collective, nobody borrows the group again: others may still be in it."""
        try:
            with self._node.together(what):
                yield
        except BaseException:
            self._borrowed.intact = False
            raise
