"""What does one update do? A rule works element by element, for the kernel and in PyTorch, or on a whole parameter.

The kernel and PyTorch give the same bits: the kernel follows PyTorch's fused CPU optimizers, and in PyTorch, the rules
call these.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

from headrace.optim import narrow
from headrace.optim.kernel import Constants, Rule
from headrace.runtime.torch_rules import fused_adam, fused_adamw, fused_sgd


@dataclass(frozen=True)
class MatrixRule:
    """One rule at one step that needs a whole parameter: `apply(state, weight, gradient)` updates it in place.

    The weight and the `elementwise` states are in float32 (or float64), in the shape and layout of the parameter.
    """

    apply: Callable[[dict[str, Any], torch.Tensor, torch.Tensor], None]
    elementwise: tuple[str, ...] = ()

    def state_elements(self, shape: torch.Size) -> int:
        """How many elements its states have: of a matrix' rows and columns, if none is `elementwise`."""
        count = shape.numel()
        if self.elementwise or len(shape) < 2:
            return count * max(1, len(self.elementwise))
        return count // max(1, shape[-1]) + count // max(1, shape[-2])


@dataclass(frozen=True, kw_only=True)
class ElementRule(ABC):
    """One rule at one step that works element by element. Its fields are the settings of a param group."""

    kind: ClassVar[Rule]
    elementwise: ClassVar[tuple[str, ...]]  # the names of its moments, at most two, which have the state dtype
    counts_steps: ClassVar[bool] = True  # whether the stock optimizer keeps "step" in its state

    lr: float
    weight_decay: float
    step: float
    maximize: bool = False

    @classmethod
    def of(cls, group: dict[str, Any], step: float, **more: Any) -> Self:
        """The rule of a param group at one step. `more`: settings that a group does not have."""
        beta1, beta2 = map(float, group.get("betas", (0, 0)))
        settings = {**group, "beta1": beta1, "beta2": beta2, "lr": float(group["lr"]), "step": step}
        read = {field.name for field in fields(cls)} - {"bias_correction"}  # groups of other optimizers have it, too
        return cls(**{name: settings[name] for name in read if name in settings}, **more)

    @property
    def moments(self) -> tuple[str, ...]:
        """The names in `elementwise` that are needed with these settings."""
        return self.elementwise

    @property
    def maximum(self) -> str | None:
        """The name of the running maximum, which is in float32; None without one."""
        return None

    def constants(self, gradient_scale: float) -> Constants:
        """The constants of this rule for the native kernel."""
        return Constants(
            rule=self.kind,
            maximize=self.maximize,
            seed=narrow.seed(self.step),
            gradient_scale=gradient_scale,
            **self._constants(),
        )

    @abstractmethod
    def _constants(self) -> dict[str, float]:
        """The constants that rules differ in."""

    @abstractmethod
    def apply(self, weight: torch.Tensor, gradient: torch.Tensor, *states: torch.Tensor, first_step: bool) -> None:
        """Updates flat tensors of one dtype in place, with PyTorch's own kernels. `states`: moments and maximum."""


@dataclass(frozen=True, kw_only=True)
class AdamRule(ElementRule):
    """Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019)."""

    kind = Rule.ADAM
    elementwise = ("exp_avg", "exp_avg_sq")

    beta1: float
    beta2: float
    eps: float
    decoupled: bool
    amsgrad: bool = False
    bias_correction: bool = True

    @property
    def maximum(self) -> str | None:
        return "max_exp_avg_sq" if self.amsgrad else None

    @property
    def _corrected_step(self) -> float:
        """The step for which moments are corrected; infinite if there is nothing to correct."""
        return self.step if self.bias_correction else math.inf

    def _constants(self) -> dict[str, float]:
        added = not self.decoupled and self.weight_decay != 0
        return {
            "flags": 1 if added else 0,
            "decay": self.weight_decay if added else 1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            "keep_first": self.beta1,
            "take_first": 1 - self.beta1,
            "keep_second": self.beta2,
            "take_second": 1 - self.beta2,
            "correction": math.sqrt(1 - self.beta2**self._corrected_step),
            "epsilon": self.eps,
            "step_size": -(self.lr / (1 - self.beta1**self._corrected_step)),
        }

    def apply(self, weight: torch.Tensor, gradient: torch.Tensor, *states: torch.Tensor, first_step: bool) -> None:
        first, second, *maximum = states
        fused = fused_adamw if self.decoupled else fused_adam
        fused(
            [weight],
            [gradient],
            [first],
            [second],
            maximum,
            [torch.full((), self._corrected_step, dtype=torch.float32, device=weight.device)],
            amsgrad=bool(maximum),
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=self.maximize,
        )


@dataclass(frozen=True, kw_only=True)
class SgdRule(ElementRule):
    """Stochastic gradient descent, with momentum and Nesterov's form of it as PyTorch has them."""

    kind = Rule.SGD
    elementwise = ("momentum_buffer",)
    counts_steps = False

    momentum: float
    dampening: float
    nesterov: bool

    @property
    def moments(self) -> tuple[str, ...]:
        return self.elementwise if self.momentum != 0 else ()

    def _constants(self) -> dict[str, float]:
        return {
            "flags": (1 if self.weight_decay != 0 else 0) | (2 if self.nesterov else 0),
            "decay": self.weight_decay,
            "keep_first": self.momentum,
            "take_first": 1 - self.dampening,
            "step_size": -self.lr,
        }

    def apply(self, weight: torch.Tensor, gradient: torch.Tensor, *states: torch.Tensor, first_step: bool) -> None:
        fused_sgd(
            [weight],
            [gradient],
            list(states),
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=first_step,
        )


@dataclass(frozen=True, kw_only=True)
class LionRule(ElementRule):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023)."""

    kind = Rule.LION
    elementwise = ("exp_avg",)

    beta1: float
    beta2: float

    def _constants(self) -> dict[str, float]:
        return {
            "decay": 1 - self.lr * self.weight_decay,
            "keep_first": self.beta1,
            "take_first": 1 - self.beta1,
            "keep_second": self.beta2,
            "take_second": 1 - self.beta2,
            "step_size": -self.lr,
        }

    def apply(self, weight: torch.Tensor, gradient: torch.Tensor, *states: torch.Tensor, first_step: bool) -> None:
        (momentum,) = states
        signed = -gradient if self.maximize else gradient
        direction = momentum.mul(self.beta1).add_(signed, alpha=1 - self.beta1).sign_()
        weight.mul_(1 - self.lr * self.weight_decay).add_(direction, alpha=-self.lr)
        momentum.mul_(self.beta2).add_(signed, alpha=1 - self.beta2)
