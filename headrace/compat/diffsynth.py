"""How does code written for DiffSynth-Studio's OffloadTrainingManager run on headrace? With the import changed.

Each leaf module is a block, and the next one arrives while it computes. The device budget is three times the largest
block, plus what stays: buffers, and parameters of modules that have submodules. Weights that are trained on the device
come on top. What differs is in docs/coming_from/diffsynth.md, row by row.
"""

import contextlib
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from headrace.compat.visiting import BLOCKS_ON_DEVICE, offload_some, tensor_bytes
from headrace.memory.arena import Arena, aligned
from headrace.memory.ledger import Ledger
from headrace.runtime.device import resolve_device
from headrace.runtime.tensors import map_tensors
from headrace.weights.model.inventory import is_left_to_user, leave_to_user

__all__ = [
    "AlwaysOnGPUParamOffloader",
    "BufferOffloader",
    "OffloadTrainingManager",
    "PinnedArenaPool",
    "PinnedBuffer",
    "StaticParamOffloader",
    "TrainableParamOffloader",
    "launch_data_process_task",
]

MEGABYTE = 10**6
Device = torch.device | str | int | None


class OffloadTrainingManager:
    """Weights visit `target_device` while they compute.

    With `enable_optimizer_cpu_offload`, gradients and optimizer are on the CPU. Without it, trainable parameters are
    moved to the device and stay there, with their gradients and their optimizer, which may be made before or
    afterwards. `cpu_offload_split_threshold` is in MB of 10**6 bytes; None makes every leaf module a block. To undo all
    of it, call `remove()`: `handle.remove()` alone leaves trained parameters on the device. Raises what
    `headrace.offload` raises, and ValueError for a threshold that is not positive.
    """

    def __init__(
        self,
        model: nn.Module,
        target_device: torch.device | str,
        enable_optimizer_cpu_offload: bool = False,
        cpu_offload_split_threshold: float | None = None,
    ) -> None:
        if cpu_offload_split_threshold is not None and not cpu_offload_split_threshold > 0:
            raise ValueError(
                f"cpu_offload_split_threshold is {cpu_offload_split_threshold} MB; give more than 0, or None"
            )
        limit_bytes = 0 if cpu_offload_split_threshold is None else int(cpu_offload_split_threshold * MEGABYTE)
        device = resolve_device(target_device)
        self._trained = [] if enable_optimizer_cpu_offload else [p for p in model.parameters() if p.requires_grad]
        left_before = [parameter for parameter in model.parameters() if is_left_to_user(parameter)]
        leave_to_user(left_before, left=False)  # left over from a manager if only its handle was removed
        leave_to_user(self._trained)
        try:
            self.handle = offload_some(model, list(_units(model, limit_bytes)), BLOCKS_ON_DEVICE, device=device)
        except BaseException:
            leave_to_user(self._trained, left=False)
            leave_to_user(left_before)  # those of a manager that the model has
            raise
        self._move_trained(device)

    def after_backward(self) -> None:
        """Waits until the device is done. Gradients are in place already."""
        self.handle.synchronize()

    def remove(self) -> None:
        """Makes the model an ordinary CPU model again. The state of an optimizer stays where it is."""
        self.handle.remove()
        leave_to_user(self._trained, left=False)
        self._move_trained(torch.device("cpu"))
        self._trained = []

    def _move_trained(self, device: torch.device) -> None:
        """Moves the trained parameters, with their gradients, to `device`. The parameter objects remain the same."""
        for parameter in self._trained:
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(device)


def launch_data_process_task(
    accelerator: Any,
    dataset: Any,
    model: nn.Module,
    model_logger: Any,
    num_workers: int = 8,
    args: Any = None,
) -> None:
    """Runs the first of two stages: saves what `model` makes of each sample, for the second stage to train on.

    Sample `i` of a process goes to `{model_logger.output_path}/{accelerator.process_index}/{i}.pth`, with its tensors
    in host memory. `args` is None, or parsed flags. With `enable_model_cpu_offload` the model is offloaded meanwhile,
    as `enable_optimizer_cpu_offload` and `cpu_offload_split_threshold` say; otherwise it goes to `accelerator.device`.
    """
    directory = Path(model_logger.output_path) / str(accelerator.process_index)
    directory.mkdir(parents=True, exist_ok=True)
    samples = accelerator.prepare(DataLoader(dataset, collate_fn=itemgetter(0), num_workers=num_workers))
    with contextlib.ExitStack() as offloaded:
        if getattr(args, "enable_model_cpu_offload", False):
            with_optimizer = getattr(args, "enable_optimizer_cpu_offload", False)
            threshold = getattr(args, "cpu_offload_split_threshold", None)
            manager = OffloadTrainingManager(model, accelerator.device, with_optimizer, threshold)
            offloaded.callback(manager.remove)
        else:
            model.to(accelerator.device)
        for index, sample in enumerate(tqdm(samples)):
            with torch.no_grad():
                made = model(sample)
            torch.save(map_tensors(made, torch.Tensor.cpu), directory / f"{index}.pth")


def _units(module: nn.Module, limit_bytes: int) -> Iterator[nn.Module]:
    """The largest modules inside `module` that are within the limit and compute as a whole, or else leaf modules."""
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        leaf = not any(True for inner in child.children() for _ in inner.parameters())
        fits = tensor_bytes(child.parameters()) <= limit_bytes and _computes_as_a_whole(child)
        # An nn.MultiheadAttention computes with the weights of its child without calling it.
        if leaf or fits or isinstance(child, nn.MultiheadAttention):
            yield child
        else:
            yield from _units(child, limit_bytes)


def _computes_as_a_whole(module: nn.Module) -> bool:
    """Whether the module is used by calling its forward. Containers and autoencoders are not."""
    return type(module).forward is not nn.Module.forward and not (
        hasattr(module, "encode") and hasattr(module, "decode")
    )


# One tensor at a time. The manager does not need these: it moves whole blocks, ahead of time -------------------------
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
    """Page-locked host memory for many tensors: `total_bytes`; it grows by `min_chunk_size` or more when it is full."""

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
