"""Is every kind of model exact with its activations on the host, with every checkpointing?"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.activations.plain import STEPS, plain_run
from tests.matrix.compare import Allocations, is_counted, to_device, train
from tests.matrix.models import CASES, CHECKPOINTING, Case


@pytest.mark.core(checkpointing="non-reentrant")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_kind(case: Case, checkpointing: str, compute_device: torch.device) -> None:
    check(case, checkpointing, "full", compute_device)


def test_kind_with_adapters(compute_device: torch.device) -> None:
    """Checkpointed ones are in test_with_weights.py."""
    check(CASES[0], "none", "adapters", compute_device)


def check(case: Case, checkpointing: str, training: str, compute_device: torch.device) -> None:
    batches = [to_device(batch, compute_device) for batch in case.batches(STEPS)]

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        output = model(batch[0])
        return output, case.loss(output, batch[1])

    plain, plain_bytes = plain_run(case.name, checkpointing, training, compute_device)
    model = case.build(checkpointing, training).to(compute_device)
    allocations = Allocations(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        train(model, batches, forward, after_forward=allocations.forward_done).assert_equals(plain)
        stats, plan = handle.stats(), handle.plan
    assert plan is not None
    assert stats.offloads >= STEPS * len(plan.offloaded) > 0
    assert stats.onload_bytes >= (STEPS - 1) * plan.host_bytes  # recording lets go late
    assert stats.host_held_bytes == 0
    assert plan.host_bytes > 0.5 * sum(plan.problem.saved[index].nbytes for index in plan.problem.uses)
    if is_counted(compute_device):
        assert plain_bytes - allocations.after_forward_bytes[-1] >= 0.8 * plan.host_bytes
