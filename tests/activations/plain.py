"""What does a kind of model give without headrace? Trained once for each kind, however many tests compare with it."""

import functools

import torch

from tests.matrix.models import CASES
from tests.support.compare import Outcome
from tests.support.held import Allocations
from tests.support.loops import train

STEPS = 3  # recorded, refined, and as planned


@functools.cache
def plain_run(case_name: str, checkpointing: str, training: str, device: torch.device) -> tuple[Outcome, int]:
    """What it gives, and the device bytes that its last forward leaves."""
    case = next(case for case in CASES if case.name == case_name)
    batches = case.on(device, STEPS)

    model = case.build(checkpointing, training).to(device)
    allocations = Allocations(device)
    outcome = train(model, batches, case.forward, after_forward=allocations.forward_done)
    return outcome, allocations.after_forward_bytes[-1]
