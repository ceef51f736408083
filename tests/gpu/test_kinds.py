"""Is training and inference on a real accelerator exact and within its budget, for every kind of model?"""

import pytest
import torch
from torch import nn

import headrace
from tests.gpu.runs import Runs
from tests.matrix.models import CASES, CHECKPOINTING, Case
from tests.support.compare import assert_same, assert_same_gradients
from tests.support.held import Allocations, peak_activation_bytes, weight_bytes
from tests.support.offloaded import largest_block_bytes, rounding_bytes

pytestmark = pytest.mark.gpu

KINDS = [(case, checkpointing) for case in CASES for checkpointing in CHECKPOINTING if case.name == "dense"]
KINDS += [(case, "none") for case in CASES if case.name != "dense"]


def copies_of_recurrent_weights(model: nn.Module) -> int:
    """Bytes of copies that cuDNN makes of RNN weights that do not lie as it wants them, and keeps until backward."""
    return sum(p.nbytes for module in model.modules() if isinstance(module, nn.RNNBase) for p in module.parameters())


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize("training", ["full", "adapters", "inference"])
@pytest.mark.parametrize(("case", "checkpointing"), KINDS, ids=[f"{case.name}-{how}" for case, how in KINDS])
def test_kind(case: Case, checkpointing: str, training: str, accelerator: torch.device) -> None:
    runs = Runs(case, accelerator, checkpointing=checkpointing, training=training)
    plain_model, plain = runs.plain()
    with torch.set_grad_enabled(runs.trains):
        activation_bytes = peak_activation_bytes(plain_model, runs.batches[0], runs.case.forward, accelerator)
    del plain_model

    model = runs.build()
    budget_bytes = int(weight_bytes(model) * case.share) + sum(buffer.nbytes for buffer in model.buffers())
    allocations = Allocations(accelerator)
    with headrace.offload(model, device=accelerator, device_memory=budget_bytes) as handle:
        offloaded = runs.run(model, on_host=True, allocations=allocations)
        assert_same(offloaded, plain)
        stats = handle.stats()
        assert stats.onload_bytes > weight_bytes(model)
        assert 0 < stats.device_peak_bytes <= budget_bytes
        limit_bytes = budget_bytes + rounding_bytes(handle, model) + activation_bytes
        if runs.trains:
            limit_bytes += 2 * largest_block_bytes(handle)  # gradients on their way out
        if accelerator.type == "cuda":
            limit_bytes += copies_of_recurrent_weights(model)
        assert 0 < allocations.peak_bytes <= limit_bytes
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in model.parameters())


def test_bfloat16_in_the_least_memory_that_is_allowed(accelerator: torch.device) -> None:
    """One block comes when the last one has gone."""
    runs = Runs(CASES[0], accelerator)
    plain_model = runs.build().bfloat16().to(accelerator)
    plain = runs.run(plain_model, on_host=False)
    model = runs.build().bfloat16()
    with pytest.raises(headrace.BudgetError, match="raise it to at least") as refused:
        headrace.offload(model, device=accelerator, device_memory=1, blocks=[model.layers])
    least = str(refused.value).split("at least ")[1].split(",")[0]
    with headrace.offload(model, device=accelerator, device_memory=least) as handle:
        assert_same(runs.run(model, on_host=True), plain)
        assert handle.stats().device_peak_bytes <= weight_bytes(model) // 2


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_micro_batches_together(case: Case, accelerator: torch.device) -> None:
    """Gradients are those of the plain loop, and weights cross the link as for one micro-batch."""
    batches = case.on(accelerator, 4)
    plain, model = case.build().to(accelerator), case.build()
    losses = []
    for inputs, wanted in batches:
        loss = case.loss(plain(inputs), wanted)
        loss.backward()
        losses.append(loss.detach())
    budget_bytes = int(weight_bytes(model) * case.share) + sum(buffer.nbytes for buffer in model.buffers())
    with headrace.offload(model, device=accelerator, device_memory=budget_bytes) as handle:
        for _ in range(3):  # recorded, planned, followed
            model.zero_grad()
            handle.reset_stats()
            ours = handle.forward_backward(batches, lambda batch: case.loss(model(batch[0]), batch[1]))
        stats = handle.stats()
        assert stats.micro_batches_together == 4
        assert stats.onload_bytes <= 2 * weight_bytes(model) + 4 * stats.row_bytes
        assert_same(ours, losses)
        assert_same_gradients(model, plain)
