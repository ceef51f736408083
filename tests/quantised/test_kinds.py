"""Do quantised models compute offloaded what they compute without, and do packed bytes travel and nothing else?"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.quantised.kinds import KINDS, LAYERS, WIDTH
from tests.support.compare import assert_same
from tests.support.loops import fine_tune

STEPS = 5
RESIDENT_BYTES = 48 << 10  # adapters and biases, at most
QUANTISED = LAYERS * WIDTH * WIDTH  # weights
CPU = torch.device("cpu")

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]
emulated = pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.emulated])


def trained(model: nn.Module, batch: Tensor) -> list[Tensor]:
    return fine_tune(model, [batch] * STEPS, lambda model, batch: model(batch).float().square().sum())


def inferred(model: nn.Module, batch: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [model(batch).cpu() for _ in range(3)]


def offload(name: str, model: nn.Module, device: torch.device, disk: Path | None) -> headrace.Offloaded:
    """With room for adapters and three of eight quantised layers; on disk, host memory for some of those."""
    budget_bytes = RESIDENT_BYTES + int(3 * WIDTH * WIDTH * KINDS[name].bits / 8)
    tiers: dict[str, Any] = {}
    if disk is not None:
        tiers = {"host_memory": int(QUANTISED * KINDS[name].bits / 8 * 0.8), "disk": disk}
    return headrace.offload(model, device=device, device_memory=budget_bytes, blocks=list(model), **tiers)


def check_inference(name: str, device: torch.device, disk: Path | None = None) -> None:
    kind = KINDS[name]
    plain = inferred(kind.model(), kind.batch(CPU))
    model = kind.model()
    with offload(name, model, device, disk) as handle:
        assert_same(inferred(model, kind.batch(CPU)), plain)
        stats = handle.stats()
        assert stats.device_peak_bytes <= stats.device_budget_bytes
        packed_bytes = QUANTISED * kind.bits / 8 + RESIDENT_BYTES
        assert QUANTISED * 3 / 8 < stats.onload_bytes <= 3 * packed_bytes
        if disk is not None:
            assert stats.fetch_bytes > 0
    assert_same(inferred(model, kind.batch(CPU)), plain, "remove() gives the model back")


def check_training(name: str, device: torch.device, disk: Path | None = None) -> None:
    kind = KINDS[name]
    plain = trained(kind.model(), kind.batch(CPU))
    model = kind.model()
    with offload(name, model, device, disk) as handle:
        assert_same(trained(model, kind.batch(CPU)), plain)
        stats = handle.stats()
        assert stats.device_peak_bytes <= stats.device_budget_bytes
        assert stats.onload_bytes > QUANTISED * 3 / 8
        if disk is not None:
            assert stats.fetch_bytes > 0
        adapter_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        assert stats.offload_bytes == STEPS * adapter_bytes, "gradients of adapters come back, and nothing else"


@pytest.mark.core(on_disk=True)
@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("name", list(KINDS))
def test_inference_is_that_of_the_quantised_model(name: str, on_disk: bool, tmp_path: Path) -> None:
    check_inference(name, CPU, tmp_path if on_disk else None)


@pytest.mark.core(on_disk=True)
@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.trains])
def test_adapters_train_beside_a_quantised_base(name: str, on_disk: bool, tmp_path: Path) -> None:
    check_training(name, CPU, tmp_path if on_disk else None)


@pytest.fixture
def accelerator(emu_device: ModuleType) -> Iterator[torch.device]:
    yield torch.device("emu:1")
    tables = sys.modules.get("bitsandbytes.backends.utils")
    if tables is not None:
        tables._code_4bit_cache.clear()  # it keeps one for each device it saw


@pytest.mark.extended
@emulated
def test_inference_on_an_accelerator(name: str, accelerator: torch.device) -> None:
    with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles for devices that it does not know
        check_inference(name, accelerator)


@pytest.mark.extended
@emulated
def test_adapters_train_on_an_accelerator(name: str, accelerator: torch.device) -> None:
    with torch.compiler.set_stance("force_eager"):
        check_training(name, accelerator)
