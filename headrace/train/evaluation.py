"""How good is the model on text that it does not train on? Measuring leaves no trace in the training that goes on."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from headrace.checkpoint.random_state import random_state, restore_random_state
from headrace.train.data import Sequences
from headrace.train.ranks import World
from headrace.train.run import Run, learned_tokens


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured after `step` steps; `loss` is the mean over all tokens with a label."""

    step: int
    loss: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(run: Run, sequences: Sequences, world: World, *, batch_size: int, step: int) -> Evaluation:
    """The model's loss on all of `sequences`. Restores modes and random numbers afterwards."""
    measured = []
    with _left_as_it_is(run.model):
        for first in range(world.own * batch_size, len(sequences), world.count * batch_size):
            batch = sequences.batch(range(first, min(first + batch_size, len(sequences))))
            count = learned_tokens(batch)
            measured.append((float(run.loss(batch)) * count if count else 0.0, count))
    total, tokens = 0.0, 0
    for loss, count in world.in_turn(measured):
        total += loss
        tokens += count
    return Evaluation(step=step, loss=total / tokens if tokens else math.nan)


@contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """A context with the model in evaluation mode. It restores each module's mode and all random numbers."""
    modes, random = {module: module.training for module in model.modules()}, random_state()
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        restore_random_state(random)
