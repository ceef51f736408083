"""Where do a checkpoint's bytes come from? Host memory, a device, or the disk tier; a part of a tensor at a time."""

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import CheckpointError, StateError
from headrace.memory.disk import origin_of, read_bytes
from headrace.runtime.device import is_accelerator, new_stream
from headrace.runtime.lanes import entered

SMALL_BYTES = 1 << 14  # tensors up to this size are copied when saving begins


class NotPlainError(CheckpointError):
    """A tensor is not plain bytes."""


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Raises NotPlainError for a tensor whose bytes cannot be saved."""
    reason = _why_not_plain(tensor)
    if reason is not None:
        raise NotPlainError(f"{name!r} cannot be saved: {reason}")


def _why_not_plain(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialised yet; call the model once before, so that lazy modules learn their shapes"
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else f"of the layout {tensor.layout}"
        return f"it is {kind}, and files of weights hold dense tensors; make it dense, as with to_dense()"
    if tensor.is_quantized:
        return f"it is of {tensor.dtype}, which is more than its bytes; call dequantize() on it"
    if type(tensor).__name__ == "DTensor":
        return "it is a DTensor, of which each rank has a part; save it by torch.distributed.checkpoint"
    if hasattr(type(tensor), "__tensor_flatten__"):
        return (
            f"it is a {type(tensor).__name__}, which is more than its bytes; save the adapters that are trained beside"
            " it (of a PEFT model nothing else is saved), or all by torch.save(model.state_dict())"
        )
    if tensor.is_meta:
        return "it is on meta and has no value; load the model first"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return f"its storage of {tensor.nbytes} bytes was freed (resized to 0); bring them back first"
    reached = 0  # the furthest element from the first, over the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:  # elements along an expanded dimension are the same
            if stride <= reached:
                return f"its elements overlap in memory (strides {tensor.stride()}); make it contiguous() first"
            reached += (size - 1) * stride
    return None


@dataclass(frozen=True)
class Source:
    """A source of bytes of a checkpoint's file. `read(begin, memory)` fills uint8 memory with bytes from `begin` on.

    `owner`: the parameter whose value or state it is; writers of the parameter wait until it has been read. None: none.
    """

    name: str
    nbytes: int
    read: Callable[[int, torch.Tensor], None]
    owner: Any = None


def source_of(name: str, data: bytes) -> Source:
    """A source of bytes in memory."""

    def read(begin: int, memory: torch.Tensor) -> None:
        ctypes.memmove(memory.data_ptr(), data[begin : begin + memory.nbytes], memory.nbytes)

    return Source(name, len(data), read)


class TensorSource:
    """A source of the elements of a strided tensor, in the order of their indices."""

    def __init__(self, name: str, tensor: torch.Tensor, owner: Any) -> None:
        self.name = name
        self.owner = owner
        self.nbytes = tensor.nbytes
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        self._original = self._tensor = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version
        if self.nbytes <= SMALL_BYTES:  # copied, so that nobody who writes to it has to wait
            self._tensor = self._original.to("cpu", copy=True)
        self._ready: torch.Event | None = None  # when its device has computed what was submitted so far
        if is_accelerator(self._tensor.device):
            with torch.accelerator.device_index(self._tensor.device.index):  # perhaps not this thread's current one
                self._ready = torch.accelerator.current_stream().record_event()

    @property
    def device(self) -> torch.device:
        """Where the bytes are read."""
        return self._tensor.device

    def expect_writes(self) -> None:
        """Tells the source that the tensor may be written: its writers wait until it has been read."""
        self._version = None

    @property
    def was_written(self) -> bool:
        """Whether the tensor was written to, unexpectedly, since this source was made."""
        return self._version is not None and self._original._version != self._version

    def write_error(self) -> StateError:
        """The error that tells of such a write."""
        return StateError(
            f"{self.name!r} was written to while it was being saved, so nothing was saved; write to it after wait(), or"
            " call headrace.save with wait=True"
        )

    @property
    def memory(self) -> tuple[int, int] | None:
        """The first address to be read, and the one behind the last; None if a copy is read."""
        return memory_of(self._tensor) if self._tensor is self._original else None

    def read(self, begin: int, memory: torch.Tensor) -> None:
        """Fills `memory` with bytes from `begin` on. Raises StateError if the tensor was written to unexpectedly."""
        tensor = self._tensor
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            self._read_elements(begin, memory)
        elif (found := origin_of(tensor)) is None or not read_bytes(found[0], found[1] + begin, memory):
            ctypes.memmove(memory.data_ptr(), tensor.data_ptr() + begin, memory.nbytes)
        if tensor is self._original and self.was_written:
            raise self.write_error()

    def _read_elements(self, begin: int, memory: torch.Tensor) -> None:
        """Copies the rows of the first dimension that hold the bytes to CPU memory, and then the bytes from there."""
        tensor, end = self._tensor, begin + memory.nbytes
        if tensor.is_contiguous():
            tensor = tensor.view(-1)
        if tensor.dim() == 0:
            tensor = tensor.view(1)
        row_bytes = max(1, math.prod(tensor.shape[1:])) * tensor.itemsize
        first, last = begin // row_bytes, -(-end // row_bytes)
        if self._ready is not None:
            with entered(_stream(tensor.device)) as stream:  # the copy runs beside the device's computation
                stream.wait_event(self._ready)
                flat = tensor[first:last].contiguous().to("cpu")
        else:
            flat = tensor[first:last].contiguous()
        ctypes.memmove(memory.data_ptr(), flat.data_ptr() + begin - first * row_bytes, memory.nbytes)


def memory_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The first address of a strided tensor's elements, and the one behind the last; None if it has none."""
    if tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


@functools.cache
def _stream(device: torch.device) -> torch.Stream:
    """The stream for copies from a device; one is enough, as one thread reads for one checkpoint at a time."""
    return new_stream(device)
