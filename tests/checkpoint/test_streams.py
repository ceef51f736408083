"""Are saving and loading ordered with what devices are about to do, on whichever stream?"""

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import headrace

pytestmark = [
    pytest.mark.emu("lazy", "random:0", "random:1"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def strided(device: str) -> nn.Module:
    """A parameter in order, one in another order, and one of another dtype."""
    torch.manual_seed(0)
    model = nn.Module()
    model.plain = nn.Parameter(torch.randn(64, 64, device=device))
    model.turned = nn.Parameter(torch.randn(64, 64, device=device).t())
    model.narrow = nn.Parameter(torch.randn(64, 64, device=device).bfloat16())
    return model


@pytest.mark.parametrize("kind", ["headrace", "dcp"])
def test_loading_waits_and_is_waited_for(emu_device: ModuleType, tmp_path: Path, kind: str) -> None:
    model = strided("cpu")
    wanted = [p.detach().clone() for p in model.parameters()]
    if kind == "headrace":
        headrace.save(tmp_path / "step-1", model)
    else:
        writer = dcp.FileSystemWriter(tmp_path / "step-1", thread_count=2)
        dcp.save(model.state_dict(), storage_writer=writer, no_dist=True)
    again = strided("emu")
    torch.accelerator.synchronize()
    side = torch.Stream("emu")
    with side, torch.no_grad():
        for p in again.parameters():
            p.mul_(3)
        headrace.load(tmp_path / "step-1", again)
        found = [(p * 1).to("cpu") for p in again.parameters()]
    assert all(map(torch.equal, found, wanted))
    assert emu_device.take_reports() == []
