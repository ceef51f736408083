"""What is held on the device? Bytes of weights, what an allocator counts, and what a plain pass adds to its weights."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.loops import Forward


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, each once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def is_counted(device: torch.device) -> bool:
    """Whether an allocator counts the device's bytes: not on the CPU."""
    return device.type != "cpu"


def allocated_bytes(device: torch.device) -> int:
    """Live bytes on the device."""
    return torch.accelerator.memory_allocated(device) if is_counted(device) else 0


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it holds once garbage is collected. Autograd's device thread lets go of a graph in its own time."""
    for _ in range(100):
        gc.collect()
        if condition():
            return True
        time.sleep(0.01)
    return False


def is_gone(reference: weakref.ref[Any]) -> bool:
    """Whether the object goes once garbage is collected."""
    return comes_true(lambda: reference() is None)


class Allocations:
    """Live bytes of one device from here on, by its allocator; all zero on the CPU, which has none that counts."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self.device = device
        self.before_bytes = allocated_bytes(device)
        self.after_forward_bytes: list[int] = []
        if is_counted(device):
            torch.accelerator.reset_peak_memory_stats(device)

    def forward_done(self, _step: int) -> None:
        """To be called when forward has ended and its output is alive."""
        self.after_forward_bytes.append(self.added_bytes)

    @property
    def added_bytes(self) -> int:
        """What was added and is alive."""
        return allocated_bytes(self.device) - self.before_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was added."""
        return torch.accelerator.max_memory_allocated(self.device) - self.before_bytes if is_counted(self.device) else 0


def peak_activation_bytes(model: nn.Module, batch: Any, forward: Forward, device: torch.device) -> int:
    """The most that a pass of a plain model on the device adds to its weights, were every gradient to leave at once."""
    if not is_counted(device):
        return 0

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in model.parameters() if p.requires_grad]
    allocations = Allocations(device)
    output, loss = forward(model, batch)
    if loss.requires_grad:
        loss.backward()
    del output, loss
    for hook in hooks:
        hook.remove()
    return allocations.peak_bytes
