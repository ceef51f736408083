"""Does the part of PyTorch's own optimizer tests that applies to a subclass pass? With its table of inputs."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

import headrace.optim
from headrace.optim import eight_bit, states
from tests.support.compare import assert_same

INFOS = {info.optim_cls.__name__: info for info in optim_db}
UNSUPPORTED = {"foreach", "fused", "capturable", "differentiable"}


def inputs() -> list[Any]:
    found = []
    for name in ("AdamW", "Adam", "SGD", "Adafactor", "Muon"):
        for index, each in enumerate(INFOS[name].optim_inputs_func("cpu")):
            if not UNSUPPORTED & each.kwargs.keys():
                found.append(pytest.param(name, each.kwargs, id=f"{name}-{index}-{each.desc}"))
    return found


@pytest.fixture(params=["host", "disk", "8bit"])
def options(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Where state is, and as what. Overlap and shares of a device say nothing about plain parameters on the CPU."""
    if request.param == "disk":
        monkeypatch.setattr(states, "LEAST_BYTES", 1)
        return {"tier": "disk", "disk": tmp_path}
    if request.param == "8bit" and "test_values" not in request.node.name:
        monkeypatch.setattr(eight_bit, "LEAST_ELEMENTS", 1)
    return {"state_dtype": "8bit"} if request.param == "8bit" else {}


def make(name: str, settings: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3, 5))]
    if name in ("Adafactor", "Muon") and "state_dtype" in options:
        options = {}  # refused: see test_eight_bit.py
    return weights, getattr(headrace.optim, name)(weights, **deepcopy(settings), **options)


def train(weights: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, 0.1 * (step + 1)) * weight.detach().sign()
        optimizer.step()


@pytest.mark.parametrize(("name", "settings"), inputs())
def test_values_equal_the_stock_optimizer(name: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    weights, optimizer = make(name, settings, options)
    others = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    fused = {"fused": True} if name in ("AdamW", "Adam", "SGD") else {}
    reference = INFOS[name].optim_cls(others, **deepcopy(settings), **fused)
    train(weights, optimizer, 7)
    train(others, reference, 7)
    assert_same(weights, others)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "settings"), inputs())
def test_state_dict_round_trip(name: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    weights, optimizer = make(name, settings, options)
    train(weights, optimizer, 3)
    others, other = make(name, settings, options)
    with torch.no_grad():
        for target, source in zip(others, weights, strict=True):
            target.copy_(source)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    assert str(other.state_dict()) == str(optimizer.state_dict())
    train(weights, optimizer, 3)
    train(others, other, 3)
    assert_same(weights, others)


@pytest.mark.extended
@pytest.mark.parametrize(("name", "settings"), inputs())
def test_can_load_older_state_dict(name: str, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Checkpoints from before a setting existed, and from when "step" was a number."""
    weights, optimizer = make(name, settings, options)
    train(weights, optimizer, 2)
    old = deepcopy(optimizer.state_dict())
    for entries in old["state"].values():
        if torch.is_tensor(entries.get("step")):
            entries["step"] = entries["step"].item()
    for group in old["param_groups"]:
        for flag in INFOS[name].supported_impls:
            group.pop(flag, None)
    optimizer.load_state_dict(old)
    train(weights, optimizer, 1)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adafactor", "Muon"])
def test_load_hooks_and_state_dict_hooks(name: str, options: dict[str, Any]) -> None:
    weights, optimizer = make(name, {}, options)
    train(weights, optimizer, 1)
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("save before"))
    optimizer.register_state_dict_post_hook(lambda _, state: seen.append("save after"))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("load before"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append(f"load after {len(optimizer.state)}"))
    optimizer.load_state_dict(optimizer.state_dict())
    expected = ["save before", "save after", "load before", f"load after {len(optimizer.state)}"]
    assert seen == expected


def test_errors_equal_those_of_the_stock_optimizer() -> None:
    for name in ("AdamW", "Adam", "SGD", "Adafactor", "Muon"):
        for error in INFOS[name].optim_error_inputs_func("cpu", torch.float32):
            settings = error.optimizer_error_input.kwargs
            if UNSUPPORTED & settings.keys() or error.error_on is not OptimizerErrorEnum.CONSTRUCTION_ERROR:
                continue
            if name == "Muon" and "only supports 2D" in error.error_regex:
                continue  # the others go by AdamW
            # What PyTorch only warns of (a parameter twice in one group) would be updated by two threads at once.
            wanted = ValueError if error.error_type is UserWarning else error.error_type
            with pytest.raises(wanted, match=error.error_regex):
                getattr(headrace.optim, name)(error.optimizer_error_input.params, **settings)
