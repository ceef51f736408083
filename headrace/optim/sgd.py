"""Which settings do SGD and Lion have? Those of their authors, and those that say where state and update live."""

from typing import Any, Unpack

import torch
from torch.optim import Optimizer

from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Given, Options
from headrace.optim.rules import LionRule, SgdRule


class SGD(HostOptimizer, torch.optim.SGD):
    """torch.optim.SGD with state and update in host memory. Other settings are those of `headrace.optim.AdamW`.

    float32 parameters change bit for bit as with `torch.optim.SGD(fused=True)` on the CPU.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **options: Unpack[Given],
    ) -> None:
        own, stock = Options.of(self, options), (lr, momentum, dampening, weight_decay, nesterov)
        super().__init__(params, *stock, maximize=maximize, foreach=False, options=own)

    def _rule(self, group: dict[str, Any], step: float) -> SgdRule:
        return SgdRule.of(group, step)


class _LionGroups(Optimizer):
    """The defaults and param groups of Lion, which torch.optim does not have."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        lr, betas, weight_decay = defaults["lr"], defaults["betas"], defaults["weight_decay"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"lr has {lr.numel()} elements; give a float or a tensor of one element")
        if not float(lr) >= 0:
            raise ValueError(f"lr={lr} is negative")
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{index}]={beta} is outside [0, 1)")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay={weight_decay} is negative")
        super().__init__(params, defaults)


class Lion(HostOptimizer, _LionGroups):
    """Lion (Chen et al., 2023): the sign of an interpolated momentum, with decoupled weight decay.

    Other settings are those of `headrace.optim.AdamW`. The state is "exp_avg", 4 bytes per parameter.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Given],
    ) -> None:
        super().__init__(
            params, options=Options.of(self, options), lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize
        )

    def _rule(self, group: dict[str, Any], step: float) -> LionRule:
        return LionRule.of(group, step)
