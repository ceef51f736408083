"""When a model writes to weights as it computes, does what it computes and looks at next see that, as a plain one's?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headrace
from tests.support.compare import Outcome, assert_same, on_cpu
from tests.support.held import weight_bytes
from tests.support.models import TanhLayer

WIDTH = 16


class Writing(nn.Module):
    """Layers, with which `act` does something before the second is called, once it is `on`."""

    def __init__(self, act: Callable[["Writing", Tensor], Tensor]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(TanhLayer(WIDTH) for _ in range(5))
        self.kept: list[Any] = []  # homes, from before the pass
        self.aliases: list[Tensor] = []  # tensors over the same memory
        self.act = act
        self.on = False
        self.seen: list[Tensor] = []
        self.optimizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.on and index == 1:
                with torch.no_grad():
                    added = self.act(self, x)
                x = x + added
            x = layer(x)
        return x


Act = Callable[[Writing, Tensor], Tensor]


def by_data_of_the_home(model: Writing) -> None:
    model.kept[3].data.mul_(1.5)


def by_new_data_of_the_home(model: Writing) -> None:
    model.kept[3].data = model.kept[3].data * 1.5


def in_place_to_the_home(model: Writing) -> None:
    assert model.kept[3].mul_(1.5) is model.kept[3]


def by_a_tensor_to_the_home(model: Writing) -> None:
    assert model.kept[3].copy_(torch.ones(WIDTH, WIDTH)) is model.kept[3]


def in_place_to_the_attribute(model: Writing) -> None:
    model.layers[3].linear.weight.mul_(1.5)


def by_data_of_the_attribute(model: Writing) -> None:
    model.layers[3].linear.weight.data.mul_(1.5)


def by_an_optimizer(model: Writing) -> None:
    model.optimizer.step()


def to_attribute_and_home(model: Writing) -> None:
    model.layers[3].linear.weight.mul_(1.5)
    model.kept[3].data.mul_(2)
    model.layers[3].linear.weight.add_(model.layers[2].linear.weight)
    model.kept[3].mul_(0.5)


def to_several_of_a_layer(model: Writing) -> None:
    model.layers[3].linear.bias.add_(1)
    model.kept[3].data.mul_(2)


def with_a_functional(model: Writing, x: Tensor) -> Tensor:
    return F.linear(x, model.kept[3])


def with_the_attribute(model: Writing, x: Tensor) -> Tensor:
    return F.linear(x, model.layers[3].linear.weight, model.layers[3].linear.bias)


def with_a_module_inside(model: Writing, x: Tensor) -> Tensor:
    return model.layers[3].linear(x)


def in_the_layer_alone(_model: Writing, x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def by_a_look_at_data(model: Writing, x: Tensor) -> Tensor:
    model.seen.append(on_cpu(model.kept[3].data))
    return torch.zeros_like(x)


WRITES = [
    by_data_of_the_home,
    by_new_data_of_the_home,
    in_place_to_the_home,
    by_a_tensor_to_the_home,
    in_place_to_the_attribute,
    by_data_of_the_attribute,
    by_an_optimizer,
    to_attribute_and_home,
    to_several_of_a_layer,
]
USES = [with_a_functional, with_the_attribute, with_a_module_inside, in_the_layer_alone, by_a_look_at_data]
PLACES: dict[str, dict[str, Any]] = {"ample": {}, "tight": {"share": 0.5}, "resident": {"resident": ["layers.3"]}}


@pytest.mark.core(gradients=True, place="tight")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("use", USES)
def test_a_write_is_seen(use: Act, place: str, gradients: bool, compute_device: torch.device) -> None:
    for write in WRITES:

        def act(model: Writing, x: Tensor, write: Callable[[Writing], None] = write) -> Tensor:
            write(model)
            return use(model, x)

        expected = outcome_of(act, None, compute_device, gradients=gradients)
        ours = outcome_of(act, PLACES[place], compute_device, gradients=gradients)
        try:
            assert_same(ours, expected)
        except AssertionError as error:
            raise AssertionError(f"{write.__name__}: {error}") from error


@pytest.mark.core(place="tight")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("place", ["ample", "tight"])
@pytest.mark.parametrize("alias", [lambda weight: weight.detach(), lambda weight: weight.view(-1)])
@pytest.mark.parametrize("use", [with_a_functional, in_the_layer_alone])
def test_a_write_through_an_alias_is_seen_when_the_layer_is_called(
    use: Act, alias: Callable[[Tensor], Tensor], place: str, gradients: bool, compute_device: torch.device
) -> None:
    def act(model: Writing, x: Tensor) -> Tensor:
        model.aliases[3].mul_(1.5)
        return use(model, x)

    expected = outcome_of(act, None, compute_device, gradients=gradients, alias=alias)
    assert_same(outcome_of(act, PLACES[place], compute_device, gradients=gradients, alias=alias), expected)


def outcome_of(
    act: Act,
    place: dict[str, Any] | None,
    device: torch.device,
    *,
    gradients: bool,
    alias: Any = torch.clone,
    kind: type[Writing] = Writing,
) -> Outcome:
    """Passes that settle, some in which it acts, and a step. `place`: how it is offloaded; None: the plain model."""
    torch.manual_seed(0)
    model, outcome = kind(act), Outcome()
    batch = torch.randn(3, WIDTH).to(device)
    if place is None:
        model.to(device)
    else:
        options = dict(place)
        memory_bytes = int(weight_bytes(model) * options.pop("share", 100))
        headrace.offload(model, device=device, device_memory=memory_bytes, **options)
    model.kept = [layer.linear.weight for layer in model.layers]
    with torch.no_grad():
        model.aliases = [alias(weight) for weight in model.kept]
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(batch).square().sum().backward()
    with torch.set_grad_enabled(gradients):
        for passes in range(8):
            model.on = passes > 4
            outcome.outputs.append(on_cpu(model(batch)))
    model.on = False
    model.zero_grad()
    model(batch).square().sum().backward()
    outcome.read_gradients(model)
    outcome.outputs += model.seen
    return outcome.read(model)


class Repeating(Writing):
    """Its fourth layer is called four times, with a write before each call but the first."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            for _ in range(3 if index == 3 else 0):
                if self.on:
                    with torch.no_grad():
                        self.act(self, x)
                x = layer(x)
        return x


@pytest.mark.core(gradients=True, place="tight")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_each_of_several_writes_is_seen_by_the_next_call(
    place: str, gradients: bool, compute_device: torch.device
) -> None:
    for write in WRITES:
        act = partial(_returning, write)
        expected = outcome_of(act, None, compute_device, gradients=gradients, kind=Repeating)
        ours = outcome_of(act, PLACES[place], compute_device, gradients=gradients, kind=Repeating)
        assert_same(ours, expected, write.__name__)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("place", ["ample", "tight"])
def test_each_of_several_writes_through_an_alias_is_seen_by_the_next_call(place: str, gradients: bool) -> None:
    """On the CPU, whose copies are over when a call is."""
    device = torch.device("cpu")

    def act(model: Writing, x: Tensor) -> Tensor:
        model.aliases[3].add_(0.25)
        return x

    expected = outcome_of(act, None, device, gradients=gradients, alias=torch.detach, kind=Repeating)
    assert_same(
        outcome_of(act, PLACES[place], device, gradients=gradients, alias=torch.detach, kind=Repeating), expected
    )


def _returning(write: Callable[[Writing], None], model: Writing, x: Tensor) -> Tensor:
    write(model)
    return x
