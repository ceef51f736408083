"""How does the learning rate go up and down? As in transformers' schedules of the same names, to the last bit.

They are written anew because importing those of transformers would import PEFT, too, and with it bitsandbytes.
"""

import math
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from headrace.train.config import TrainConfig

__all__ = ["make_schedule"]


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
