"""Does each share of the update on the host cost its part of the step, as was published? In virtual time."""

import gc
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from headrace.optim import AdamW
from headrace.optim.updates import Updates
from tests.support.models import linears

WIDTH, TOKENS, LAYERS = 256, 1024, 8
FLOPS_PER_SECOND = 2e11
STEP_SECONDS = 3 * LAYERS * 2 * TOKENS * WIDTH * WIDTH / FLOPS_PER_SECOND  # forward, and backward of twice that
PUBLISHED_MS = {0.0: 996, 0.25: 1871, 0.5: 2484, 0.75: 3187, 1.0: 4189}  # Qwen3-30B-A3B, Megatron-Bridge
BESIDE_MS = 3877  # all, with copies beside the update
COPIES = (PUBLISHED_MS[1.0] - BESIDE_MS) / PUBLISHED_MS[0.0]  # over a step
UPDATE = BESIDE_MS / PUBLISHED_MS[0.0] - 1


def stack() -> nn.Module:
    return linears(LAYERS, WIDTH, bias=False)


@pytest.fixture
def measured(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Virtual seconds of a step with this share on the host, and the device's peak bytes."""
    perform = Updates._apply
    nbytes = LAYERS * WIDTH * WIDTH * 4
    rate = 2 * nbytes / (COPIES * STEP_SECONDS)

    def timed(self: Updates, members: Sequence[Any], scale: float) -> None:
        for member in members:
            if member.master.host.device.type == "cpu":
                emu_device.host_works(member.parameter.numel() * 4 / nbytes * UPDATE * STEP_SECONDS, "update")
                member.updated = True
            else:
                perform(self, [member], scale)

    monkeypatch.setattr(Updates, "_apply", timed)

    def measure(share: float) -> tuple[float, int]:
        emu_device.configure(
            dry_run=True,
            allocator="exact",
            flops_per_second=FLOPS_PER_SECOND,
            device_bytes_per_second=1e13,
            h2d_bytes_per_second=rate,
            d2h_bytes_per_second=rate,
            launch_seconds=0,
            op_latency_seconds=0,
            copy_latency_seconds=0,
        )
        model = stack().to("emu")
        optimizer = AdamW(model.parameters(), device_fraction=1 - share, overlap_d2h_h2d=False)
        begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
        for index in range(5):
            if index == 3:
                torch.accelerator.reset_peak_memory_stats()
                begin.record()
            model(torch.empty(TOKENS, WIDTH, device="emu").requires_grad_()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        end.record()
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated()
        del model, optimizer
        gc.collect()
        return begin.elapsed_time(end) / 1e3 / 2, peak

    return measure


@pytest.mark.emu("lazy")
def test_shares_cost_what_was_published(measured) -> None:
    """The ends are published and the shares between follow: within 5% of what was measured there, and linear."""
    baseline, most = measured(0.0)
    moments = 2 * LAYERS * WIDTH * WIDTH * 4
    for share in (0.25, 0.5, 0.75, 1.0):
        seconds, peak = measured(share)
        assert seconds / baseline == pytest.approx(PUBLISHED_MS[share] / PUBLISHED_MS[0.0], rel=0.07)
        linear = baseline + share * (UPDATE + COPIES) * STEP_SECONDS
        assert seconds == pytest.approx(linear, rel=0.02)
        assert most - peak == pytest.approx(share * moments, rel=0.01)
