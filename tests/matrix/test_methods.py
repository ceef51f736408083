"""Are methods other than `forward` as exact as calls: `encode`, `forward_features`, `generate`? Also what they read."""

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.compare import Outcome, assert_on_host, assert_same, assert_same_models, on_cpu
from tests.support.held import Allocations, peak_activation_bytes, weight_bytes
from tests.support.loops import adamw, random_batches, trained_parameters
from tests.support.models import Layer, seeded
from tests.support.offloaded import assert_exact, offload, rounding_bytes

WIDTH = 32


class Codebook(nn.Module):
    """A table that is looked up without a call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        table = torch.randn(50, WIDTH)
        if kind == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = nn.Parameter(table, requires_grad=kind == "trained")

    def decode(self, codes: Tensor) -> Tensor:
        return F.embedding(codes, self.table)

    def encode(self, x: Tensor) -> Tensor:
        return torch.cdist(x, self.table).argmin(-1)


class Codec(nn.Module):
    def __init__(self, kind: str = "trained") -> None:
        super().__init__()
        self.codebook = Codebook(kind)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(6))

    def decode(self, codes: Tensor, *, scale: float = 1.0) -> Tensor:
        """From codes to sound."""
        x = self.codebook.decode(codes) * scale
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.codebook.encode(x))


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(6, WIDTH))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH, scaled=True) for _ in range(6))
        self.head = nn.Linear(WIDTH, 3)
        self.kept = [layer.scale for layer in self.layers]

    def forward_features(self, x: Tensor) -> Tensor:
        x = self._with_positions(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return x

    def _with_positions(self, x: Tensor) -> Tensor:
        return torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions

    def similarity(self, x: Tensor) -> Tensor:
        """With weights of a layer, and of the head, that nobody calls."""
        layer: Any = self.layers[3]
        return F.linear(F.linear(x, layer.up.weight, layer.up.bias).relu(), layer.down.weight) @ self.head.weight.t()

    def first_look(self, x: Tensor) -> Tensor:
        """By where its weights are, and in what dtype."""
        made = torch.ones(x.shape, device=self.positions.device, dtype=next(self.parameters()).dtype)
        return made.to(next(self.parameters()).device) + x * self.positions[: x.shape[1]]

    def by_list(self, x: Tensor) -> Tensor:
        """With weights that nobody is asked for, and one that is kept while all others are used."""
        weight: Any = self.layers[0].up.weight  # type: ignore[union-attr]
        for scale in self.kept:
            x = x * scale
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, weight)

    def checkpointed(self, x: Tensor) -> Tensor:
        """The first weight that is asked for is in a checkpoint."""
        for layer in self.layers:
            x = checkpoint(self._inner, layer, x, use_reentrant=False)  # type: ignore[assignment]
        return x * self.positions[:5]

    def checkpointed_reentrant(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._inner, layer, x.requires_grad_(), use_reentrant=True)  # type: ignore[assignment]
        return x * self.positions[:5]

    def _inner(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x * self.positions[:5]) + self.positions[1:]  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x)[:, 0])


CODES = torch.arange(12).view(2, 6) * 4 % 50
PIXELS = random_batches(1, 2, 5, WIDTH)[0]

Method = Callable[[Any, torch.device], Tensor]


def decode(model: Any, device: torch.device) -> Tensor:
    return model.decode(CODES.to(device))  # type: ignore[no-any-return]


def decode_table(model: Any, device: torch.device) -> Tensor:
    return model.codebook.decode(CODES.to(device))  # type: ignore[no-any-return]


def features(model: Any, device: torch.device) -> Tensor:
    return model.forward_features(PIXELS.to(device))  # type: ignore[no-any-return]


def similarity(model: Any, device: torch.device) -> Tensor:
    return model.similarity(PIXELS.to(device))  # type: ignore[no-any-return]


def first_look(model: Any, device: torch.device) -> Tensor:
    return model.first_look(PIXELS.to(device))  # type: ignore[no-any-return]


def by_list(model: Any, device: torch.device) -> Tensor:
    return model.by_list(PIXELS.to(device))  # type: ignore[no-any-return]


def checkpointed(model: Any, device: torch.device) -> Tensor:
    return model.checkpointed(PIXELS.to(device))  # type: ignore[no-any-return]


def checkpointed_reentrant(model: Any, device: torch.device) -> Tensor:
    return model.checkpointed_reentrant(PIXELS.to(device).clone())  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "buffer": lambda: seeded(Codec, "buffer"),
    "frozen": lambda: seeded(Codec, "frozen"),
    "trained": lambda: seeded(Codec, "trained"),
    "vision": lambda: seeded(Vision),
}
VISION_METHODS = (features, similarity, first_look, by_list, checkpointed, checkpointed_reentrant)
CASES = [
    *((kind, method) for kind in ("buffer", "frozen", "trained") for method in (decode, decode_table)),
    *(("vision", method) for method in VISION_METHODS),
]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_inference(kind: str, method: Method, compute_device: torch.device) -> None:
    """Also before any call, and in turns with calls."""

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        with torch.no_grad():
            for _ in range(3):
                outcome.outputs.append(on_cpu(method(model, compute_device)))
                outcome.outputs.append(on_cpu(model(PIXELS.to(compute_device))))
        return outcome.read(model)

    assert_exact(MODELS[kind], script, compute_device, 0.5)


@pytest.mark.parametrize(("kind", "method"), [case for case in CASES if case != ("frozen", decode_table)])
def test_training(kind: str, method: Method, compute_device: torch.device) -> None:
    """With the model's own call for the layers that the method does not reach."""

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        optimizer = adamw(trained_parameters(model))
        for step in range(4):
            loss = model(PIXELS.to(compute_device) + step).square().mean()
            loss = loss + method(model, compute_device).square().mean()
            loss.backward()
            outcome.outputs.append(on_cpu(loss))
            outcome.read_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return outcome.read(model)

    assert_exact(MODELS[kind], script, compute_device, 0.5)


