"""What do modules see of their parameters while they compute? What they would see without us, however they look."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import headrace
from tests.support.compare import assert_same
from tests.support.models import linears


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


def exchanged(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Through the dict, with every way in which a dict is written."""
    own, half = dict(inner._parameters), inner.weight * 0.5
    inner._parameters.update(weight=half)  # type: ignore[arg-type]
    first = inner(hidden)
    inner._parameters.clear()
    inner._parameters |= {"weight": half * 3, "bias": None}  # type: ignore[dict-item]
    second = inner(hidden)
    inner._parameters.update(own)
    return first + second + inner(hidden)  # type: ignore[no-any-return]


def looked_up(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    assert inner._parameters.get("other", inner) is inner
    return Product.apply(hidden, inner._parameters.get("weight"))  # type: ignore[no-any-return]


class Halved(nn.Linear):
    """Whoever asks for its weight gets something made of it."""

    def __getattr__(self, name: str) -> Any:
        held = super().__getattr__(name)
        return held * 0.5 if name == "weight" else held


USES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    use.__name__: use
    for use in (other_values, past_attributes, by_copy, replaced, taken_off, written_to, exchanged, looked_up)
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


@pytest.mark.core(blocks_on_device=2)
@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("blocks_on_device", [2, 4])
def test_as_without_us(compute_device: torch.device, name: str, blocks_on_device: int) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), Using(USES[name]), nn.Linear(8, 8), Using(USES[name])]
    model = nn.Sequential(*layers)
    expected = trained(copy.deepcopy(model), torch.device("cpu"))
    budget = blocks_on_device * 512
    with headrace.offload(model, device=compute_device, device_memory=budget, blocks=layers) as handle:
        seen = trained(model, compute_device)
        for module in model.modules():
            assert not [name for name, held in vars(module).items() if isinstance(held, nn.Parameter)]
            assert all(type(parameter) is not nn.Parameter for parameter in module._parameters.values())
        assert handle.stats().device_peak_bytes <= budget + 4 * 512  # gradients of two blocks
        moved = handle.stats().onload_bytes
    assert moved >= 3 * sum(parameter.nbytes for parameter in model.parameters())  # updated weights come again
    assert_same(seen, expected)


def in_front(device: torch.device) -> nn.Sequential:
    """A tensor of the user's own, as an attribute of the instance, has the place of a weight."""
    model = linears(4, 8)
    vars(model[1])["weight"] = torch.full((8, 8), 0.25, device=device)
    return model


def halved(_device: torch.device) -> nn.Sequential:
    model = linears(4, 8)
    for layer in model:
        layer.__class__ = Halved
    return model


@pytest.mark.parametrize("make", [in_front, halved])
@pytest.mark.parametrize("blocks_on_device", [2, 4])
def test_what_the_model_has_in_front_of_its_weights(
    compute_device: torch.device, make: Callable[[torch.device], nn.Sequential], blocks_on_device: int
) -> None:
    torch.manual_seed(0)
    model = make(compute_device)
    plain = make(torch.device("cpu"))
    plain.load_state_dict(model.state_dict())
    before = [vars(module).get("weight") for module in model]
    expected = trained(plain, torch.device("cpu"))
    with headrace.offload(
        model, device=compute_device, device_memory=blocks_on_device * 512, blocks=[*model]
    ) as handle:
        seen = trained(model, compute_device)
        assert all(vars(module).get("weight") is held for module, held in zip(model, before, strict=True))
        assert handle.stats().onload_bytes >= 3 * 4 * 8 * 9 * 4
    assert_same(seen, expected)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda held: pickle.loads(pickle.dumps(held))])
def test_duplicates_of_what_modules_hold(duplicate: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """They are plain dicts, of no module."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with headrace.offload(model, device="cpu", device_memory=2 * 512, blocks=[*model]):
        model(torch.ones(1, 8))
        copied = duplicate(model[0]._parameters)
        assert type(copied) is dict
        assert list(copied) == ["weight", "bias"]
        assert torch.equal(copied["weight"], model[0].weight)


def kept(inner: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    if inner.training:
        vars(inner)["cached"] = inner.weight
    return inner(hidden)  # type: ignore[no-any-return]


def test_copies_have_what_a_forward_put_into_its_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Using(kept))
    with headrace.offload(model, device="cpu", device_memory=2 * 512, blocks=[*model]):
        model(torch.ones(1, 8))
        copied = copy.deepcopy(model)
        assert torch.equal(vars(copied[1].inner)["cached"], copied[1].inner.weight)


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
    with torch.no_grad(), headrace.offload(model, device=compute_device, device_memory=4096, blocks=blocks):
        kept = model[0].inner.weight
        model[0].write = doubling(kept)
        for _ in range(3):
            assert torch.equal(model(hidden.to(compute_device)).cpu(), plain(hidden))
        assert torch.equal(kept, plain[0].inner.weight)
        model[0].write = lambda: None
        del kept


class WritesOneRow(nn.Module):
    """Of its weight, whose `data` it looks at in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.writes = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        data = self.inner.weight.data
        if self.writes:
            data[0] = 0.5
        return self.inner(hidden.to(data.dtype))  # type: ignore[no-any-return]


def test_a_look_at_data_takes_nothing_from_what_travels_in_a_smaller_dtype(compute_device: torch.device) -> None:
    model = nn.Sequential(WritesOneRow(), WritesOneRow())
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    settings: dict[str, Any] = {"device": compute_device, "blocks": [*model], "param_dtype": torch.bfloat16}
    with headrace.offload(model, **settings), torch.no_grad():
        model(torch.randn(2, 8))
        assert_same([parameter.detach() for parameter in model.parameters()], expected)
        model[0].writes = True
        expected[0][0] = 0.5
        model(torch.randn(2, 8))
        assert_same([parameter.detach() for parameter in model.parameters()], expected)


class Forwarding(nn.Module):
    """As PEFT's models: what it has not, the module inside may have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)  # type: ignore[no-any-return]


def test_copies_of_a_wrapper_are_wrappers() -> None:
    model = Forwarding()
    names = vars(copy.deepcopy(model)).keys()
    with headrace.offload(model, device="cpu", device_memory=2 * 512):
        copied = copy.deepcopy(model)
        assert type(copied) is Forwarding
        assert vars(copied).keys() == names
        assert torch.equal(copied(torch.ones(1, 8)), model(torch.ones(1, 8)))
