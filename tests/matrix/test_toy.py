"""How many layers of the toy of the DiffSynth page are on the device at once? Two to three, of ten."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headrace
from tests.support.compare import Outcome, assert_same, on_cpu
from tests.support.held import Allocations, is_counted, peak_activation_bytes, weight_bytes
from tests.support.loops import train
from tests.support.models import Toy, seeded
from tests.support.offloaded import rounding_bytes

LAYERS = 10


def forward(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    output = model(x)
    return output, F.mse_loss(output, x + 1)


def build(width: int, recompute: bool) -> Toy:
    return seeded(Toy, width, LAYERS, recompute=recompute)


def assert_few_blocks(width: int, rows: int, steps: int, recompute: bool, blocks: int, device: torch.device) -> None:
    """Trains plainly and offloaded: equal, within `blocks` layers, and on an accelerator two layers' gradients more."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(rows, width, generator=generator).to(device) for _ in range(steps)]

    def run(model: Any) -> Outcome:
        return train(model, inputs, forward, lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False))

    plain_model = build(width, recompute).to(device)
    activations = peak_activation_bytes(plain_model, inputs[0], forward, device)
    plain = run(plain_model)
    del plain_model

    model = build(width, recompute)
    block_bytes = weight_bytes(model) // LAYERS
    allocations = Allocations(device)
    handle = headrace.offload(model, device=device, device_memory=blocks * block_bytes)
    offloaded = run(model)
    assert_same(offloaded, plain)
    stats = handle.stats()
    assert 2 * block_bytes <= stats.device_peak_bytes <= stats.device_budget_bytes == blocks * block_bytes
    assert stats.device_gradient_peak_bytes <= 2 * block_bytes
    assert stats.offload_bytes == steps * weight_bytes(model)
    # Every layer comes for forward and for backward, but for those that wait at the turns between the two.
    assert steps * (LAYERS + 1) * block_bytes <= stats.onload_bytes <= steps * 2 * LAYERS * block_bytes
    if is_counted(device):
        limit = (blocks + 2) * block_bytes + activations + rounding_bytes(handle, model)
        assert allocations.peak_bytes <= limit


@pytest.mark.core(blocks=2, recompute=True)
@pytest.mark.parametrize("recompute", [False, True], ids=["none", "recompute"])
@pytest.mark.parametrize("blocks", [2, 3])
def test_a_sixteenth_of_its_width(recompute: bool, blocks: int, compute_device: torch.device) -> None:
    assert_few_blocks(256, 32, 3, recompute, blocks, compute_device)


def test_real_size(compute_device: torch.device) -> None:
    """Ten layers of 64 MiB: 640 MiB of weights through 192 MiB."""
    if is_counted(compute_device):
        return  # the emulator's kernels are those of the CPU: nothing new at six times the time
    assert_few_blocks(4096, 8, 1, recompute=False, blocks=3, device=compute_device)


def test_inference_holds_two_layers(compute_device: torch.device) -> None:
    """Any number of passes without gradients: never more than the budget, and the layers go round."""
    model = build(256, recompute=False)
    block_bytes = weight_bytes(model) // LAYERS
    plain = build(256, recompute=False).to(compute_device)
    handle = headrace.offload(model, device=compute_device, device_memory=2 * block_bytes)
    x = torch.randn(4, 256).to(compute_device)
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(on_cpu(model(x)), on_cpu(plain(x)))
    stats = handle.stats()
    assert stats.device_peak_bytes == 2 * block_bytes
    assert stats.onload_bytes <= (5 * LAYERS + 2) * block_bytes  # two are there for a sixth pass
