"""By which steps do the compatibility tests train a model, with and without offloading?"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tests.support.compare import Outcome
from tests.support.loops import adamw, steps, trained_parameters


def adds_one(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), x + 1)


def run_steps(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    after_backward: Callable[[], None] = lambda: None,
    *,
    micro_batches: int = 1,
) -> Outcome:
    """Steps of AdamW that teach `model` to add one to its input; a step for each `micro_batches` inputs."""
    model.zero_grad()
    losses = steps(
        model,
        adamw(trained_parameters(model)),
        inputs,
        adds_one,
        micro_batches=micro_batches,
        after_backward=after_backward,
        keep_gradients=True,
    )
    return Outcome(losses).read_gradients(model).read(model)
