"""What updates the weights of a run, and at which rate? An optimizer of headrace.optim (PyTorch's own in a plain run).

Schedules give the same rates, to the last bit, as those of transformers with the same names. Importing these would
import PEFT, too.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import headrace.optim
from headrace.train.config import DTYPES, TrainConfig

Rule = Callable[..., torch.optim.Optimizer]

_RULES: dict[str, Rule] = {name.lower(): getattr(headrace.optim, name) for name in headrace.optim.__all__}
# PyTorch's own rules to which ours are equal, bit for bit, for float32 weights.
_STOCK: dict[str, Rule] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def make_optimizer(model: nn.Module, config: TrainConfig, *, plain: bool) -> torch.optim.Optimizer:
    """The optimizer of all trainable parameters. With their names, Muon knows which matrices AdamW is to update."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    exact = config.state_dtype == "float32" and all(parameter.dtype is torch.float32 for _, parameter in named)
    if plain and exact and config.optimizer in _STOCK:
        return _STOCK[config.optimizer](named, **settings, fused=True)
    settings["state_dtype"] = DTYPES.get(config.state_dtype, config.state_dtype)
    if config.optimizer == "muon":
        settings["adjust_lr_fn"] = "match_rms_adamw"  # one learning rate then suits Muon and AdamW
    else:
        settings["max_grad_norm"] = config.max_grad_norm or None
    return _RULES[config.optimizer](named, **settings, **({} if plain else _placement(config)))


def _placement(config: TrainConfig) -> dict[str, Any]:
    """The settings that change where and when updates run, but no result."""
    settings: dict[str, Any] = {"overlap": config.overlap, "tier": config.state_tier}
    if config.state_tier == "disk" and config.disk is not None:
        settings["disk"] = config.disk / "optimizer"
    if config.device_fraction is not None and config.compute_device().type != "cpu":
        settings["device_fraction"] = config.device_fraction
    return settings


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
