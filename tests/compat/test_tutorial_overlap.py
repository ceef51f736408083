"""Do the tutorial's loaders hide transfers behind compute? In virtual time, which is the same at every run."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.compat.tutorial import (
    DoubleBufferedLoader,
    OffloadSystemConfig,
    OverlappedOffloader,
    TripleBufferedLoader,
    UnifiedOffloadManager,
)
from tests.support.models import linears

WIDTH, ROWS, LAYERS = 256, 4096, 16
LAYER_BYTES = WIDTH * WIDTH * 4
FLOPS_PER_SECOND = 2e11
COMPUTE_SECONDS = 2 * ROWS * WIDTH * WIDTH / FLOPS_PER_SECOND  # of a layer
pytestmark = pytest.mark.emu("lazy")


def seconds_of(run: Callable[[Any], Any]) -> float:
    x = torch.empty(ROWS, WIDTH, device="emu")
    begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    begin.record()
    with torch.no_grad():
        run(x)
    end.record()
    torch.accelerator.synchronize()
    return begin.elapsed_time(end) / 1e3


@pytest.fixture
def link(emu_device: ModuleType) -> Callable[[float], None]:
    """Sets the link such that a layer's copy takes so many times its computation."""

    def configure(ratio: float) -> None:
        rate = LAYER_BYTES / (ratio * COMPUTE_SECONDS)
        emu_device.configure(
            dry_run=True,
            allocator="exact",
            flops_per_second=FLOPS_PER_SECOND,
            device_bytes_per_second=1e13,
            h2d_bytes_per_second=rate,
            d2h_bytes_per_second=rate,
            register_seconds_per_gib=0.0,  # paid once, and these models run for one pass
        )

    return configure


def double(x: Any) -> None:
    loader = DoubleBufferedLoader("emu")
    sources = [torch.empty(WIDTH, WIDTH, pin_memory=True) for _ in range(LAYERS)]
    loader.start_next_load(sources[0])
    for index in range(LAYERS):
        loader.swap_buffers()
        if index + 1 < LAYERS:
            loader.start_next_load(sources[index + 1])
        x = x @ loader.get_current_buffer()


def triple(x: Any) -> None:
    loader = TripleBufferedLoader(WIDTH * WIDTH, torch.float32, "emu")
    sources = [torch.empty(WIDTH, WIDTH, pin_memory=True) for _ in range(LAYERS)]
    loader.forward_with_triple_buffer([torch.matmul] * LAYERS, sources, x)


def overlapped(x: Any) -> None:
    model = linears(LAYERS, WIDTH, bias=False)
    for parameter in model.parameters():
        parameter.data = parameter.data.pin_memory()
    offloader = OverlappedOffloader(model, "emu")
    for index in range(LAYERS):
        x = offloader.step(index, x)


def managed(x: Any) -> None:
    model = linears(LAYERS, WIDTH, bias=False)
    config = OffloadSystemConfig(3 * LAYER_BYTES, 1 << 30, offload_parameters=True, prefetch_count=1)
    manager = UnifiedOffloadManager(model, config)
    for name in manager.tiers.locations():
        x = x @ manager.ensure_gpu(name)
    assert manager.get_memory_summary()["gpu"]["peak_bytes"] <= 3 * LAYER_BYTES
    manager.close(restore=False)


LOADERS = [double, triple, overlapped, managed]


@pytest.mark.parametrize("loader", LOADERS)
def test_loads_no_slower_than_compute_cost_the_first_one(link: Any, loader: Any) -> None:
    link(0.9)
    assert seconds_of(loader) <= 1.05 * (LAYERS + 0.9) * COMPUTE_SECONDS


@pytest.mark.parametrize("loader", LOADERS)
def test_where_loads_are_slower_the_link_sets_the_pace(link: Any, loader: Any) -> None:
    """The tutorial's table has 80 ms for two buffers and 50 ms for three: that is a link 1.6 times as fast."""
    link(1.6)
    assert seconds_of(loader) == pytest.approx((1.6 * LAYERS + 1) * COMPUTE_SECONDS, rel=0.03)


def test_nothing_waits_on_the_host(emu_device: ModuleType, tmp_path: Path) -> None:
    emu_device.configure(dry_run=True)
    for loader in (double, triple):
        emu_device.reset_stats()
        with torch.no_grad():
            loader(torch.empty(ROWS, WIDTH, device="emu"))
        assert emu_device.stats()["host_syncs"] == 0
