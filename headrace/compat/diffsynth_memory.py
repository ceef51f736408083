"""What are DiffSynth-Studio's pinned memory pool and its offloaders here? One tensor at a time, in arenas.

`OffloadTrainingManager` does not need them: it moves whole blocks, ahead of time, and frees what autograd saved.
"""

from typing import Any

import torch
from torch import nn

from headrace.compat.visiting import tensor_bytes
from headrace.memory.arena import Arena, aligned
from headrace.memory.ledger import Ledger
from headrace.runtime.device import resolve_device

__all__ = [
    "AlwaysOnGPUParamOffloader",
    "BufferOffloader",
    "PinnedArenaPool",
    "PinnedBuffer",
    "StaticParamOffloader",
    "TrainableParamOffloader",
]

Device = torch.device | str | int | None


class PinnedBuffer:
    """`capacity` bytes of page-locked host memory for `device` (None: this machine's accelerator), in whole pages."""

    def __init__(self, capacity: int, device: Device = None) -> None:
        self._arena = Arena(capacity, resolve_device(device), Ledger(), "pinned pool")
        self.capacity, self.used, self.pinned = self._arena.nbytes, 0, self._arena.pinned

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """The next `nbytes` as a uint8 tensor of shape (nbytes,); None if fewer are left."""
        if self.used + aligned(nbytes) > self.capacity:
            return None
        self.used += aligned(nbytes)
        return self._arena.tensor(self.used - aligned(nbytes), nbytes)


class PinnedArenaPool:
    """Page-locked host memory for many tensors: `total_bytes`, and `min_chunk_size` or more whenever it is full."""

    def __init__(self, total_bytes: int, min_chunk_size: int = 2**20, device: Device = None) -> None:
        self.device, self.min_chunk_size = resolve_device(device), min_chunk_size
        self.chunks = [PinnedBuffer(total_bytes, self.device)] if total_bytes else []

    @classmethod
    def from_model(cls, model: nn.Module, min_chunk_size: int = 2**20, device: Device = None) -> "PinnedArenaPool":
        """A pool with room for the model's frozen parameters and its buffers, each counted once."""
        frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
        return cls(tensor_bytes([*frozen, *model.buffers()]), min_chunk_size, device)

    @property
    def capacity(self) -> int:
        """Bytes of the pool's host memory in all."""
        return sum(chunk.capacity for chunk in self.chunks)

    def allocate_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in the pool. It has the same strides if `tensor` is dense."""
        memory = next((memory for chunk in self.chunks if (memory := chunk.allocate(tensor.nbytes)) is not None), None)
        if memory is None:
            self.chunks.append(PinnedBuffer(max(self.min_chunk_size, aligned(tensor.nbytes)), self.device))
            return self.allocate_like(tensor)
        like = torch.empty_like(tensor, device="meta")
        return memory.view(tensor.dtype).as_strided(tensor.shape, like.stride()).copy_(tensor.detach())


class _Offloader:
    """Keeps the tensor `name` of `owner` in the pool, and on `target_device` between `onload` and `offload`."""

    def __init__(self, owner: Any, name: str, target_device: Device, pool: PinnedArenaPool | None) -> None:
        self.device = resolve_device(target_device)
        self.pool = pool or PinnedArenaPool(0, device=self.device)
        if self.pool.device != self.device:
            raise ValueError(f"the pool's memory is for {self.pool.device}, and the target is {self.device}")
        self._owner, self._name = owner, name
        self.host = self.pool.allocate_like(getattr(owner, name))
        self.on_device: torch.Tensor | None = None
        self.offload()

    def onload(self) -> None:
        """Brings the values to the device, for all computation after this. The host does not wait."""
        if self.on_device is None:
            self.on_device = self.host.to(self.device, non_blocking=True)
            setattr(self._owner, self._name, self.on_device)

    def offload(self) -> None:
        """Brings the values back to the host, and waits for them."""
        if self.on_device is not None:
            self.host.copy_(self.on_device)
        self.remove()

    def remove(self) -> None:
        """Makes the tensor an ordinary one in host memory."""
        self.on_device = None
        setattr(self._owner, self._name, self.host)


class _ParamOffloader(_Offloader):
    _trained: bool

    def __init__(
        self, param: nn.Parameter, target_device: Device, memory_buffer: PinnedArenaPool | None = None
    ) -> None:
        if param.requires_grad != self._trained:
            raise ValueError(
                f"{type(self).__name__} takes parameters with requires_grad={self._trained}, and this one of shape"
                f" {tuple(param.shape)} has {param.requires_grad}"
            )
        self.param = param
        super().__init__(param, "data", target_device, memory_buffer)


class StaticParamOffloader(_ParamOffloader):
    """A frozen parameter; while it is offloaded, `param.data` is empty. Raises ValueError for a trainable one."""

    _trained = False

    def offload(self) -> None:
        """Frees the parameter's memory on the device. Nothing is copied."""
        self.on_device = None
        self.param.data = torch.empty(0, dtype=self.param.dtype, device=self.device)


class TrainableParamOffloader(_ParamOffloader):
    """A parameter whose optimizer is on the CPU. Raises ValueError for a frozen one."""

    _trained = True

    def offload_grad(self) -> None:
        """Brings the gradient to the host, and the values, too, if they are still away. The host waits for them."""
        self.offload()
        if self.param.grad is not None:
            self.param.grad = self.param.grad.cpu()


class AlwaysOnGPUParamOffloader:
    """A parameter that goes to the device once and stays, with its gradient."""

    def __init__(self, param: nn.Parameter, target_device: Device) -> None:
        self.param = param
        param.data = param.data.to(resolve_device(target_device))

    def onload(self) -> None:
        """Does nothing: the parameter is there already."""

    offload = onload


class BufferOffloader(_Offloader):
    """Moves the buffer `name` of a module."""

    def __init__(
        self, module: nn.Module, name: str, target_device: Device, memory_buffer: PinnedArenaPool | None = None
    ) -> None:
        if module._buffers[name] is None:
            raise ValueError(f"the buffer {name!r} of this {type(module).__name__} is None; there is nothing to move")
        super().__init__(module, name, target_device, memory_buffer)
