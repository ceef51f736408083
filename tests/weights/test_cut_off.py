"""Does a backward that cannot reach any trained parameter say so, and no other backward?"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace
from tests.support.held import weight_bytes
from tests.support.models import Adapted, seeded

WIDTH = 16
BATCH = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


class Cut(nn.Module):
    """Adapted layers. What the adapters add may be detached, and the layers recomputed."""

    def __init__(self, *, detached: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted(nn.Linear(WIDTH, WIDTH), WIDTH, 2) for _ in range(4))
        self.detached, self.reentrant = detached, reentrant

    def layer(self, layer: Adapted, x: torch.Tensor) -> torch.Tensor:
        return layer.base(x) + layer(x).detach() if self.detached else layer(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(self.layer, layer, x, use_reentrant=True) if self.reentrant else self.layer(layer, x)
        return x


def offloaded(device: torch.device, check_gradients: bool = True, **options: bool) -> Cut:
    model = seeded(Cut, **options)
    budget = weight_bytes(model) // 2
    headrace.offload(model, device=device, device_memory=budget, blocks="1KiB", check_gradients=check_gradients)
    return model


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_that_are_cut_off_are_named(compute_device, reentrant):
    model = offloaded(compute_device, detached=True, reentrant=reentrant)
    for _ in range(2):  # the error leaves nothing under way
        loss = model(BATCH.clone().requires_grad_()).square().mean()
        with pytest.raises(headrace.StateError, match=r"none of its 8 trained parameters \(such as 'layers.0.down.we"):
            loss.backward()
    model.detached = False
    model(BATCH.clone().requires_grad_()).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    model.detached = True
    model(BATCH.clone().requires_grad_()).square().mean().backward()  # they had gradients before


def test_it_is_off_with_one_word(compute_device):
    model = offloaded(compute_device, check_gradients=False, detached=True)
    batch = BATCH.clone().requires_grad_()
    model(batch).square().mean().backward()
    assert batch.grad is not None
    with pytest.raises(TypeError, match="check_gradients"):
        headrace.offload(seeded(Cut), check_gradients="no")


@pytest.mark.parametrize("way", ["grad", "inputs"])
def test_gradients_of_inputs_alone_are_no_mistake(compute_device, way):
    model = offloaded(compute_device)
    batch = BATCH.clone().requires_grad_()
    loss = model(batch).square().mean()
    if way == "grad":
        (found,) = torch.autograd.grad(loss, batch)
    else:
        loss.backward(inputs=[batch])
        found = batch.grad
    plain = seeded(Cut)
    expected = BATCH.clone().requires_grad_()
    plain(expected).square().mean().backward()
    assert torch.equal(found.cpu(), expected.grad)
    model.detached = True
    model(BATCH.clone().requires_grad_()).square().mean().backward()  # the first backward has been looked at


def test_a_penalty_within_the_forward_is_no_backward(compute_device):
    """It reaches no parameter, and the model's own backward reaches all of them."""

    class Penalised(Cut):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + slope

    model = seeded(Penalised)
    headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2, blocks="1KiB")
    model(BATCH.clone().requires_grad_()).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


class Hidden(Cut):
    """Returns an object of which nobody knows what is in it."""

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(found=super().forward(x))


class Skipped(Cut):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def of_inputs_past_an_object(x: torch.Tensor) -> None:
    torch.autograd.grad(built(Hidden)(x).found.sum(), x)


def of_tensors_in_the_place_of_weights(x: torch.Tensor) -> None:
    model = built(Cut)
    others = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    torch.func.functional_call(model, others, (x,)).sum().backward()
    assert all(other.grad is not None for other in others.values())


def of_what_is_handed_on(x: torch.Tensor) -> None:
    built(Skipped)(x * 2).sum().backward()


def of_a_frozen_part(x: torch.Tensor) -> None:
    built(Cut).layers[0].base(x).sum().backward()


def of_what_was_frozen_in_forward(x: torch.Tensor) -> None:
    model = built(Cut).requires_grad_(False)
    loss = model(x).sum()
    model.requires_grad_(True)
    loss.backward()


def within_a_function_of_the_users(x: torch.Tensor) -> None:
    model = built(Cut)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return model(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(model(x), x, gradient)[0]

    Again.apply(x).sum().backward()


NO_MISTAKES = (
    of_inputs_past_an_object,
    of_tensors_in_the_place_of_weights,
    of_what_is_handed_on,
    of_a_frozen_part,
    of_what_was_frozen_in_forward,
    within_a_function_of_the_users,
)


def built(kind: type[Cut]) -> Cut:
    model = seeded(kind)
    headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2, blocks="1KiB")
    return model


@pytest.mark.parametrize("backward", NO_MISTAKES)
def test_a_backward_may_have_no_business_with_weights(backward):
    batch = BATCH.clone().requires_grad_()
    backward(batch)


def test_a_frozen_model_has_nothing_to_reach(compute_device):
    model = seeded(Cut).requires_grad_(False)
    headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2, blocks="1KiB")
    batch = BATCH.clone().requires_grad_()
    model(batch).square().mean().backward()
    assert batch.grad is not None
