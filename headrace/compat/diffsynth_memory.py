"""What are DiffSynth-Studio's pinned memory pool and its offloaders here? Arenas and lanes, one tensor at a time.

| DiffSynth-Studio | here |
|---|---|
| chunks are powers of two, 1 GiB at least, made when they are needed | chunks of exact size, made at once |
| a tensor begins at a multiple of 64 bytes | of 256, where it is as large: kernels are chosen by that |
| an exception: `pin_memory()` for each tensor | memory that cannot be page-locked is used as it is, with a warning |
| an offloader copies on the stream that computes | on the lane for its direction; compute waits for the copy |
| frozen weights lose their memory format | they keep it |
| what a module writes to its buffers on the device is lost | it is copied back |

`OffloadTrainingManager` has no need of them: it moves whole blocks, ahead of time, and frees what autograd saved. An
offloader replaces `param.data`, so what autograd saved of a weight keeps that weight on the device until backward.
"""

import weakref
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from headrace.memory.arena import Arena, aligned
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.device import resolve_device
from headrace.runtime.lanes import Lane, open_lanes

__all__ = [
    "AlwaysOnGPUParamOffloader",
    "BufferOffloader",
    "PinnedArenaPool",
    "PinnedBuffer",
    "StaticParamOffloader",
    "TrainableParamOffloader",
]

_LEAST_GROWTH_BYTES = 2**20
_LARGEST_CHUNK_BYTES = 4 * 2**30
_PURPOSE = "pinned pool"
Device = torch.device | str | int | None


class PinnedBuffer:
    """`capacity` bytes of page-locked host memory for `device` (None: the accelerator here), carved from the front.

    `capacity` is rounded up to whole pages. Booked in `ledger`.
    """

    def __init__(self, capacity: int, device: Device = None, ledger: Ledger | None = None) -> None:
        self._arena = Arena(capacity, resolve_device(device), ledger or Ledger(), _PURPOSE)
        self.capacity = self._arena.nbytes
        self.used = 0

    @property
    def remaining(self) -> int:
        """Bytes that are left."""
        return self.capacity - self.used

    @property
    def pinned(self) -> bool:
        """Whether copies to and from the device may overlap with compute."""
        return self._arena.pinned

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """The next `nbytes` as a uint8 tensor of shape (nbytes,); None where fewer are left."""
        if aligned(nbytes) > self.remaining:
            return None
        memory = self._arena.tensor(self.used, nbytes)
        self.used += aligned(nbytes)
        return memory


class PinnedArenaPool:
    """Page-locked host memory for many tensors, of `total_bytes` in chunks of `max_chunk_size` bytes at most.

    It grows by chunks of `min_chunk_size` at least. `device`: the accelerator for which it is page-locked; None: the
    one here. On a machine without one it is plain memory. Raises ValueError for sizes that are not positive.
    """

    def __init__(
        self,
        total_bytes: int,
        min_chunk_size: int = _LEAST_GROWTH_BYTES,
        max_chunk_size: int = _LARGEST_CHUNK_BYTES,
        device: Device = None,
    ) -> None:
        if total_bytes < 0 or min_chunk_size <= 0 or max_chunk_size < min_chunk_size:
            raise ValueError(
                f"total_bytes={total_bytes}, min_chunk_size={min_chunk_size}, max_chunk_size={max_chunk_size}: give 0"
                " bytes or more, and chunks of more than 0, whose largest is no smaller than the least"
            )
        self.device = resolve_device(device)
        self.min_chunk_size = min_chunk_size
        self._ledger = Ledger()
        whole, rest = divmod(total_bytes, max_chunk_size)
        self.chunks = [self._chunk(size) for size in [max_chunk_size] * whole + [rest] * bool(rest)]
        self.lanes = open_lanes(self.device)
        weakref.finalize(self, self.lanes.close, wait=False)

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        min_chunk_size: int = _LEAST_GROWTH_BYTES,
        max_chunk_size: int = _LARGEST_CHUNK_BYTES,
        device: Device = None,
    ) -> "PinnedArenaPool":
        """A pool with room for a model's frozen parameters and its buffers, each once."""
        pool = cls(0, min_chunk_size, max_chunk_size, device)
        frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
        for nbytes in _chunk_sizes([*frozen, *model.buffers()], max_chunk_size):
            pool.chunks.append(pool._chunk(nbytes))
        return pool

    @property
    def capacity(self) -> int:
        """Bytes of host memory in all."""
        return self._ledger.held_bytes(Tier.HOST)

    def allocate_like(
        self, tensor: torch.Tensor, copy: bool = True, require_contiguous: bool = True, non_blocking: bool = False
    ) -> torch.Tensor:
        """A tensor in the pool with the shape and dtype of `tensor` and, with `copy`, its values.

        Without `require_contiguous` its strides are those of `tensor`, if that is dense. `non_blocking`: the copy may
        be under way when this returns.
        """
        nbytes = tensor.numel() * tensor.element_size()
        memory = next((memory for chunk in self.chunks if (memory := chunk.allocate(nbytes)) is not None), None)
        if memory is None:
            self.chunks.append(self._chunk(max(self.min_chunk_size, aligned(nbytes))))
            memory = cast(torch.Tensor, self.chunks[-1].allocate(nbytes))  # which has the room
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        like = tensor if dense and not require_contiguous else torch.empty(tensor.shape, device="meta")
        placed = memory.view(tensor.dtype).as_strided(tensor.shape, like.stride())
        return placed.copy_(tensor.detach(), non_blocking=non_blocking) if copy else placed

    def _chunk(self, nbytes: int) -> PinnedBuffer:
        return PinnedBuffer(nbytes, self.device, self._ledger)


