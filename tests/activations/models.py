"""Which small models do the tests of activations train? Such that bytes can be counted by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 128
ROWS = 64
SAVED_BYTES = ROWS * WIDTH * 4  # of one tensor that a layer saves: a multiple of any allocator's granule


class Layer(nn.Module):
    """Saves two tensors of SAVED_BYTES: its input, for the linear map, and the output of tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers one behind the other: autograd keeps one tensor for each of them, as an output is the next one's input."""

    def __init__(self, layers: int = 8, kind: Callable[[], nn.Module] = Layer, checkpointing: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(layers))
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")  # type: ignore[assignment]
        return x


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
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit."""
    assert len(results) == len(expected) > 0
    for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert torch.equal(result, wanted), f"tensor {index} differs"
