"""How does the learning rate go up and down? A schedule of transformers for each optimizer."""

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from headrace.train.config import TrainConfig

__all__ = ["make_schedule"]


def make_schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, *, steps: int) -> LRScheduler:
    """From 0 up within the warm-up, then constant, or down to 0 in a line or half a cosine at the last of `steps`."""
    name = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    schedule: LRScheduler = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
    )
    return schedule
