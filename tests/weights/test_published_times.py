"""Does streaming blocks take what others have published for it, and no more? In virtual time, the same at every run."""

import gc
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

import headrace
from headrace.compat.mindie_sd import enable_offload
from headrace.formulas import reserved_peak_blocks, step_seconds
from tests.support.models import Stack

WIDTH, TOKENS, LAYERS = 256, 512, 12
BLOCK_BYTES = WIDTH * WIDTH * 4
FLOPS_PER_SECOND = 2e11
FORWARD_SECONDS = 2 * TOKENS * WIDTH * WIDTH / FLOPS_PER_SECOND
RESIDENT, SEQUENTIAL, LAYERWISE = 74.6, 121.6, 77.3  # published for Wan 2.1 on an H100: vLLM-Omni, pull request 1223


def layers() -> Stack:
    return Stack(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))


@pytest.fixture
def pass_seconds(emu_device: ModuleType) -> Callable[..., tuple[float, int]]:
    """Virtual seconds of a settled pass, and the device's peak bytes, where a load takes so many forwards."""

    def measure(ratio: float, offload: Callable[[Stack], object]) -> tuple[float, int]:
        rate = BLOCK_BYTES / (ratio * FORWARD_SECONDS)
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
        model = layers()
        handle = offload(model)
        begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
        with torch.no_grad():
            for index in range(8):
                if index == 6:
                    torch.accelerator.reset_peak_memory_stats()
                    begin.record()
                model(torch.empty(TOKENS, WIDTH, device="emu"))
        end.record()
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated()
        if isinstance(handle, headrace.Offloaded):
            assert handle.stats().onloads >= LAYERS
            handle.remove()
        gc.collect()
        return begin.elapsed_time(end) / 1e3 / 2, peak

    return measure


def streamed(blocks: int) -> Callable[[Stack], headrace.Offloaded]:
    return lambda model: headrace.offload(
        model, device="emu", device_memory=blocks * BLOCK_BYTES, blocks=[model.layers]
    )


@pytest.mark.emu("lazy")
def test_loads_hide_where_published_ones_nearly_did(pass_seconds) -> None:
    """A load of 0.63 forwards, as the published sequential run says: 1.036 times the resident run there, here 1.00."""
    ratio = SEQUENTIAL / RESIDENT - 1
    alone, most = pass_seconds(ratio, lambda model: model.to("emu"))
    assert alone == pytest.approx(LAYERS * FORWARD_SECONDS, rel=1e-3)
    activations = most - LAYERS * BLOCK_BYTES
    # One block at a time is the sequential run, as the formula for one layer says, too.
    in_turn, _ = pass_seconds(ratio, streamed(1))
    assert in_turn / alone == pytest.approx(SEQUENTIAL / RESIDENT, abs=0.01)
    assert step_seconds(RESIDENT, ratio * RESIDENT) == pytest.approx(SEQUENTIAL)
    for blocks, way in (
        (2, streamed(2)),
        (reserved_peak_blocks(LAYERS, 2), lambda model: enable_offload(model, model.layers, 2)),
    ):
        seconds, peak = pass_seconds(ratio, way)
        assert seconds / alone < 1.005 < LAYERWISE / RESIDENT
        assert peak - activations < (blocks + 0.1) * BLOCK_BYTES  # and what stands for the blocks that are away


@pytest.mark.emu("lazy")
def test_where_the_link_is_the_limit_it_sets_the_pace(pass_seconds) -> None:
    alone, _ = pass_seconds(1.5, lambda model: model.to("emu"))
    seconds, _ = pass_seconds(1.5, streamed(2))
    assert seconds / alone == pytest.approx(1.5, abs=0.01)
