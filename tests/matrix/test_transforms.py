"""What becomes of an offloaded model that is transformed, traced, quantised or copied? It works, or is refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import headrace
from tests.support.models import linears

X = torch.ones(2, 32)
Transform = Callable[[nn.Module], Any]


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return linears(6, 32, nn.Tanh)


def offloaded() -> tuple[nn.Sequential, headrace.Offloaded]:
    model = stack()
    return model, headrace.offload(model, device="cpu", device_memory=13_000)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() / 2 for name, parameter in model.named_parameters()}


def stacked(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.stack([value, value * 3]) for name, value in values(model).items()}


@pytest.mark.parametrize(
    "transform",
    [
        lambda model: torch.func.jvp(model, (X,), (X,))[1],
        lambda model: torch.func.jacfwd(model)(X),
        lambda model: torch.vmap(model)(X),
        lambda model: functional_call(model, values(model), (X,)),
        lambda model: torch.vmap(lambda one: functional_call(model, one, (X,)))(stacked(model)),
    ],
    ids=["jvp", "jacfwd", "vmap", "functional", "ensemble"],
)
def test_what_works(transform: Transform) -> None:
    """In the first pass already, and after modules were registered elsewhere."""
    model, handle = offloaded()
    plain = stack()
    for _ in range(2):
        assert torch.equal(transform(model), transform(plain))
        assert torch.equal(model(X), plain(X))
    assert handle.stats().onload_bytes > 0
    assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


@pytest.mark.parametrize(
    ("transform", "advice"),
    [
        (lambda model: torch.func.grad(lambda x: model(x).sum())(X), r"call backward\(\)"),
        (lambda model: torch.func.vjp(model, X), r"call backward\(\)"),
        (lambda model: torch.func.jacrev(model)(X), r"call backward\(\)"),
        (
            lambda model: torch.func.grad(lambda one: functional_call(model, one, (X,)).sum())(values(model)),
            r"call backward\(\)",
        ),
        (lambda model: torch.jit.trace(model, X), r"trace copy\.deepcopy\(model\)"),
        (lambda model: torch.export.export(model, (X,), strict=False), r"export copy\.deepcopy\(model\)"),
    ],
    ids=["grad", "vjp", "jacrev", "functional", "trace", "export"],
)
def test_what_is_refused(transform: Transform, advice: str) -> None:
    model, handle = offloaded()
    expected = stack()(X)
    for _ in range(2):
        with pytest.raises(headrace.StateError, match=advice):
            transform(model)
        assert torch.equal(model(X), expected)
    assert handle.stats().onload_bytes > 0
    transform(copy.deepcopy(model))  # as it is advised


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("of", ["weights", "activations", "both", "a block", "wrapped"])
def test_an_export_is_refused_in_one_line(of: str, strict: bool) -> None:
    """The compiler, which follows a strict export, puts words of its own around it."""
    model = stack()
    if of == "activations":
        headrace.offload_activations(model)
    else:
        headrace.offload(model, device="cpu", activations=of == "both")
    expected = model(X)
    exported = {"a block": model[0], "wrapped": nn.Sequential(model)}.get(of, model)
    kind = Exception if strict else headrace.StateError
    with pytest.raises(kind, match=r"torch\.export does not see .* export copy\.deepcopy\(model\)"):
        torch.export.export(exported, (X,), strict=strict)
    assert torch.equal(model(X), expected)
    assert torch.equal(torch.export.export(copy.deepcopy(model), (X,)).module()(X), expected)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_is_not_copied(copies: Callable[[Any], Any]) -> None:
    _, handle = offloaded()
    with pytest.raises(TypeError, match=r"belongs to one model.*copy\.deepcopy\(model\)"):
        copies(handle)


class Packed(torch.Tensor):
    """What a quantiser puts in a weight's place."""


def test_quantised_after_offload() -> None:
    model, handle = offloaded()
    expected = model(X).detach()
    weight = model[3][0].weight
    quantised = nn.Parameter(weight.detach().clone().as_subclass(Packed), requires_grad=False)
    model[3][0].weight = quantised
    with pytest.raises(headrace.LayoutError, match=r"'3\.0\.weight'.*is a Packed now.*remove\(\)"):
        model(X)
    model[3][0].weight = weight
    assert torch.equal(model(X), expected)
    assert handle.stats().onload_bytes > 0


def test_a_parameter_made_of_another_ones_class() -> None:
    """`type(parameter)(tensor)`, as resizing and quantising code writes it, is a plain parameter."""
    model, _ = offloaded()
    plain = stack()
    for one in (model, plain):
        weight = one[2][0].weight
        made = type(weight)(torch.ones_like(weight), requires_grad=True)
        assert type(made) is nn.Parameter
        one[2][0].weight = made
    assert torch.equal(model(X), plain(X))
