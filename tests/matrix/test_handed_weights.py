"""May weights be handed to an autograd.Function or a kernel, handed on, and kept, as those of a plain model may?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import headrace
from tests.support.compare import Outcome, assert_same, on_cpu
from tests.support.held import weight_bytes
from tests.support.loops import random_batches, train
from tests.support.models import seeded
from tests.support.offloaded import assert_exact

WIDTH = 16


class Fused(torch.autograd.Function):
    """A loss over a projection, as fused kernels have it: gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = (inputs[0] @ inputs[1].t()).square().mean()
            ctx.save_for_backward(*torch.autograd.grad(loss, inputs))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(gradients[0] * saved for saved in ctx.saved_tensors)


class Saving(torch.autograd.Function):
    """A projection that saves its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class Handing(nn.Module):
    """Layers, called in turn, of which `use` does something else first or last."""

    def __init__(self, use: Callable[["Handing", Tensor], Tensor]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.use(self, x)


def fused(model: Handing, x: Tensor) -> Tensor:
    return Fused.apply(x, model.head.weight)  # type: ignore[no-untyped-call]


def saving(model: Handing, x: Tensor) -> Tensor:
    return Saving.apply(x, model.head.weight)  # type: ignore[no-untyped-call]


def saving_several(model: Handing, x: Tensor) -> Tensor:
    first, second = model.layers[0].weight, model.head.weight
    return Saving.apply(Saving.apply(x, first), second)  # type: ignore[no-untyped-call]


def kept_in_a_list(model: Handing, x: Tensor) -> Tensor:
    """More than the budget has room for."""
    for weight in [layer.weight for layer in model.layers]:
        x = torch.tanh(Saving.apply(x, weight)) + F.linear(x, weight)  # type: ignore[no-untyped-call]
    return x


def by_address(model: Handing, x: Tensor) -> Tensor:
    """As a kernel of the user's own would read it."""
    weight = model.head.weight
    assert weight.device == x.device
    assert weight.data_ptr() == weight.detach().data_ptr()
    return x * weight.detach().sum()


def batches(device: torch.device, count: int = 5) -> list[Tensor]:
    return random_batches(count, 3, WIDTH, device=device)


@pytest.mark.parametrize("use", [fused, saving, saving_several, kept_in_a_list, by_address])
def test_training(use: Callable[[Handing, Tensor], Tensor], compute_device: torch.device) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Handing(use)

    handle, _ = assert_exact(make, lambda model: train(model, batches(compute_device)), compute_device, 0.45)
    stats = handle.stats()
    assert stats.device_peak_bytes <= stats.device_budget_bytes
    assert stats.onload_bytes > 5 * weight_bytes(make())  # the weights came, in each step


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_what_is_handed_over_has_been_updated(overlap: str) -> None:
    """The update of a weight that a function takes is waited for: large, so that it takes longer than a forward."""
    outcomes = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = Handing(fused)
        model.head = nn.Linear(WIDTH, 1 << 16, bias=False)
        handle = None
        if offloaded:
            handle = headrace.offload(model, device="cpu", device_memory=2 * weight_bytes(model))
        optimizer: Any = (
            headrace.optim.AdamW(model.parameters(), lr=1e-2, overlap=overlap)
            if offloaded
            else torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        )
        outcome = Outcome()
        for batch in batches(torch.device("cpu"), 6):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outcome.outputs.append(on_cpu(loss))
        outcomes.append(outcome.read(model))
        if handle is not None:
            handle.remove()
    assert_same(outcomes[1], outcomes[0])


