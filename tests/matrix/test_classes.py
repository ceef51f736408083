"""Are the classes of modules left alone? Code may look at its own type, count its subclasses, or override its call."""

import copy
import pickle
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.weights.passes.call import Site
from headrace.weights.passes.managed import Managed
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import infer
from tests.support.offloaded import assert_exact

WIDTH = 16


class Looking(nn.Module):
    """Does something else in a subclass, and finds its parent by its type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if type(self) is Looking else x * 0


class Abstract(ABC, nn.Module):
    """Has another layout in memory than nn.Module."""

    @abstractmethod
    def width(self) -> int: ...


class Concrete(Abstract):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def width(self) -> int:
        return WIDTH

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Registered(nn.Module):
    """Refuses a second subclass of a name, and wants a keyword of each."""

    known: ClassVar[dict[str, type]] = {}
    calls = 0

    def __init_subclass__(cls, *, kind: str) -> None:
        if cls.__name__ in Registered.known:
            raise ValueError(f"{cls.__name__} is registered twice")
        Registered.known[cls.__name__] = cls

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return torch.tanh(self.linear(x))  # type: ignore[operator]


class Layer(Registered, kind="layer"):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class CallingItself(nn.Module):
    """Goes past nn.Module's call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class CallingSuper(CallingItself):
    """Does something before nn.Module's call."""

    def __call__(self, x: Tensor) -> Tensor:
        return nn.Module.__call__(self, x * 2)  # type: ignore[no-any-return]


def several(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(5)))


def forward(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    output = model(batch)
    return output, output


@pytest.mark.parametrize("kind", [Looking, Concrete, Layer, CallingItself, CallingSuper])
def test_results_and_types(kind: type[nn.Module], compute_device: torch.device) -> None:
    batches = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(s)).to(compute_device) for s in range(3)]
    handle, model = assert_exact(
        lambda: several(kind), lambda model: infer(model, batches, forward), compute_device, 0.5
    )
    assert all(type(module) is kind for module in model)
    assert 0 < handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
    assert handle.stats().onload_bytes > weight_bytes(model)


def test_the_root_may_go_past_nn_modules_call(compute_device: torch.device) -> None:
    class Root(CallingItself):
        def __init__(self) -> None:
            super().__init__()
            self.layers = several(CallingItself)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(super().forward(x))  # type: ignore[no-any-return]

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Root()

    batches = [torch.ones(2, WIDTH, device=compute_device)] * 3
    handle, _ = assert_exact(make, lambda model: infer(model, batches, forward), compute_device, 0.5)
    assert handle.stats().onload_bytes > 0


@pytest.mark.parametrize("kind", [CallingItself, CallingSuper, Layer])
def test_a_call_is_one_call(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """However the class comes to its forward, also after a call that raised before, and called by itself."""
    calls: list[nn.Module] = []
    own = Managed.call

    def call(managed: Managed, module: nn.Module, *args: Any) -> Any:
        calls.append(module)
        return own(managed, module, *args)

    def fail(*_: Any) -> None:
        raise RuntimeError("before forward")

    monkeypatch.setattr(Managed, "call", call)
    monkeypatch.setattr(Site, "is_inside", lambda _: False)  # such calls leave it out
    model = several(kind)
    with headrace.offload(model, device="cpu"):
        model(torch.ones(2, WIDTH))
        assert calls == [model, *(one for layer in model for one in (layer, layer.linear))]
        if kind is not CallingItself:
            hook = model[0].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="before forward"):
                model(torch.ones(2, WIDTH))
            hook.remove()
        calls.clear()
        model[0].forward(torch.ones(2, WIDTH))
        assert calls == ([model[0].linear] if kind is Layer else [model[0], model[0].linear])


def test_methods_that_were_kept_are_those_of_the_plain_model_afterwards() -> None:
    model = several(Layer)
    with headrace.offload(model, device="cpu"):
        model(torch.ones(2, WIDTH)).sum().backward()
        kept = model.zero_grad, model._apply, model[0].__getstate__
    kept[0]()
    assert all(parameter.grad is None for parameter in model.parameters())
    kept[1](lambda tensor: tensor.double())
    assert next(model.parameters()).dtype == torch.float64
    assert kept[2]().keys() == vars(model[0]).keys()


def test_classes_are_not_subclassed() -> None:
    calls = Layer.calls
    model = several(Layer)
    with headrace.offload(model, device="cpu"):
        model(torch.ones(2, WIDTH))
    assert Registered.known == {"Layer": Layer}
    assert Layer.calls == calls + 5
    assert not Layer.__subclasses__()


def test_initialisation_by_type() -> None:
    """PyTorch's own example for nn.Module.apply."""

    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            module.weight.fill_(1.0)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with headrace.offload(model, device="cpu"):
        model.apply(initialise)
        assert (model(torch.ones(1, 4)) != 0).all()
    assert all(bool((layer.weight == 1).all()) for layer in model)


def test_nothing_is_left_behind(compute_device: torch.device) -> None:
    model = several(Concrete)
    before = [(dict(vars(module)), type(module._parameters)) for module in model.modules()]
    headrace.offload(model, device=compute_device).remove()
    for module, (attributes, kind) in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert type(module._parameters) is kind


class Located(nn.Module):
    """As transformers' and diffusers' models are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def test_device_is_where_the_model_computes(compute_device: torch.device) -> None:
    own = Located.__dict__["device"]
    first, second, other = Located(), Located(), Located()
    with headrace.offload(first, device=compute_device):
        with headrace.offload(second, device=compute_device):
            assert first.device == second.device == compute_device
            assert other.device == torch.device("cpu")
        assert second.device == torch.device("cpu")
        assert first.device == compute_device
    assert first.device == torch.device("cpu")
    assert Located.__dict__["device"] is own


class WithOwnCopies(nn.Module):
    """Says itself how it is copied and pickled."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.copies = 0

    def __deepcopy__(self, memo: Any) -> "WithOwnCopies":
        copied = WithOwnCopies(copy.deepcopy(self.linear, memo))
        copied.copies = self.copies + 1
        return copied

    def __getstate__(self) -> Any:
        return self.__dict__ | {"copies": -1}


def test_own_ways_of_copying_are_kept(compute_device: torch.device) -> None:
    model = nn.Sequential(*(WithOwnCopies(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    with headrace.offload(model, device=compute_device, activations=True):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)
    assert [one[0].copies for one in copies] == [1, -1, 0]
    for one in copies:
        assert_same(one.parameters(), expected)
    for one in copies[:2]:
        assert not any("_compiled_call_impl" in vars(module) for module in one.modules())
        assert all(type(parameter) is nn.Parameter for parameter in one.parameters())
