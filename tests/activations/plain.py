"""What does a kind of model give without headrace? Trained once for each kind, however many tests compare with it."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.compare import Allocations, Outcome, to_device, train
from tests.matrix.models import CASES

STEPS = 3  # recorded, refined, and as planned


@functools.cache
def plain_run(case_name: str, checkpointing: str, training: str, device: torch.device) -> tuple[Outcome, int]:
    """What it gives, and the device bytes that its last forward leaves."""
    case = next(case for case in CASES if case.name == case_name)
    batches = [to_device(batch, device) for batch in case.batches(STEPS)]

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        output = model(batch[0])
        return output, case.loss(output, batch[1])

    model = case.build(checkpointing, training).to(device)
    allocations = Allocations(device)
    outcome = train(model, batches, forward, after_forward=allocations.forward_done)
    return outcome, allocations.after_forward_bytes[-1]
