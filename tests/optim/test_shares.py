"""Is the share of the state that is updated on the device the one that was asked for, and are the bits the same?"""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace.optim
from headrace.optim import AdamW, states
from tests.optim.references import RULES, give_gradients, parameters
from tests.optim.test_disk import opened
from tests.support.compare import assert_same

SHAPES = ((40, 30), (9,), (130, 70), (), (3, 40, 41))
MATRICES = ((40, 30), (130, 70), (64, 64))


def on_device(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach().to("emu")) for weight in weights]


@pytest.mark.core(fraction=[0.25, 1.0])
@pytest.mark.emu("random:0")
@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "sgd_nesterov", "lion", "adafactor", "muon"])
def test_any_share_gives_the_same_bits(emu_device: ModuleType, name: str, dtype: torch.dtype, fraction: float) -> None:
    own, _, settings = RULES[name]
    settings = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    shapes = MATRICES if name == "muon" else SHAPES
    here = parameters(dtype, shapes)
    there = on_device(here)
    kind = getattr(headrace.optim, own)
    optimizer, other = kind(here, **settings), kind(there, device_fraction=fraction, **settings)
    for step in range(5):
        give_gradients(there, here, step)
        optimizer.step()
        other.step()
        if step == 2:  # the state leaves in the stock format and comes back
            state = copy.deepcopy(other.state_dict())
            for index, entries in optimizer.state_dict()["state"].items():
                for key, value in entries.items():
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(state["state"][index][key]).cpu()), key
            other.load_state_dict(state)
        if step == 3:  # somebody writes weights
            with torch.no_grad():
                here[0].fill_(0.5)
                there[0].fill_(0.5)
    assert_same(there, here)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_own_steps_are_not_taken_for_writes(emu_device: ModuleType, fraction: float) -> None:
    """On either side: after a write a step has to wait for the device to compare weights."""
    here = parameters(torch.bfloat16, SHAPES)
    there = on_device(here)
    optimizer = AdamW(there, device_fraction=fraction)
    give_gradients(there, here, 0)
    optimizer.step()
    assert len(optimizer._states.masters) == len(SHAPES)
    for master in optimizer._states.masters.values():
        master.check_version()
        assert not master.changed


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("name", ["adamw", "sgd_nesterov", "adafactor", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rest_of_the_state_may_be_on_disk(
    emu_device: ModuleType, name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_BYTES", 1)
    own, _, settings = RULES[name]
    settings = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    kind = getattr(headrace.optim, own)
    here = parameters(dtype, MATRICES)
    there = on_device(here)
    optimizer = kind(here, **settings)
    stores, _ = opened(monkeypatch)
    other = kind(there, device_fraction=0.4, tier="disk", disk=tmp_path, **settings)
    for step in range(5):
        give_gradients(there, here, step)
        optimizer.step()
        other.step()
        if step == 2:
            other.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_same(there, here)
    places = {value.device.type for entries in other.entries.values() for value in entries.values() if value.dim()}
    assert places == {"emu"}  # whole parameters: the first two are on disk
    assert sum(store.nbytes for store in stores) > 0


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.37, 0.5, 0.99, 1.0])
def test_the_share_is_what_was_asked_for(emu_device: ModuleType, fraction: float) -> None:
    """Exact to half of the tensor in which the border falls."""
    sizes = (1024, 5120, 3072, *[1024] * 20)
    weights = [nn.Parameter(torch.zeros(size, device="emu")) for size in sizes]
    optimizer = AdamW(weights, device_fraction=fraction)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    before = torch.accelerator.memory_allocated()
    optimizer.step()
    torch.accelerator.synchronize()
    taken = torch.accelerator.memory_allocated() - before
    assert taken / 8 == pytest.approx(fraction * sum(sizes), abs=64 + 512 * (0 < fraction < 1))  # 64: a flag


@pytest.mark.emu("random:0", device_memory=4 << 20)
def test_auto_takes_what_is_free(emu_device: ModuleType) -> None:
    weights = [nn.Parameter(torch.zeros(1 << 13, device="emu")) for _ in range(32)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = AdamW(weights, device_fraction="auto")
    optimizer.step()
    torch.accelerator.synchronize()
    nbytes = sum(weight.nbytes for weight in weights)  # 1 MiB, and as much of gradients; 2 MiB of state
    held = torch.accelerator.memory_allocated() - 2 * nbytes
    assert 0.5 * 2 * nbytes < held < 0.95 * 2 * nbytes


@pytest.mark.emu("random:0")
@pytest.mark.parametrize(
    "settings", [{"pin": False}, {"overlap_d2h_h2d": False}, {"pin": False, "device_fraction": 0.5}]
)
def test_ways_to_travel(emu_device: ModuleType, settings: dict[str, Any]) -> None:
    here = parameters(torch.bfloat16, SHAPES)
    there = on_device(here)
    optimizer, other = AdamW(here), AdamW(there, **settings)
    for step in range(3):
        give_gradients(there, here, step)
        optimizer.step()
        other.step()
    assert_same(there, here)
