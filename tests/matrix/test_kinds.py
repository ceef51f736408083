"""Is every kind of model exact and within its budget, with every checkpointing and however much of it is trained?"""

import pytest
import torch
from torch import nn

import headrace
from tests.matrix.models import CASES, CHECKPOINTING, Case
from tests.support.compare import Outcome, assert_same
from tests.support.held import Allocations, is_counted, peak_activation_bytes, weight_bytes
from tests.support.loops import adamw, infer, train
from tests.support.offloaded import assert_moves_as_planned, largest_block_bytes, rounding_bytes

STEPS = 3


@pytest.mark.core(checkpointing="non-reentrant", training="full")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("training", ["full", "adapters", "inference"])
def test_kind(case: Case, checkpointing: str, training: str, compute_device: torch.device) -> None:
    batches = case.on(compute_device, STEPS)

    def run(model: nn.Module, allocations: Allocations) -> Outcome:
        runner = infer if training == "inference" else train
        return runner(model, batches, case.forward, after_forward=allocations.forward_done)

    plain_model = case.build(checkpointing, training).to(compute_device)
    plain_allocations = Allocations(compute_device)
    plain = run(plain_model, plain_allocations)
    with torch.set_grad_enabled(training != "inference"):
        activations = peak_activation_bytes(plain_model, batches[0], case.forward, compute_device)
    del plain_model

    model = case.build(checkpointing, training)
    budget = int(weight_bytes(model) * case.share) + sum(buffer.nbytes for buffer in model.buffers())
    allocations = Allocations(compute_device)
    handle = headrace.offload(model, device=compute_device, device_memory=budget)
    offloaded = run(model, allocations)
    assert_same(offloaded, plain)

    stats = handle.stats()
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes == budget
    assert stats.onload_bytes > weight_bytes(model)
    if is_counted(compute_device):
        alive = [
            here - there
            for here, there in zip(allocations.after_forward_bytes, plain_allocations.after_forward_bytes, strict=True)
        ]
        rounding = rounding_bytes(handle, model)
        # The plain run's gradients and optimizer state are on the device after its first step.
        assert 0 < alive[0] <= budget + rounding
        gradients = 0 if training == "inference" else 2 * largest_block_bytes(handle)
        assert allocations.peak_bytes <= budget + rounding + gradients + activations

    optimizer = adamw([p for p in model.parameters() if p.requires_grad]) if training != "inference" else None

    def cycle() -> None:
        if optimizer is None:
            with torch.no_grad():
                case.forward(model, batches[0])
            return
        optimizer.zero_grad()
        case.forward(model, batches[0])[1].backward()
        optimizer.step()

    assert_moves_as_planned(handle, model, cycle)
    handle.remove()
    assert all(p.device.type == "cpu" for p in model.parameters())
