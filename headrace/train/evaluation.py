"""How good is the model on text that it does not train on? Measuring leaves no trace in the training that goes on."""

import math
from dataclasses import dataclass

import torch

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

    def __str__(self) -> str:
        return f"evaluation after step {self.step}: loss {self.loss:.4f}, perplexity {self.perplexity:,.2f}"


@torch.no_grad()
def evaluate(run: Run, sequences: Sequences, world: World, *, batch_size: int, step: int) -> Evaluation:
    """The model's loss on all of `sequences`. Restores each module's mode and all random numbers afterwards."""
    modes, random = {module: module.training for module in run.model.modules()}, random_state()
    measured = []
    run.model.eval()
    try:
        for first in range(world.own * batch_size, len(sequences), world.count * batch_size):
            batch = sequences.batch(range(first, min(first + batch_size, len(sequences))))
            count = learned_tokens(batch)
            measured.append((float(run.loss(batch)) * count if count else 0.0, count))
    finally:
        for module, mode in modes.items():
            module.training = mode
        restore_random_state(random)
    total, tokens = 0.0, 0
    for loss, count in world.in_turn(measured):
        total += loss
        tokens += count
    return Evaluation(step=step, loss=total / tokens if tokens else math.nan)