@pytest.mark.parametrize(("kind", "method"), [("trained", decode), ("vision", features)])
def test_training_by_the_method_alone(kind: str, method: Method, compute_device: torch.device) -> None:
    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        optimizer = adamw(trained_parameters(model))
        for _ in range(3):
            method(model, compute_device).square().mean().backward()
            outcome.read_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return outcome.read(model)

    assert_exact(MODELS[kind], script, compute_device, 0.5)


def test_bytes_on_the_device(compute_device: torch.device) -> None:
    """Those of a call's budget, and what the method computes."""
    batch = PIXELS.to(compute_device)

    def forward(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        output = model.forward_features(x)
        return output, output.sum()

    plain = seeded(Vision).to(compute_device)
    activation_bytes = peak_activation_bytes(plain, batch, forward, compute_device)
    model = seeded(Vision)
    allocations = Allocations(compute_device)
    handle = offload(model, compute_device, 0.5)
    for _ in range(4):
        with torch.no_grad():
            forward(model, batch)
    budget_bytes = handle.stats().device_budget_bytes
    assert handle.stats().onload_bytes > weight_bytes(model)
    assert allocations.peak_bytes <= budget_bytes + activation_bytes + rounding_bytes(handle, model)
    assert budget_bytes < weight_bytes(model)


def test_layers_come_ahead(compute_device: torch.device) -> None:
    """A method is planned as a call is."""
    model = seeded(Vision)
    handle = offload(model, compute_device, 0.5)
    with torch.no_grad():
        for _ in range(4):
            model.forward_features(PIXELS.to(compute_device))
    assert handle.plan is not None
    assert len(handle.plan.problem.visits) >= len(model.layers)


class Trainer(nn.Module):
    """A model that is trained by a method of its own, with an average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(Layer(WIDTH) for _ in range(4)))
        self.second = nn.Sequential(*(Layer(WIDTH) for _ in range(4)))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros(()))

    def step_after_a_look(self, x: Tensor, optimizer: torch.optim.Optimizer, average: list[Tensor]) -> Tensor:
        scale = self.scale
        self.train_step((x * scale).detach(), optimizer, average)
        with torch.no_grad():
            for mean, parameter in zip(average, self.parameters(), strict=True):
                parameter.lerp_(mean, 0.1)
        return self(x) * self.scale  # type: ignore[no-any-return]

    def train_step(self, x: Tensor, optimizer: torch.optim.Optimizer, average: list[Tensor]) -> Tensor:
        loss = (self.first(x) * self.scale).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        other = (self.second(self.first(x)) * self.scale).square().mean()
        other.backward()
        optimizer.step()
        self.steps += 1
        with torch.no_grad():
            for mean, parameter in zip(average, self.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
        return loss.detach() + other.detach()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale * self.steps


@pytest.mark.parametrize("method", ["train_step", "step_after_a_look"])
def test_a_method_that_trains(method: str, compute_device: torch.device) -> None:
    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        optimizer = adamw(model.parameters())
        average = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for batch in random_batches(3, 2, WIDTH, device=compute_device):
            outcome.outputs.append(on_cpu(getattr(model, method)(batch, optimizer, average)))
            outcome.outputs.append(on_cpu(model(batch)))
        return Outcome(outputs=[*outcome.outputs, *on_cpu(average)]).read(model)

    assert_exact(lambda: seeded(Trainer), script, compute_device, 0.5)


class Generating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(WIDTH) for _ in range(6)))
        self.positions = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def generate(self, x: Tensor) -> Tensor:
        for position in range(4):
            x = self(x + self.positions[position])
        return x


def test_calls_of_the_model_within_are_passes_of_their_own(compute_device: torch.device) -> None:
    def script(model: nn.Module) -> Outcome:
        with torch.no_grad():
            outputs = [on_cpu(model.generate(PIXELS.to(compute_device))) for _ in range(3)]  # type: ignore[operator]
        return Outcome(outputs=outputs).read(model)

    handle, _ = assert_exact(lambda: seeded(Generating), script, compute_device, 0.5)
    assert handle.plan is not None
    assert len(handle.plan.problem.visits) <= 7  # those of one call


class Odd(Vision):
    def state_for(self, x: Tensor) -> dict[str, Tensor]:
        return self.state_dict()

    def fails(self, x: Tensor) -> None:
        raise KeyError(float((x * self.positions[:5]).sum()))

    def stream(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
            yield x

    @property
    def bias(self) -> Tensor:
        return self.head.bias

    def remember(self, x: Tensor) -> Tensor:
        self.kept = x * self.positions[:5]
        return self.positions


def test_what_is_around_methods_is_as_before(compute_device: torch.device) -> None:
    model = seeded(Odd)
    plain = copy.deepcopy(model).to(compute_device)
    x = PIXELS.to(compute_device)
    with offload(model, compute_device, 0.5), torch.no_grad():
        assert_same(model.state_for(x), on_cpu(plain.state_dict()))
        assert all(value.device.type == "cpu" for value in model.state_for(x).values())
        for _ in range(2):
            with pytest.raises(KeyError):
                model.fails(x)
            assert_same(features(model, compute_device), features(plain, compute_device))
        assert_same(list(model.stream(x)), list(plain.stream(x)))
        assert model.bias is model.head.bias
        returned = model.remember(x)
        assert returned.device == x.device
        assert_same(returned, plain.positions.detach(), "a weight that a method returns")
        for parameter in model.parameters():  # as a user goes through them
            assert parameter.device.type == "cpu"
        assert model.positions.device.type == "cpu"
        assert_on_host(model)


def test_methods_look_as_before(compute_device: torch.device) -> None:
    model = seeded(Codec)
    before = dict(vars(model))
    handle = offload(model, compute_device, 0.5)
    assert isinstance(model, Codec)
    assert inspect.signature(model.decode) == inspect.signature(Codec(kind="trained").decode)
    assert model.decode.__name__ == "decode"
    assert model.decode.__doc__ == Codec.decode.__doc__
    assert model.decode.__self__ is model
    assert model.decode.__func__ is Codec.decode
    with torch.no_grad():
        expected = on_cpu(decode(seeded(Codec), torch.device("cpu")))
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)):
            assert "decode" not in vars(copied)
            assert_same(decode(copied, torch.device("cpu")), expected)
        copied_method = copy.deepcopy(model.decode)
        assert copied_method.__self__ is not model
        assert_same(copied_method(CODES), expected)
        kept = model.decode
        handle.remove()
        assert vars(model).keys() == before.keys()
        assert type(vars(model)["_buffers"]) is dict
        assert type(vars(model.codebook)["_parameters"]) is dict
        assert_same(kept(CODES), expected)
    assert_same_models(model, seeded(Codec), some_missing=True)


def saved(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class Caching(nn.Module):
    """Keeps what it has made of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(WIDTH) for _ in range(4)))
        self.register_buffer("table", torch.randn(50, WIDTH))
        self.made: Tensor | None = None
        self.all_made: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.made is None:
            self.made = self.table * 2
            self.all_made = {"both": [self.made, self.made + 1]}
        return self.layers(x) + self.made[:5] + self.all_made["both"][1][:5]  # type: ignore[no-any-return]


def test_what_a_model_keeps_on_the_device_comes_back_with_it(compute_device: torch.device) -> None:
    """With `remove()`, and into copies."""
    model = seeded(Caching)
    with torch.no_grad():
        expected = copy.deepcopy(model)(PIXELS)
        handle = offload(model, compute_device, 0.5)
        model(PIXELS)
        assert_same(copy.deepcopy(model)(PIXELS), expected)
        assert_same(saved(model)(PIXELS), expected)
        model(PIXELS)
        handle.remove()
        assert_same(model(PIXELS), expected)
    assert model.all_made["both"][0] is model.made
