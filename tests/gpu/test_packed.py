"""Do weights that cross a real link packed have the plain run's bits, and does Triton's kernel give the host's?"""

import pytest
import torch

import headrace
from headrace.memory.packed import Packed, pack, unpack_on_device, unpacks_by_kernel
from headrace.weights.movement import packed_loads, planner
from tests.gpu.runs import EMULATED
from tests.support.models import linears

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 2048, 8
LAYER_BYTES = 2 * WIDTH * WIDTH
BUDGET = 9 * LAYER_BYTES // 2


@pytest.fixture(autouse=True)
def _needs_a_kernel(accelerator: torch.device) -> None:
    if not (EMULATED or unpacks_by_kernel(accelerator)):
        pytest.skip(f"needs Triton for {accelerator.type}")


@pytest.mark.parametrize("count", [1_000_000, 1_234_567, 16 << 20])
def test_every_pattern_is_unpacked_as_the_host_does(accelerator: torch.device, count: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    words = torch.cat([every, torch.randn(count - len(every)).bfloat16().view(torch.int16)])
    memory = pack(words)
    assert memory is not None
    at_home, out = Packed.in_memory(memory), torch.empty_like(words, device=accelerator)
    unpack_on_device(Packed(memory.to(accelerator), at_home.words, at_home.escapes), out)
    assert torch.equal(out.cpu(), words)


def test_passes_are_the_plain_runs(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds decide nothing here: what is worth it, `benchmarks/packed_link.py` measures."""
    monkeypatch.setattr(packed_loads, "PIECES_OF_BUDGET", 8)
    monkeypatch.setattr(packed_loads, "LEAST_PIECE_BYTES", 4 << 20)
    monkeypatch.setattr(packed_loads, "WORTH", float("inf"))
    monkeypatch.setattr(planner, "WAITS", -1)
    if EMULATED:
        monkeypatch.setattr(packed_loads, "unpacks_by_kernel", lambda _: True)
    torch.manual_seed(0)
    model = linears(LAYERS, WIDTH, bias=False, dtype=torch.bfloat16)
    model.requires_grad_(False)
    inputs = torch.randn(64, WIDTH, device=accelerator).bfloat16()
    with torch.no_grad():
        want = model.to(accelerator)(inputs).cpu()
        model.to("cpu")
        with headrace.offload(model, device=accelerator, device_memory=BUDGET, packed=True) as handle:
            for _ in range(30):
                handle.reset_stats()
                assert torch.equal(model(inputs).cpu(), want)
                handle.synchronize()
            stats = handle.stats()
    assert 0 < stats.onload_packed_bytes < 0.76 * stats.onload_unpacked_bytes
    assert stats.device_peak_bytes <= BUDGET