class Returning(nn.Module):
    """A layer that hands out its own weight, or a part of it."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.part = part

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), self.part(self.weight)


class Collecting(nn.Module):
    """Gives what its layers hand out to the user; `inside`: uses it itself, after other layers."""

    def __init__(self, part: Callable[[Tensor], Tensor], *, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Returning(part) for _ in range(6))
        self.inside = inside

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        parts = []
        for layer in self.layers:
            x, part = layer(x)
            parts.append(part)
        return x + sum(part.square().mean() for part in parts) if self.inside else x, parts


@pytest.mark.core(inside=True)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    "part",
    [lambda w: w, lambda w: w[:2], lambda w: w.t(), lambda w: w.detach(), lambda w: w.view(-1)],
    ids=["itself", "rows", "transposed", "detached", "flat"],
)
def test_a_module_that_returns_its_weight(
    part: Callable[[Tensor], Tensor], gradients: bool, inside: bool, compute_device: torch.device
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Collecting(part, inside=inside)

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        for batch in batches(compute_device, 3):
            with torch.set_grad_enabled(gradients):
                output, parts = model(batch)
            outcome.outputs += [on_cpu(tensor) for tensor in (output, *parts)]
            if gradients:
                model.zero_grad()
                (output.square().mean() + sum(one.square().sum() for one in parts)).backward()
                outcome.read_gradients(model)
            del output, parts
        return outcome.read(model)

    handle, _ = assert_exact(make, script, compute_device, 0.45)
    stats = handle.stats()
    assert stats.device_peak_bytes <= stats.device_budget_bytes


def test_a_weight_that_is_kept_beyond_the_pass_is_the_home(compute_device: torch.device) -> None:
    kept: list[Tensor] = []

    def keep(model: Handing, x: Tensor) -> Tensor:
        kept.append(model.layers[0].weight)
        return x

    torch.manual_seed(0)
    model = Handing(keep)
    home = model.layers[0].weight
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2):
        model(torch.ones(2, WIDTH, device=compute_device))
        assert kept[0] is not home
        assert torch.equal(on_cpu(kept[0]), home.detach())
        (kept[0] * 2).sum().backward()
        assert home.grad is not None
        assert torch.equal(home.grad, torch.full_like(home, 2.0))
    with pytest.raises(headrace.StateError, match="ask the module for its parameter again"):
        kept[0] * 2


def test_hooks_of_backward_see_homes(compute_device: torch.device) -> None:
    torch.manual_seed(0)
    model = Handing(saving)
    homes = [layer.weight for layer in model.layers]
    seen: list[bool] = []
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2):
        output = model(torch.ones(2, WIDTH, device=compute_device))
        output.register_hook(
            lambda _: seen.append(all(w is h.weight for w, h in zip(homes, model.layers, strict=True)))
        )
        output.sum().backward()
    assert seen == [True]


class CallingBackward(torch.autograd.Function):
    """A projection whose backward calls backward() itself, with the weight that it has saved or kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gives: str) -> Tensor:
        ctx.weight = weight if "kept" in gives else None
        ctx.save_for_backward(x, *([] if "kept" in gives else [weight]))
        ctx.gives = gives
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors if ctx.weight is None else (*ctx.saved_tensors, ctx.weight)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x @ weight.t()
        if ctx.gives == "torch.autograd.grad":
            return *torch.autograd.grad(y, (x, weight), *gradients), None
        torch.autograd.backward(y, *gradients)
        return x.grad, None if "no" in ctx.gives else weight.grad, None


@pytest.mark.parametrize("gives", ["weight.grad", "weight.grad of the kept one"])
def test_a_function_that_calls_backward_with_what_it_has_saved_is_refused(
    compute_device: torch.device, gives: str
) -> None:
    def calling(gives: str, model: Handing, x: Tensor) -> Tensor:
        return CallingBackward.apply(x, model.head.weight, gives)  # type: ignore[no-untyped-call]

    model = seeded(Handing, partial(calling, gives))
    with (
        headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2),
        pytest.raises(headrace.StateError, match=r"CallingBackward.* calls backward\(\) for .*'head.weight'.*grad"),
    ):
        train(model, batches(compute_device))
    for sound in ("torch.autograd.grad", "no gradient of the kept one"):
        use = partial(calling, sound)
        assert_exact(lambda: seeded(Handing, use), lambda model: train(model, batches(compute_device)), compute_device)  # noqa: B023


def test_a_checkpoint_may_be_given_a_weight_that_its_function_uses_too(compute_device: torch.device) -> None:
    def use(model: Handing, x: Tensor) -> Tensor:
        def function(x: Tensor, weight: Tensor) -> Tensor:
            return model.head(x) @ weight  # type: ignore[no-any-return]

        return checkpoint(function, x, model.head.weight, use_reentrant=True)  # type: ignore[no-any-return]

    assert_exact(lambda: seeded(Handing, use), lambda model: train(model, batches(compute_device)), compute_device)
