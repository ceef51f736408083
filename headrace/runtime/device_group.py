"""How do the devices of a node send each other what they hold? By collectives of a process group of their own.

Where the mesh's backend reaches the devices (NCCL), from device to device. Where it does not (gloo), each rank's bytes
go to host memory of its own, the collective runs there, and what it gives comes back: the same bits, by a longer way.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from headrace.runtime.node import Node

__all__ = ["DeviceGroup"]

# Newer names of the same, which PyTorch 2.13 asks for.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class DeviceGroup:
    """The ranks of a node, whose tensors are on `device`. To be made by all ranks; calls in the same order on all."""

    def __init__(self, node: Node, device: torch.device) -> None:
        self._node = node
        self._borrowed = node.borrow_group(device, self)
        self._group = self._borrowed.group
        self.bounces = node.backend_of(device) == "gloo"  # off host memory

    def close(self) -> None:
        """Other users may have the process group."""
        self._borrowed.user = None

    def gather(self, ranges: torch.Tensor, what: str) -> None:
        """Shape (ranks, n), of which each rank has its own row: then all have all. On the current stream."""
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
        """Shape (ranks, n): then this rank's row has the sum of all ranks' tensors there. On the current stream."""
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
        """As the node's; of a collective that has failed on this rank, nobody knows how far others have come."""
        try:
            with self._node.together(what):
                yield
        except BaseException:
            self._borrowed.intact = False
            raise
