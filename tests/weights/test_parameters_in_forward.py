"""What do modules see of their parameters while they compute? What they would see without us, however they look."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import millrace


class Product(torch.autograd.Function):
    """To which no override of torch functions comes."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        hidden, weight = context.saved_tensors
        return gradient @ weight, gradient.t() @ hidden


def other_values(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """As of torch.func: parameters of a module are exchanged for one call."""
    return functional_call(inner, {"weight": inner.weight * 2}, (hidden,)) + inner(hidden)


def past_attributes(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    hidden = inner(hidden)
    for parameter in inner._parameters.values():
        assert parameter is not None
        hidden = hidden + parameter.sum()
    weight = inner._parameters["weight"]
    assert weight is not None
    return hidden + weight.mean()


def by_copy(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    copied = copy.deepcopy(inner)
    assert not {"weight", "bias"} & vars(copied).keys()
    return inner(hidden) + copied(hidden.detach().to(copied.weight.device)).detach().to(hidden.device)


def replaced(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    hidden = inner(hidden)
    if inner.training:
        inner.bias = nn.Parameter(torch.full((8,), 0.5))
        inner.eval()
    return hidden


def taken_off(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    weight = inner.weight
    del inner.weight
    assert not hasattr(inner, "weight")
    inner.weight = weight
    return inner(hidden)  # type: ignore[no-any-return]


def written_to(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    hidden = inner(hidden)
    inner.weight.data[0] += 0.25
    return hidden


USES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    use.__name__: use for use in (other_values, past_attributes, by_copy, replaced, taken_off, written_to)
}


class Using(nn.Module):
    def __init__(self, use: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.use = use

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.use(self.inner, hidden)


def trained(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Outputs of three steps, each with a forward without gradients after it, and the weights."""
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        hidden = torch.randn(2, 8)
        output = model(hidden.to(device))
        output.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 1e-3 * parameter.grad
                parameter.grad = None
            seen += [output.detach().cpu(), model(hidden.to(device)).cpu()]
    return seen + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("blocks_on_device", [2, 4])
def test_as_without_us(compute_device: torch.device, name: str, blocks_on_device: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Using(USES[name]), nn.Linear(8, 8), Using(USES[name])]
    model = nn.Sequential(*layers)
    expected = trained(copy.deepcopy(model), torch.device("cpu"))
    budget = blocks_on_device * 512
    with millrace.offload(model, device=compute_device, device_memory=budget, blocks=layers) as handle:
        seen = trained(model, compute_device)
        for module in model.modules():
            assert not [name for name, held in vars(module).items() if isinstance(held, nn.Parameter)]
            assert all(type(parameter) is not nn.Parameter for parameter in module._parameters.values())
        assert handle.stats().device_peak_bytes <= budget + 4 * 512  # gradients of two blocks
        moved = handle.stats().onload_bytes
    assert moved >= 3 * sum(parameter.nbytes for parameter in model.parameters())  # updated weights come again
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(seen, expected, strict=True))


class Twice(nn.Module):
    """Uses its weight, lets `write` do something, and uses it again, each time past torch functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.write: Callable[[], object] = lambda: None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = Product.apply(hidden, self.inner.weight)
        self.write()
        return first + Product.apply(hidden, self.inner.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize("block", ["0", "0.inner"])  # bound while the home is written to, or lent
def test_a_home_that_is_written_to_within_a_call(compute_device: torch.device, block: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Twice())
    plain = copy.deepcopy(model)
    hidden = torch.randn(2, 8)

    def doubling(weight: nn.Parameter) -> Callable[[], object]:
        return lambda: weight.data.mul_(2)

    plain[0].write = doubling(plain[0].inner.weight)
    blocks = [model.get_submodule(block)]
    with torch.no_grad(), millrace.offload(model, device=compute_device, device_memory=4096, blocks=blocks):
        kept = model[0].inner.weight
        model[0].write = doubling(kept)
        for _ in range(3):
            assert torch.equal(model(hidden.to(compute_device)).cpu(), plain(hidden))
        assert torch.equal(kept, plain[0].inner.weight)
