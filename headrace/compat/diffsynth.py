"""How does code written for DiffSynth-Studio's OffloadTrainingManager run on headrace? With the import changed.

Each leaf module is a block, and the next one arrives while it computes. The device budget is three times the largest
block, plus what stays: buffers, and parameters of modules that have submodules. Weights that are trained on the device
come on top. What differs is in docs/coming_from/diffsynth.md, row by row.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from headrace.compat.diffsynth_memory import (
    AlwaysOnGPUParamOffloader,
    BufferOffloader,
    PinnedArenaPool,
    PinnedBuffer,
    StaticParamOffloader,
    TrainableParamOffloader,
)
from headrace.compat.visiting import offload_some, tensor_bytes
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

BLOCKS_ON_DEVICE = 3  # one computes, one arrives, one more evens out their sizes
MEGABYTE = 10**6


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
    samples = accelerator.prepare(DataLoader(dataset, collate_fn=_alone, num_workers=num_workers))
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


def _alone(batch: list[Any]) -> Any:
    """The only sample of a batch, as the DataLoader's `collate_fn`."""
    return batch[0]


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
