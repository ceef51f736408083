"""Which small models do the tests of activations train? Such that bytes can be counted by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

import headrace
from tests.support import models
from tests.support.held import weight_bytes
from tests.support.models import TanhLayer

WIDTH = 128
ROWS = 64
SAVED_BYTES = ROWS * WIDTH * 4  # of one tensor that a layer saves: a multiple of any allocator's granule


class Layer(TanhLayer):
    """Saves two tensors of SAVED_BYTES."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


class Stack(models.Stack):
    """Autograd keeps one tensor for each layer, as an output is the next one's input. The same weights every time."""

    def __init__(
        self, layers: int = 8, kind: Callable[[], nn.Module] = Layer, checkpointing: str | CheckpointPolicy = "none"
    ) -> None:
        torch.manual_seed(0)
        super().__init__((kind() for _ in range(layers)), checkpointing=checkpointing)


def rows(device: torch.device | str, seed: int = 0, count: int = ROWS) -> Tensor:
    """Inputs of a Stack, of shape (count, WIDTH). They require a gradient, as reentrant checkpoints ask for."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator).to(device).requires_grad_()


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """A forward and a backward; the loss and the gradients, on the CPU."""
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return results(model, loss)


def results(model: nn.Module, *others: Tensor) -> list[Tensor]:
    """Gradients of the model, and other tensors, as they are now."""
    tensors: list[Any] = [*others, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert tensors, "there is nothing to compare"
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def all_leaving(model: nn.Module, device: torch.device | str, *, with_weights: bool) -> tuple[Any, Any]:
    """All activations leave, beside half of the weights or alone: the handle to remove, and that of the activations."""
    settings: dict[str, Any] = {"min_bytes": 0, "all_leave": True}
    if with_weights:
        budget = weight_bytes(model) // 2
        handle = headrace.offload(model, device=device, device_memory=budget, activations=settings)
        return handle, handle.activations
    activations = headrace.offload_activations(model.to(device), **settings)
    return activations, activations
