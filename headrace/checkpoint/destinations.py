"""Where do a tensor's bytes go when it is loaded? Into the existing tensor: in host memory, on a device, or on disk."""

import ctypes
import threading
from collections.abc import Callable

import torch

from headrace.errors import CheckpointError
from headrace.memory.disk import origin_of, write_bytes

_PLAIN = (torch.Tensor, torch.nn.Buffer)


def filling(tensor: torch.Tensor, dtype: torch.dtype, *, aligned: bool = True) -> Callable[[int, torch.Tensor], None]:
    """A function `put(begin, memory)` that fills `tensor`: `memory` holds a saved tensor's bytes from `begin` on.

    The saved tensor is contiguous, and has `tensor`'s shape and the dtype `dtype`, which is converted as by `copy_`.
    `put` may be called on several threads; with `aligned`, each call brings whole elements.
    """
    is_plain = type(tensor) in _PLAIN or isinstance(tensor, torch.nn.Parameter)
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        return _Whole(tensor, dtype)  # a buffer of an offloaded model must be told of the write
    tensor = tensor.detach()
    if 0 in tensor.stride():
        return _Whole(tensor, dtype)
    if tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous():
        return _memory_of(tensor)
    if tensor.is_contiguous() and aligned:
        flat = tensor.view(-1)

        def convert(begin: int, memory: torch.Tensor) -> None:
            first = begin // dtype.itemsize
            values = (memory.clone() if memory.data_ptr() % dtype.itemsize else memory).view(dtype)
            flat[first : first + values.numel()].copy_(values)

        return convert
    return _Whole(tensor, dtype)


def _memory_of(tensor: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
    found = origin_of(tensor)

    def copy(begin: int, memory: torch.Tensor) -> None:
        if found is None or not write_bytes(found[0], found[1] + begin, memory):
            ctypes.memmove(tensor.data_ptr() + begin, memory.data_ptr(), memory.nbytes)

    return copy


class _Whole:
    """Fills a tensor that cannot be filled in parts: collects all bytes before it copies any."""

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self._tensor = tensor
        self._dtype = dtype
        self._missing = tensor.numel() * dtype.itemsize
        self._memory: torch.Tensor | None = None
        self._lock = threading.Lock()

    def __call__(self, begin: int, memory: torch.Tensor) -> None:
        with self._lock:
            if self._memory is None:
                self._memory = torch.empty(self._missing, dtype=torch.uint8, device="cpu")
            self._memory[begin : begin + memory.nbytes] = memory
            self._missing -= memory.nbytes
            if not self._missing:
                self._fill(self._memory.view(self._dtype).view(self._tensor.shape))
                self._memory = None

    def _fill(self, values: torch.Tensor) -> None:
        """Copies the values. Elements of an expanded tensor that share memory are filled once."""
        tensor = self._tensor
        for dim, stride in enumerate(tensor.stride()):
            if not stride and tensor.shape[dim] > 1:
                first = values.narrow(dim, 0, 1)
                if not torch.equal(first.expand_as(values).contiguous().view(torch.uint8), values.view(torch.uint8)):
                    raise CheckpointError(
                        f"a tensor of the shape {tuple(values.shape)} is expanded in the model (its strides are"
                        f" {tensor.stride()}), and its elements differ in the checkpoint; make it contiguous()"
                    )
                tensor, values = tensor.narrow(dim, 0, 1), first
        tensor.copy_(values)
