"""What are our optimizers compared with? PyTorch's own, and short references where PyTorch has none."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

SHAPES = ((37, 13), (1,), (7,), (8,), (65536 + 5,), (3, 4, 5), (), (13, 1031))


def parameters(dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def copies(originals: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    return [nn.Parameter(original.detach().clone().to(dtype or original.dtype)) for original in originals]


@functools.cache
def _noise() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000)
    noise = torch.randn(2**17, generator=generator)
    return (noise * 10 ** torch.randn(2**17, generator=generator)).clamp_(-1e3, 1e3)


def give_gradients(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], step: int) -> None:
    """The same random gradients for both, in the dtype of each; values as far apart as real ones are."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        begin = (997 * step + 131 * index) % 2**15
        noise = _noise()[begin : begin + one.numel()].view(one.shape)
        one.grad = noise.to(one.device, one.dtype, copy=True)
        # What reaches a float32 reference is the low-precision gradient, widened.
        other.grad = one.grad.detach().to("cpu", copy=True).to(other.dtype)


def ties_up(exact: torch.Tensor) -> torch.Tensor:
    """float32 to bfloat16, ties rounded up in the bits."""
    return ((exact.detach().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


class ReferenceLion:
    """Lion, as its authors write it."""

    def __init__(self, params: Sequence[torch.Tensor], lr: float, betas: tuple[float, float], weight_decay: float):
        self.params, self.lr, self.betas, self.weight_decay = params, lr, betas, weight_decay
        self.momenta = [torch.zeros_like(parameter) for parameter in params]

    @torch.no_grad()
    def step(self) -> None:
        for weight, momentum in zip(self.params, self.momenta, strict=True):
            assert weight.grad is not None
            weight.mul_(1 - self.lr * self.weight_decay)
            update = momentum.mul(self.betas[0]).add_(weight.grad, alpha=1 - self.betas[0])
            weight.add_(update.sign_(), alpha=-self.lr)
            momentum.mul_(self.betas[1]).add_(weight.grad, alpha=1 - self.betas[1])


RULES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "adamw": ("AdamW", torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "fused": True}),
    "adamw_amsgrad": ("AdamW", torch.optim.AdamW, {"amsgrad": True, "maximize": True, "fused": True}),
    "adamw_small_beta": ("AdamW", torch.optim.AdamW, {"betas": (0.3, 0.95), "weight_decay": 0.0, "fused": True}),
    "adam": ("Adam", torch.optim.Adam, {"lr": 3e-3, "fused": True}),
    "adam_decay": ("Adam", torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "fused": True}),
    "sgd": ("SGD", torch.optim.SGD, {"lr": 0.01, "fused": True}),
    "sgd_momentum": ("SGD", torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "fused": True}),
    "sgd_nesterov": (
        "SGD",
        torch.optim.SGD,
        {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True, "fused": True},
    ),
    "lion": ("Lion", ReferenceLion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "adafactor": ("Adafactor", torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}),
    "muon": ("Muon", torch.optim.Muon, {"lr": 1e-2}),
}
MATRICES = ((37, 13), (64, 64), (5, 130))
