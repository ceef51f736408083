"""Do updates and state follow parameters that are given another dtype, device or layout between steps?"""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from headrace.optim import AdamW, Muon
from tests.support.compare import assert_same

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        optimizer.step()


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 72), nn.Linear(72, 64))


@pytest.mark.core(options={})
@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"tier": "disk"}, {"master_form": "full"}], ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_another_dtype(source: torch.dtype, target: torch.dtype, options: dict[str, Any], tmp_path: Path) -> None:
    """As if a new optimizer had been made that took over the moments."""
    if source == target:
        return
    if "tier" in options:
        options = {**options, "disk": tmp_path}
    model = layers().to(source)
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    train(model, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for entries in saved["state"].values():
        entries.pop("master", None)
        entries.pop("master_remainder", None)
    model.to(target)
    other = copy.deepcopy(model)
    reference = AdamW(other.parameters(), lr=1e-2, **options)
    reference.load_state_dict(saved)
    train(model, optimizer, 3, 7)
    train(other, reference, 3, 7)
    assert_same([*model.parameters()], [*other.parameters()])


@pytest.mark.emu("threads")
@pytest.mark.parametrize("optimizer_class", [AdamW, Muon])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("way", [("emu", "cpu"), ("cpu", "emu")])
def test_another_device(emu_device: ModuleType, way: tuple[str, str], fraction: float, optimizer_class: Any) -> None:
    trained = []
    for devices in (("cpu", "cpu"), way):
        model = layers()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.to(devices[0])
        elsewhere = nn.Parameter(torch.zeros(2, 2, device="emu"))
        optimizer = optimizer_class([*weights, elsewhere], lr=1e-2, device_fraction=fraction)
        train(model, optimizer, 0, 3)
        model.to(devices[1])
        before = [weight.detach().cpu().clone() for weight in weights]
        train(model, optimizer, 3, 6)
        assert not any(torch.equal(one.cpu(), other) for one, other in zip(weights, before, strict=True))
        trained.append(weights)
    if optimizer_class is AdamW:  # the devices multiply matrices in different orders
        assert_same(*trained)


def test_another_shape_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(8, 4))
    optimizer = AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    weight.grad = None
    weight.data = torch.zeros(9, 4)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=r"shape \(8, 4\).* got shape \(9, 4\)"):
        optimizer.step()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_other_strides(tier: str, tmp_path: Path) -> None:
    """In host memory state follows; on disk, where its order is that of the weights, it is refused."""
    model, other = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
    other.load_state_dict(model.state_dict())
    optimizer = AdamW(model.parameters(), tier=tier, disk=tmp_path if tier == "disk" else None)
    reference = AdamW(other.parameters())
    train(model, optimizer, 0, 2)
    train(other, reference, 0, 4)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if tier == "disk":
        with pytest.raises(ValueError, match="strides"):
            train(model, optimizer, 2, 4)
    else:
        train(model, optimizer, 2, 4)
        assert_same([*model.parameters()], [*other.parameters()])
