"""What updates the weights of a run, and at which rate? Optimizers of headrace.optim (PyTorch's own in a plain run).

Schedules are as those of transformers with the same names, to the last bit; importing these would import PEFT, too.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import headrace.optim
from headrace.optim.optimizer import HostOptimizer
from headrace.train.config import DTYPES, TrainConfig

Rule = Callable[..., torch.optim.Optimizer]

_RULES: dict[str, Rule] = {name.lower(): getattr(headrace.optim, name) for name in headrace.optim.__all__}
# PyTorch's own rules to which ours are equal, bit for bit, for float32 weights.
_STOCK: dict[str, Rule] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class Optimizers:
    """The optimizer of all trainable parameters. With Muon, which is for matrices, AdamW updates the others."""

    def __init__(self, model: nn.Module, config: TrainConfig, *, plain: bool) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._max_grad_norm = config.max_grad_norm
        if config.optimizer == "muon":
            matrices = _matrices(model)
            others = [parameter for parameter in self._parameters if parameter not in matrices]
            self.all = [_make("muon", list(matrices), config, plain=plain)]
            if others:
                self.all.append(_make("adamw", others, config, plain=plain))
        else:
            self.all = [_make(config.optimizer, self._parameters, config, plain=plain)]

    def step(self) -> None:
        """Clips gradients, unless a single optimizer does so itself, and updates."""
        if self._max_grad_norm and not (len(self.all) == 1 and isinstance(self.all[0], HostOptimizer)):
            nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        for optimizer in self.all:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.all:
            optimizer.zero_grad()

    def consolidate(self) -> None:
        """Gives the first rank the state of all ranks, if state is dealt out to them. All ranks call this."""
        for optimizer in self.all:
            if isinstance(optimizer, HostOptimizer):
                optimizer.consolidate_state_dict(to=0)


def _make(rule: str, parameters: Sequence[nn.Parameter], config: TrainConfig, *, plain: bool) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    exact = config.state_dtype == "float32" and all(parameter.dtype is torch.float32 for parameter in parameters)
    if plain and exact and rule in _STOCK:
        return _STOCK[rule](parameters, **settings, fused=True)
    if rule == "muon":
        settings["adjust_lr_fn"] = "match_rms_adamw"  # one learning rate then suits Muon and AdamW
    settings["state_dtype"] = DTYPES.get(config.state_dtype, config.state_dtype)
    if config.optimizer != "muon":
        settings["max_grad_norm"] = config.max_grad_norm or None
    return _RULES[rule](parameters, **settings, **({} if plain else _placement(rule, config)))


def _placement(rule: str, config: TrainConfig) -> dict[str, Any]:
    """The settings that change where and when updates run, but no result."""
    settings: dict[str, Any] = {"overlap": config.overlap, "tier": config.state_tier}
    if config.state_tier == "disk" and config.disk is not None:
        settings["disk"] = config.disk / ("optimizer" if rule == config.optimizer else f"optimizer-{rule}")
    if config.device_fraction is not None and config.compute_device().type != "cpu":
        settings["device_fraction"] = config.device_fraction
    return settings


def _matrices(model: nn.Module) -> dict[nn.Parameter, None]:
    """The trainable matrices that Muon updates: all but those of embeddings and of the head that gives logits."""
    outside = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    get_head = getattr(model, "get_output_embeddings", None)
    if get_head is not None and (head := get_head()) is not None:
        outside.append(head.weight)
    tables = {id(weight) for weight in outside}
    return {
        parameter: None
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and id(parameter) not in tables
    }


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, *, steps: int) -> LRScheduler:
    """A schedule that rises from 0 in the warm-up; then it is constant, or falls to 0 linearly or in half a cosine."""
    return LambdaLR(optimizer, partial(_share, kind=config.schedule, warmup=config.warmup_steps, steps=steps))


def _share(step: int, *, kind: str, warmup: int, steps: int) -> float:
    """The share of the configured learning rate at a step."""
    if step < warmup:
        return step / warmup
    falls = max(1, steps - warmup)
    if kind == "linear":
        return max(0.0, (steps - step) / falls)
    if kind == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((step - warmup) / falls))))
    return 1.0
