"""Where do visiting blocks lie on the device? In buffers: device bytes of one block."""

import contextlib
import gc
import sys

import torch

from headrace.memory.ledger import Ledger, Tier
from headrace.memory.pages import map_pages
from headrace.runtime.autograd import address_of, in_transform, storage_use_count, without_transforms
from headrace.runtime.device import is_accelerator

__all__ = ["DeviceBuffers", "plain_tensors", "references_beside"]

_PURPOSE = "weights"


class DeviceBuffers:
    """Allocates and releases buffers on one device, and books them.

    An accelerator has a caching allocator with stream order; its buffers are booked from allocation to release. On the
    CPU fresh memory costs page faults (a quarter of a second for each GiB, as much as a copy), so released buffers that
    nobody else refers to are kept and handed out again, as far as all buffers together stay within `budget_bytes`; they
    are booked until their memory is truly gone, so a stray reference shows.
    """

    def __init__(self, device: torch.device, ledger: Ledger, budget_bytes: int) -> None:
        self._device = device
        self._ledger = ledger
        self._budget_bytes = budget_bytes
        self._pooled = not is_accelerator(device)
        self._free: list[torch.Tensor] = []  # kept; what was released last comes last

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of shape (nbytes,). Contents are arbitrary."""
        if not self._pooled:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            self._ledger.add(Tier.DEVICE, _PURPOSE, nbytes)
            return buffer
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        for index in reversed(range(len(self._free))):
            if self._free[index].nbytes == nbytes:
                return self._free.pop(index)
        while self._is_over_with(nbytes) and self._free:
            del self._free[0]
        if self._is_over_with(nbytes):
            gc.collect(1)  # frames of an interrupt may keep what was released
        mapping = map_pages(nbytes, touched=False)
        self._ledger.book(mapping, Tier.DEVICE, _PURPOSE, nbytes)
        return torch.frombuffer(mapping, dtype=torch.uint8)

    def release(self, buffer: torch.Tensor) -> None:
        """The caller's reference ends here; others keep the memory alive."""
        if not self._pooled:
            self._ledger.add(Tier.DEVICE, _PURPOSE, -buffer.nbytes)
        elif _sole_owner(buffer):
            self._free.append(buffer)

    def rebook(self, nbytes: int) -> None:
        """After Ctrl-C, which may have kept a buffer from being booked or released: buffers of `nbytes` are in use."""
        if not self._pooled:  # where memory itself is booked
            self._ledger.add(Tier.DEVICE, _PURPOSE, nbytes - self._ledger.held_bytes(Tier.DEVICE, _PURPOSE))

    def _is_over_with(self, nbytes: int) -> bool:
        return self._ledger.held_bytes(Tier.DEVICE, _PURPOSE) + nbytes > self._budget_bytes

    def close(self) -> None:
        """Lets go of what is kept."""
        self._free.clear()


def references_beside(buffer: torch.Tensor) -> int:
    """How many tensors and storage objects share the memory of a buffer."""
    return sum(_references(buffer)) - sum(_SOLE_REFERENCES)


def _references(buffer: torch.Tensor) -> tuple[int, int]:
    """How many refer to the storage: tensors in C++, and holders of its one Python object. Looking counts too."""
    storage = buffer.untyped_storage()
    return storage_use_count(address_of(storage)), sys.getrefcount(storage)


_SOLE_REFERENCES = _references(torch.empty(1, device="cpu"))


def _sole_owner(buffer: torch.Tensor) -> bool:
    """Whether nobody else refers to the memory: no view, no storage object."""
    return _references(buffer) == _SOLE_REFERENCES


def plain_tensors() -> contextlib.AbstractContextManager[object]:
    """Inside of inference mode (a leaf that once held such a tensor could not be trained any more) and of `torch.func`
    transforms (their tensors end with them) buffers are what they are outside.
    """
    if not torch.is_inference_mode_enabled() and not in_transform():
        return _AS_THEY_ARE
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(without_transforms())
    return stack


_AS_THEY_ARE = contextlib.nullcontext()