def _chunk_sizes(tensors: Iterable[torch.Tensor], most_bytes: int) -> list[int]:
    """Bytes of each chunk, so that these tensors fill them in this order; one that is larger has one for itself."""
    sizes: list[int] = []
    for tensor in tensors:
        nbytes = aligned(tensor.numel() * tensor.element_size())
        if nbytes and sizes and sizes[-1] + nbytes <= most_bytes:
            sizes[-1] += nbytes
        elif nbytes:
            sizes.append(nbytes)
    return sizes


class _Offloader:
    """One tensor whose `host` memory is the pool's, and which visits `target_device` between `onload` and `offload`."""

    def __init__(self, tensor: torch.Tensor, target_device: Device, pool: PinnedArenaPool | None) -> None:
        self.device = resolve_device(target_device)
        self.pool = pool if pool is not None else PinnedArenaPool(0, device=self.device)
        if self.pool.device != self.device:
            raise ValueError(
                f"the pool's memory is page-locked for {self.pool.device}, and the target is {self.device}"
            )
        self.host = self.pool.allocate_like(tensor, require_contiguous=False)
        self.on_device: torch.Tensor | None = None

    def _put(self, data: torch.Tensor) -> None:
        raise NotImplementedError

    def onload(self) -> None:
        """The values are on the device for whatever computes after this. The host does not wait."""
        if self.on_device is None:
            memory = torch.empty_like(self.host, device=self.device)
            lanes = self.pool.lanes
            lanes.wait(lanes.copy(Lane.ONLOAD, [(memory, self.host)], lanes.mark()).done)
            self.on_device = memory
            self._put(memory)

    def _copy_back(self) -> None:
        if self.on_device is not None:
            self._to_host(self.host, self.on_device)

    def _to_host(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """The host waits."""
        lanes = self.pool.lanes
        lanes.copy(Lane.OFFLOAD, [(host, source)], lanes.mark()).done.synchronize()

    def remove(self) -> None:
        """The tensor is in host memory, as an ordinary one."""
        self._put(self.host)
        self.on_device = None


class _ParamOffloader(_Offloader):
    def __init__(
        self, param: nn.Parameter, target_device: Device, memory_buffer: PinnedArenaPool | None = None
    ) -> None:
        super().__init__(param, target_device, memory_buffer)
        self.param = param

    def _put(self, data: torch.Tensor) -> None:
        self.param.data = data


class StaticParamOffloader(_ParamOffloader):
    """A frozen parameter, whose values are always in `host`; while it is offloaded, `param.data` is empty.

    Raises ValueError for a trainable parameter.
    """

    def __init__(
        self, param: nn.Parameter, target_device: Device, memory_buffer: PinnedArenaPool | None = None
    ) -> None:
        _check_trained(type(self), param, trained=False)
        super().__init__(param, target_device, memory_buffer)
        self.placeholder = torch.empty(0, dtype=param.dtype, device=self.device)
        self.offload()

    def offload(self) -> None:
        """Its memory on the device is free; nothing is copied."""
        self.on_device = None
        self._put(self.placeholder)


class TrainableParamOffloader(_ParamOffloader):
    """A trainable parameter, whose optimizer is on the CPU; while it is offloaded, `param.data` is in host memory.

    Raises ValueError for a frozen parameter.
    """

    def __init__(
        self, param: nn.Parameter, target_device: Device, memory_buffer: PinnedArenaPool | None = None
    ) -> None:
        _check_trained(type(self), param, trained=True)
        super().__init__(param, target_device, memory_buffer)
        self._host_grad: torch.Tensor | None = None
        self._put(self.host)

    def offload(self) -> None:
        """Its values come back to the host, which waits for them."""
        self._copy_back()
        self.on_device = None
        self._put(self.host)

    def offload_grad(self) -> None:
        """The gradient comes to the host, which waits for it; so do the values, if they have not come yet."""
        grad = self.param.grad
        if self.on_device is not None:
            self.offload()
        if grad is None or grad is self._host_grad:
            return
        if self._host_grad is None:
            self._host_grad = self.pool.allocate_like(grad, copy=False, require_contiguous=False)
        self._to_host(self._host_grad, grad)
        self.param.grad = self._host_grad


class AlwaysOnGPUParamOffloader:
    """A parameter that goes to the device once and stays, with its gradient."""

    def __init__(self, param: nn.Parameter, target_device: Device) -> None:
        self.param = param
        param.data = param.data.to(resolve_device(target_device))

    def onload(self) -> None:
        """Does nothing: the parameter is there already."""

    def offload(self) -> None:
        """Does nothing: the parameter stays."""


class BufferOffloader(_Offloader):
    """The buffer `name` of a module, which is in host memory while it is offloaded."""

    def __init__(
        self, module: nn.Module, name: str, target_device: Device, memory_buffer: PinnedArenaPool | None = None
    ) -> None:
        buffer = module._buffers[name]
        if buffer is None:
            raise ValueError(f"the buffer {name!r} of this {type(module).__name__} is None; there is nothing to move")
        super().__init__(buffer, target_device, memory_buffer)
        self.module = module
        self.name = name
        self._put(self.host)

    def _put(self, data: torch.Tensor) -> None:
        self.module._buffers[self.name] = data

    def offload(self) -> None:
        """What the module wrote to it comes back to the host, which waits for it."""
        self._copy_back()
        self.on_device = None
        self._put(self.host)


def _check_trained(kind: type, param: nn.Parameter, *, trained: bool) -> None:
    if param.requires_grad != trained:
        other = StaticParamOffloader if trained else TrainableParamOffloader
        raise ValueError(
            f"{kind.__name__} takes parameters with requires_grad={trained}, and this one of shape {tuple(param.shape)}"
            f" has {param.requires_grad}; use {other.__name__}"
        )
