"""What does one update do? The rules that work element by element, for the kernel and in PyTorch.

Both forms give the same bits: the kernel follows PyTorch's fused CPU optimizers, and the PyTorch operations are those.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.optim.kernel import Constants, Rule
from headrace.runtime.torch_rules import fused_adam, fused_adamw, fused_sgd

__all__ = ["AdamRule", "ElementRule", "LionRule", "SgdRule"]


class ElementRule(Protocol):
    """One rule at one step. `first`, `second` and `maximum` are the rule's state; a rule without one ignores it."""

    def constants(self, gradient_scale: float) -> Constants:
        """For the native kernel."""

    def apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        maximum: torch.Tensor | None,
        *,
        first_step: bool,
    ) -> None:
        """In place, on flat tensors of one dtype, with PyTorch's own kernels."""


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    step: float
    bias_correction: bool = True

    @property
    def _corrected_step(self) -> float:
        """The step that moments are corrected for: after infinitely many there is nothing to correct."""
        return self.step if self.bias_correction else math.inf

    def constants(self, gradient_scale: float) -> Constants:
        added = not self.decoupled and self.weight_decay != 0
        return Constants(
            rule=Rule.ADAM,
            maximize=self.maximize,
            flags=1 if added else 0,
            seed=int(self.step) * 0x9E3779B9 & 0xFFFFFFFF,
            gradient_scale=gradient_scale,
            decay=self.weight_decay if added else 1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            keep_first=self.beta1,
            take_first=1 - self.beta1,
            keep_second=self.beta2,
            take_second=1 - self.beta2,
            correction=math.sqrt(1 - self.beta2**self._corrected_step),
            epsilon=self.eps,
            step_size=-(self.lr / (1 - self.beta1**self._corrected_step)),
        )

    def apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        maximum: torch.Tensor | None,
        *,
        first_step: bool,
    ) -> None:
        fused = fused_adamw if self.decoupled else fused_adam
        fused(
            [weight],
            [gradient],
            _given(first),
            _given(second),
            _given(maximum),
            [torch.full((), self._corrected_step, dtype=torch.float32, device=weight.device)],
            amsgrad=maximum is not None,
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )


@dataclass(frozen=True, kw_only=True)
class SgdRule:
    """Stochastic gradient descent, with momentum and Nesterov's form of it as PyTorch has them."""

    lr: float
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float
    maximize: bool
    step: float

    def constants(self, gradient_scale: float) -> Constants:
        return Constants(
            rule=Rule.SGD,
            maximize=self.maximize,
            flags=(1 if self.weight_decay != 0 else 0) | (2 if self.nesterov else 0),
            seed=int(self.step) * 0x9E3779B9 & 0xFFFFFFFF,
            gradient_scale=gradient_scale,
            decay=self.weight_decay,
            keep_first=self.momentum,
            take_first=1 - self.dampening,
            step_size=-self.lr,
        )

    def apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        maximum: torch.Tensor | None,
        *,
        first_step: bool,
    ) -> None:
        fused_sgd(
            [weight],
            [gradient],
            _given(first),
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=first_step,
        )


@dataclass(frozen=True, kw_only=True)
class LionRule:
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool
    step: float

    def constants(self, gradient_scale: float) -> Constants:
        return Constants(
            rule=Rule.LION,
            maximize=self.maximize,
            seed=int(self.step) * 0x9E3779B9 & 0xFFFFFFFF,
            gradient_scale=gradient_scale,
            decay=1 - self.lr * self.weight_decay,
            keep_first=self.beta1,
            take_first=1 - self.beta1,
            keep_second=self.beta2,
            take_second=1 - self.beta2,
            step_size=-self.lr,
        )

    def apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        first: torch.Tensor | None,
        second: torch.Tensor | None,
        maximum: torch.Tensor | None,
        *,
        first_step: bool,
    ) -> None:
        (momentum,) = _given(first)
        signed = -gradient if self.maximize else gradient
        direction = momentum.mul(self.beta1).add_(signed, alpha=1 - self.beta1).sign_()
        weight.mul_(1 - self.lr * self.weight_decay).add_(direction, alpha=-self.lr)
        momentum.mul_(self.beta2).add_(signed, alpha=1 - self.beta2)


def _given(tensor: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if tensor is None else [tensor]
