"""What of writes while a checkpoint is read, by others than optimizers? They wait, or it fails and says by whom."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
import headrace.optim
from headrace.checkpoint import writing
from tests.support.compare import assert_same
from tests.support.models import linears


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is read before this is set, or somebody waits for what is to be read."""
    event, hurry, fill = threading.Event(), writing.Reading.hurry, writing.Piece.fill

    def hurries(one: Any, parameters: Any) -> None:
        if parameters:
            event.set()
        hurry(one, parameters)

    def waits(piece: Any, memory: torch.Tensor) -> None:
        event.wait(20)
        fill(piece, memory)

    monkeypatch.setattr(writing.Reading, "hurry", hurries)
    monkeypatch.setattr(writing.Piece, "fill", waits)
    return event


@contextmanager
def offloaded(place: str, disk: Path) -> Iterator[nn.Sequential]:
    torch.manual_seed(0)
    model = linears(4, 128)
    tiers = {"host_memory": "160KiB", "disk": disk} if place == "disk" else {}
    handle = headrace.offload(model, device="cpu", device_memory="300KiB", blocks=list(model), **tiers)
    with torch.no_grad():
        model(torch.ones(2, 128))
    yield model
    handle.remove()


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "copy": lambda p: p.data.copy_(torch.ones(128, 128)),
    "pointed": lambda p: setattr(p, "data", torch.ones(128, 128)),
    "multiplied": lambda p: p.data.mul_(2),
}


def loaded(path: Path) -> list[torch.Tensor]:
    again = linears(4, 128)
    headrace.load(path, again)
    return [p.detach() for p in again.parameters()]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_write_through_data_waits(tmp_path: Path, goes_on: threading.Event, place: str, write: str) -> None:
    with offloaded(place, tmp_path / "weights") as model:
        begun = [p.detach().clone() for p in model.parameters()]
        saving = headrace.save(tmp_path / "step-1", model, wait=False)
        for layer in model:
            assert isinstance(layer, nn.Linear)
            WRITES[write](layer.weight)
        saving.wait()
        assert goes_on.is_set()
        assert not torch.equal(model[0].get_parameter("weight"), begun[0])
    assert_same(loaded(tmp_path / "step-1"), begun)


@pytest.mark.parametrize("kind", ["load_state_dict", "mul_"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_write_in_place_is_told(tmp_path: Path, goes_on: threading.Event, place: str, kind: str) -> None:
    with offloaded(place, tmp_path / "weights") as model:
        saving = headrace.save(tmp_path / "step-1", model, wait=False)
        if kind == "mul_":
            with torch.no_grad():
                model[3].get_parameter("bias").mul_(2)  # whose bytes were copied, beside some that were not
                model[3].get_parameter("weight").mul_(2)
        else:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        goes_on.set()
        with pytest.raises(headrace.StateError, match=r"'\d.\w+' was written to while it was being saved.*after wait"):
            saving.wait()
        assert not (tmp_path / "step-1").exists()
        headrace.save(tmp_path / "step-1", model)
        wanted = [p.detach().clone() for p in model.parameters()]
    assert_same(loaded(tmp_path / "step-1"), wanted)


@pytest.mark.parametrize("kind", ["the same", "a part", "around"])
@pytest.mark.parametrize("optimizer", ["torch", "headrace"])
def test_parameters_that_share_memory(tmp_path: Path, goes_on: threading.Event, optimizer: str, kind: str) -> None:
    """Through `.data`, without a common version; the optimizer has one of them, and the other is saved as well."""
    torch.manual_seed(0)
    model = nn.Module()
    model.memory = nn.Parameter(torch.randn(96, 128))
    first, last = {"the same": (0, 96), "a part": (8, 64), "around": (0, 64)}[kind]
    model.between = nn.Parameter(torch.zeros(1200, 1024))  # so that they are not read at once
    model.other = nn.Parameter(torch.zeros(last - first, 128))
    model.other.data = model.memory.data[first:last]
    written = model.memory if kind == "around" else model.other
    chosen: Any = torch.optim.AdamW if optimizer == "torch" else headrace.optim.AdamW
    update = chosen([written], lr=1.0)
    begun = model.memory.detach().clone()
    saving = headrace.save(tmp_path / "step-1", model, wait=False)
    written.grad = torch.ones_like(written)
    update.step()
    assert not torch.equal(model.memory, begun)
    saving.wait()
    again = nn.Module()
    for name, p in model.named_parameters():
        setattr(again, name, nn.Parameter(torch.zeros_like(p)))
    headrace.load(tmp_path / "step-1", again)
    assert torch.equal(again.memory, begun)
    assert torch.equal(again.other, begun[first:last])
