"""Do modules with a policy compute in its dtypes, as if their weights, inputs and outputs were cast by hand?"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.utils.checkpoint import checkpoint

import headrace
from tests.support.compare import Outcome, assert_same, on_cpu, same
from tests.support.loops import adamw, random_batches
from tests.support.models import seeded
from tests.support.offloaded import offload

NARROW, WIDE = torch.bfloat16, torch.float32
WIDTH = 64
HALF = Policy(NARROW)
INTO_WIDE = Policy(NARROW, output_dtype=WIDE)
FOR_NORMS = Policy(WIDE, output_dtype=NARROW)
LAYERS = [f"layers.{index}" for index in range(4)]


class Layer(nn.Module):
    """Takes tensors by name, within a dict, too, and returns several."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = self.down(self.up(self.norm(x)).tanh()) * more["scale"]
        return x + y, y.sum()


class Model(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in LAYERS)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        more = {"scale": torch.full((1,), 0.7, dtype=x.dtype, device=x.device), "rows": torch.arange(3)}
        for layer in self.layers:
            one = partial(layer, more=more)
            x, total = checkpoint(one, x, use_reentrant=False) if self.recomputes else one(x)
            x = x + total
        return self.head(x)  # type: ignore[no-any-return]


def by_hand(model: nn.Module, policies: dict[str, Policy], device: torch.device) -> nn.Module:
    """A copy whose parameters have the dtype that the nearest policy says, and whose modules cast by hooks.

    `policies`: by the names of modules, the outer ones first.
    """
    narrow = copy.deepcopy(model).to(device)
    own = {id(one): theirs for one, theirs in zip(narrow.parameters(), model.parameters(), strict=True)}
    for name, policy in policies.items():
        module = narrow.get_submodule(name)
        for parameter in module.parameters():
            parameter.data = own[id(parameter)].detach().to(device, policy.param_dtype)

        def inputs(_module: Any, args: Any, kwargs: Any, policy: Policy = policy) -> Any:
            return cast(args, policy.param_dtype), cast(kwargs, policy.param_dtype)

        def outputs(_module: Any, _args: Any, output: Any, policy: Policy = policy) -> Any:
            return cast(output, policy.output_dtype)

        if policy.cast_forward_inputs:
            module.register_forward_pre_hook(inputs, with_kwargs=True)
        module.register_forward_hook(outputs)
    return narrow


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    return tuple(cast(item, dtype) for item in value)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def expected_of(
    model: nn.Module, policies: dict[str, Policy], device: torch.device, make_optimizer: Callable[[Any], Any] = adamw
) -> Outcome:
    """Steps of two batches: gradients of casts are summed up in the dtype of the parameters."""
    outcome = Outcome()
    optimizer = make_optimizer(model.parameters())
    batches = random_batches(6, 3, WIDTH, device=device)
    for step in range(3):
        for batch in batches[2 * step : 2 * step + 2]:
            narrow = by_hand(model, policies, device)
            loss = loss_of(narrow, batch)
            outcome.outputs.append(on_cpu(loss))
            loss.backward()
            for parameter, theirs in zip(model.parameters(), narrow.parameters(), strict=True):
                assert theirs.grad is not None
                gradient = on_cpu(theirs.grad).to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        outcome.read_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    narrow = by_hand(model, policies, device).eval()
    with torch.no_grad():
        outcome.outputs.append(on_cpu(narrow(batches[0])))
    return outcome.read(model)


def outcome_of(
    model: nn.Module,
    handle: Any,
    device: torch.device,
    make_optimizer: Callable[[Any], Any] = adamw,
    together: bool = False,
) -> Outcome:
    outcome = Outcome()
    optimizer = make_optimizer(model.parameters())
    batches = random_batches(6, 3, WIDTH, device=device)
    for step in range(3):
        two = batches[2 * step : 2 * step + 2]
        if together:
            outcome.outputs += on_cpu(handle.forward_backward(two, partial(loss_of, model)))
        for batch in () if together else two:
            loss = loss_of(model, batch)
            outcome.outputs.append(on_cpu(loss))
            loss.backward()
        outcome.read_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outcome.outputs.append(on_cpu(model(batches[0])))
    return outcome.read(model)


TWO_LEVELS = {"": INTO_WIDE, "layers.*": HALF, "*.norm": FOR_NORMS}
TWO_LEVELS_BY_HAND = {"": INTO_WIDE} | dict.fromkeys(LAYERS, HALF) | {f"{one}.norm": FOR_NORMS for one in LAYERS}
KINDS: dict[str, tuple[Any, dict[str, Policy]]] = {
    "whole": (INTO_WIDE, {"": INTO_WIDE}),
    "two_levels": (TWO_LEVELS, TWO_LEVELS_BY_HAND),
    "some": ({"layers.*": INTO_WIDE, "layers.2": None}, {one: INTO_WIDE for one in LAYERS if one != "layers.2"}),
    "dtypes": (
        {"": NARROW, "head": Policy(output_dtype=torch.float64), "layers.*": HALF},
        {"": Policy(NARROW, cast_forward_inputs=False)} | dict.fromkeys(LAYERS, HALF),
    ),
}


@pytest.mark.parametrize("kind", ["whole", "two_levels", "some"])
def test_training(kind: str, compute_device: torch.device) -> None:
    given, policies = KINDS[kind]
    expected = expected_of(seeded(Model), policies, compute_device)
    model = seeded(Model)
    with offload(model, compute_device, 0.5, param_dtype=given) as handle:
        assert_same(outcome_of(model, handle, compute_device), expected)
    assert same(model(torch.ones(1, WIDTH)), seeded(Model)(torch.ones(1, WIDTH))) is False


@pytest.mark.parametrize("way", ["recomputed", "together", "disk", "checkpoint", "optimizer"])
def test_two_levels(way: str, compute_device: torch.device, tmp_path: Path) -> None:
    make_optimizer = partial(headrace.optim.AdamW, lr=0.01) if way == "optimizer" else adamw
    expected = expected_of(seeded(Model), TWO_LEVELS_BY_HAND, compute_device, make_optimizer)
    model = seeded(Model, recomputes=way == "recomputed")
    settings: dict[str, Any] = {}
    if way == "checkpoint":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        settings["checkpoint"] = tmp_path / "model.safetensors"
        model = model.to("meta")
    if way in ("disk", "checkpoint"):
        settings |= {"disk": tmp_path / "disk", "host_memory": "512KiB"}
    with offload(model, compute_device, 0.5, param_dtype=TWO_LEVELS, **settings) as handle:
        assert_same(outcome_of(model, handle, compute_device, make_optimizer, together=way == "together"), expected)
        assert handle.stats().fetch_bytes > 0 or not settings
