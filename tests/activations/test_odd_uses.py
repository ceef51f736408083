"""Is a model exact that is called in ways in which few are, and is what cannot be right refused?"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.runtime.autograd import top_hooks
from tests.activations.models import SAVED_BYTES, Layer, Stack, results, rows, step
from tests.activations.test_odd_models import Between
from tests.support.compare import assert_same, same
from tests.support.held import weight_bytes

EVERYTHING: dict[str, Any] = {"min_bytes": 0, "device_memory": 0}
LAYERS = 8


class WritesToWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.mul_(2)


def test_a_backward_that_writes_to_what_others_saved_raises(compute_device: torch.device) -> None:
    """As without headrace: what one node was given, the next one sees changed."""
    model = Between(lambda x: x.sin() + WritesToWhatItSaved.apply(x)).to(compute_device)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, rows(compute_device))
    with headrace.offload_activations(model, **EVERYTHING):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                step(model, rows(compute_device))
    if compute_device.type == "emu":
        from emulator import emu

        emu.take_reports()  # the copy to the host may be torn: nobody may use it


def test_under_function_transforms(compute_device: torch.device) -> None:
    """PyTorch allows no hooks there: the call goes as without headrace."""
    model = Stack(3).to(compute_device)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = rows(compute_device).detach()

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    def transformed() -> list[Tensor]:
        gradients = torch.func.grad(loss)(parameters, x)
        each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x.view(4, 16, -1))
        mapped = torch.vmap(model)(x.view(4, 16, -1)).detach()
        return [tensor.cpu() for tensor in (*gradients.values(), *each.values(), mapped)]

    expected = transformed()
    plain = step(model, rows(compute_device))
    with headrace.offload_activations(model, **EVERYTHING):
        assert_same(transformed(), expected)
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            assert_same(step(model, rows(compute_device)), plain)
        assert_same(step(model, rows(compute_device)), plain)


def test_forward_mode_derivatives(compute_device: torch.device) -> None:
    """They save zeros that have no memory."""
    from torch.autograd import forward_ad

    model = Stack(3).to(compute_device)

    def run() -> list[Tensor]:
        model.zero_grad()
        x = rows(compute_device).detach()
        with forward_ad.dual_level():
            output = model(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(output).tangent
            output.sum().backward()
            return results(model, tangent)

    expected = run()
    with headrace.offload_activations(model, **EVERYTHING) as handle:
        for _ in range(3):
            assert_same(run(), expected)
        assert handle.stats().offloads > 0


def test_a_model_that_calls_another_one(compute_device: torch.device) -> None:
    """Both are offloaded, and neither is a part of the other: the call inside leaves the hooks around it on."""
    inner = Stack(2).to(compute_device)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = inner(layer(x))
            return x

    outer = Outer().to(compute_device)
    expected = step(outer, rows(compute_device))
    with (
        headrace.offload_activations(inner, **EVERYTHING),
        headrace.offload_activations(outer, **EVERYTHING) as handle,
    ):
        for _ in range(3):
            assert_same(step(outer, rows(compute_device)), expected)
            assert top_hooks(True) is None
        assert handle.plan is not None
        assert len(handle.plan.problem.saved) >= 9


def test_threads_that_share_a_model(compute_device: torch.device) -> None:
    model = Stack(6).to(compute_device)
    inputs = [rows(compute_device, seed) for seed in range(4)]

    def gradient(index: int) -> Tensor:
        (result,) = torch.autograd.grad(model(inputs[index]).square().sum(), inputs[index])
        return result.cpu()

    expected = [gradient(index) for index in range(4)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        if compute_device.index is not None:
            torch.accelerator.set_device_index(compute_device.index)
        try:
            for _ in range(6):
                assert same(gradient(index), expected[index])
        except BaseException as error:
            failures.append(error)

    with headrace.offload_activations(model, **EVERYTHING) as handle:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert handle.stats().offloads > 0
    assert handle.stats().host_held_bytes == 0


def test_a_model_that_moved_is_refused(compute_device: torch.device) -> None:
    if compute_device.type == "cpu":
        return
    model = Stack(2)
    with headrace.offload_activations(model):
        model.to(compute_device)
        with pytest.raises(headrace.StateError, match="when the model is on its device"):
            step(model, rows(compute_device))


@pytest.mark.parametrize("compiles", ["layers", "body"])
def test_what_is_compiled_as_one_graph(compiles: str) -> None:
    """Layers that are watched may be a part of the graph, in evaluation too."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Stack(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).sin()

    def make() -> nn.Module:
        model = Outer()
        for part in (model.body,) if compiles == "body" else model.body.layers:
            part.compile(backend="aot_eager", fullgraph=True)  # type: ignore[operator]
        return model

    torch._dynamo.reset()
    expected = step(make(), rows("cpu"))
    model = make()
    with headrace.offload_activations(model, **EVERYTHING) as handle:
        with torch.no_grad():
            model(rows("cpu"))
        for _ in range(3):
            assert_same(step(model, rows("cpu")), expected)
        assert handle.stats().offloads > 0
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"fraction": "0.5"}, "fraction='0.5' is a str"),
        ({"fraction": True}, "fraction=True is a bool"),
        ({"all_leave": "no"}, "all_leave='no' is neither True nor False"),
        ({"tier": "disk", "disk": ""}, "disk='' names no path"),
        ({"layers": 1.5}, "layers=1.5 names no modules: it is a float"),
        ({"layers": [3]}, "layers=3 names no modules: it is a int"),
        ({"modules": 3}, "modules=3 names no modules: it is a int"),
        ({"most_in_flight": 1.5}, "most_in_flight=1.5"),
    ],
    ids=str,
)
def test_settings_of_a_wrong_kind_are_named(settings: dict[str, Any], text: str) -> None:
    model = Stack(2)
    with pytest.raises((TypeError, ValueError), match=text):
        headrace.offload_activations(model, **settings)
    assert type(model) is Stack


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_forward_inside_of_a_backward_leaves_too(with_weights: bool, compute_device: torch.device) -> None:
    """Losses over large batches are computed so: the model's forwards and backwards are in a hook of the loss."""

    def cached(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        parts = [rows(compute_device, seed) for seed in range(3)]
        loss = torch.ones((), device=compute_device, requires_grad=True)

        def go_through_parts(gradient: Tensor) -> None:
            with torch.enable_grad():
                for part in parts:
                    (model(part).square().sum() * gradient).backward()

        loss.register_hook(go_through_parts)
        (loss * 2).backward()
        return results(model)

    expected = cached(Stack(LAYERS).to(compute_device))
    model = Stack(LAYERS)
    if with_weights:
        handle = headrace.offload(
            model, device=compute_device, device_memory=weight_bytes(model) // 2, activations=EVERYTHING
        )
        activations = handle.activations
    else:
        activations = handle = headrace.offload_activations(model.to(compute_device), **EVERYTHING)
    assert activations is not None
    with handle:
        for _ in range(3):
            activations.reset_stats()
            assert_same(cached(model), expected)
        stats = activations.stats()
        assert stats.planned_forwards == 3
        assert stats.offload_bytes >= 3 * (LAYERS - 2) * SAVED_BYTES
        assert stats.onload_bytes == stats.offload_bytes
        assert stats.host_held_bytes == 0


def test_a_checkpoint_around_the_whole_model(compute_device: torch.device) -> None:
    """One that is not reentrant has hooks of its own on top; what the other one computes again may leave."""

    def checkpointed(model: nn.Module, reentrant: bool) -> list[Tensor]:
        model.zero_grad()
        loss = checkpoint(model, rows(compute_device), use_reentrant=reentrant).square().sum()  # type: ignore[union-attr]
        loss.backward()
        return results(model, loss)

    model = Stack(LAYERS).to(compute_device)
    for reentrant in (True, False):
        expected = checkpointed(model, reentrant)
        with headrace.offload_activations(model, **EVERYTHING) as handle:
            for _ in range(3):
                assert_same(checkpointed(model, reentrant), expected)
            assert (handle.stats().offload_bytes > 0) == reentrant
            assert handle.stats().host_held_bytes == 0
