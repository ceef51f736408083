"""Is every kind of model exact with its activations on the host, with every checkpointing?"""

import pytest
import torch

import headrace
from tests.activations.plain import STEPS, plain_run
from tests.matrix.models import CASES, CHECKPOINTING, Case
from tests.support.compare import assert_same
from tests.support.held import Allocations, is_counted
from tests.support.loops import train


@pytest.mark.core(checkpointing="non-reentrant")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_kind(case: Case, checkpointing: str, compute_device: torch.device) -> None:
    check(case, checkpointing, "full", compute_device)


def test_kind_with_adapters(compute_device: torch.device) -> None:
    """Checkpointed ones are in test_with_weights.py."""
    check(CASES[0], "none", "adapters", compute_device)


def check(case: Case, checkpointing: str, training: str, compute_device: torch.device) -> None:
    batches = case.on(compute_device, STEPS)

    plain, plain_bytes = plain_run(case.name, checkpointing, training, compute_device)
    model = case.build(checkpointing, training).to(compute_device)
    allocations = Allocations(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        assert_same(train(model, batches, case.forward, after_forward=allocations.forward_done), plain)
        stats, plan = handle.stats(), handle.plan
    assert plan is not None
    assert stats.offloads >= STEPS * len(plan.offloaded) > 0
    assert stats.onload_bytes >= (STEPS - 1) * plan.host_bytes  # recording lets go late
    assert stats.host_held_bytes == 0
    assert plan.host_bytes > 0.5 * sum(plan.problem.saved[index].nbytes for index in plan.problem.uses)
    if is_counted(compute_device):
        assert plain_bytes - allocations.after_forward_bytes[-1] >= 0.8 * plan.host_bytes
