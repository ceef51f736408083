"""Does an update use what gradients held at `step()`, whoever else has them and writes them afterwards?"""

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headrace
from headrace.optim import AdamW, optimizer, update
from headrace.optim.update import Update
from tests.optim.test_overlap import SETTINGS, TOKENS, Held, batch, decoder, held, offloaded, train
from tests.support.compare import assert_same
from tests.support.loops import loss_of

Take = Callable[[list[nn.Parameter]], Callable[[], object]]


def gradients(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]


def each(take: Callable[[torch.Tensor], Any], write: Callable[[Any], object]) -> Take:
    """Takes something of each gradient, and writes there later."""

    def taken(parameters: list[nn.Parameter]) -> Callable[[], object]:
        things = [take(gradient) for gradient in gradients(parameters)]
        return lambda: [write(thing) for thing in things]

    return taken


def foreach(parameters: list[nn.Parameter]) -> Callable[[], object]:
    found = gradients(parameters)
    return lambda: torch._foreach_zero_(found)


def masters(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Other parameters have the same gradients."""
    others = [nn.Parameter(torch.zeros(parameter.shape)) for parameter in parameters]
    for other, gradient in zip(others, gradients(parameters), strict=True):
        other.grad = gradient
    return lambda: [other.grad.zero_() for other in others if other.grad is not None]


def bucket(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Gradients become views of one buffer, as data parallel code has it."""
    flat = torch.cat([gradient.flatten() for gradient in gradients(parameters)])
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view(parameter.shape)
    return flat.zero_


def replaced(parameters: list[nn.Parameter]) -> Callable[[], object]:
    """Gradients become tensors over the same memory, with storages of their own."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = torch.from_numpy(parameter.grad.numpy())
    return foreach(parameters)


WAYS: dict[str, Take] = {
    "tensor": each(lambda gradient: gradient, lambda tensor: tensor.zero_()),
    "view": each(lambda gradient: gradient.view(-1)[1:], lambda tensor: tensor.zero_()),
    "data": each(lambda gradient: gradient.data, lambda tensor: tensor.zero_()),
    "numpy": each(lambda gradient: gradient.numpy(), lambda array: array.fill(0)),
    "dlpack": each(torch.from_dlpack, lambda tensor: tensor.zero_()),
    "numpy by dlpack": each(np.from_dlpack, lambda array: torch.from_numpy(array).zero_()),
    "storage": each(lambda gradient: gradient.untyped_storage(), lambda storage: storage.fill_(0)),
    "graph": each(
        lambda gradient: (torch.ones_like(gradient, requires_grad=True) * gradient).grad_fn,
        lambda node: node._saved_other.zero_(),
    ),
    "list": foreach,
    "grad of others": masters,
    "bucket": bucket,
    "replaced": replaced,
}


def step_and_then(optimizer: AdamW, write: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step, whose updates begin late where they may, and `write` as soon as it returns."""
    with monkeypatch.context() as patch:
        if optimizer.overlaps:
            Held(patch).release_soon()
        optimizer.step()
        write()
        optimizer.synchronize()


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("way", list(WAYS))
def test_gradients_that_are_written_after_the_step(
    emu_device: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for overlap in ("none", "forward"):
        model = decoder()
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            loss_of(model, TOKENS).backward()
            step_and_then(optimizer, WAYS[way](held(optimizer)), monkeypatch)
        trained.append(list(model.parameters()))
    assert_same(*trained)


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("way", ["tensor", "numpy"])
def test_gradients_kept_from_an_earlier_step(emu_device: ModuleType, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward adds to them, and with overlap="backward" their update waits for the step."""
    trained = []
    for overlap in ("none", "forward", "backward"):
        model = decoder()
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            loss_of(model, TOKENS).backward()
            write = WAYS[way](held(optimizer))
            for step in range(4):
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                loss_of(model, batch(step)).backward()
            step_and_then(optimizer, write, monkeypatch)
        trained.append(list(model.parameters()))
    assert_same(trained[0], trained[1])
    assert_same(trained[0], trained[2])


def test_only_shared_gradients_are_waited_for(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    with offloaded(model):
        optimizer = AdamW(model.parameters(), overlap="forward", **SETTINGS)
        parameters = held(optimizer)
        loss_of(model, TOKENS).backward()
        kept, last = parameters[-1].grad, parameters[-1].data_ptr()
        gate, updated = threading.Event(), []
        perform = update.perform

        def one_and_then_held(updates: Sequence[Update], scale: float) -> None:
            if updated:
                assert gate.wait(60)
            perform(updates, scale)
            updated.extend(one.weight.data_ptr() for one in updates)

        monkeypatch.setattr(update, "perform", one_and_then_held)
        optimizer.step()  # would never return if it waited for others
        assert last in updated
        assert len(updated) < len(parameters)
        gate.set()
    assert kept is not None


def test_a_failure_in_an_update_that_the_step_waits_for(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as any other: to whoever looks next."""
    model = decoder()
    with offloaded(model):
        optimizer = AdamW(model.parameters(), overlap="forward", **SETTINGS)
        loss_of(model, TOKENS).backward()
        kept = gradients(held(optimizer))
        with monkeypatch.context() as patch:

            def broken(updates: Sequence[Update], scale: float) -> None:
                raise RuntimeError("no update")

            patch.setattr(update, "perform", broken)
            optimizer.step()
            with pytest.raises(RuntimeError, match="no update"):
                optimizer.synchronize()
        optimizer.step()
        assert all(optimizer.state[parameter]["step"] == 1 for parameter in held(optimizer))
        assert len(kept) == len(held(optimizer))


def test_a_backward_that_needs_no_weight_waits_for_updates_that_read_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = []
    for overlap in ("none", "forward"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8))
        with headrace.offload(model, device="cpu"):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            loss = model(torch.ones(2, 8)).square().sum()
            loss.backward(retain_graph=True)
            step_and_then(optimizer, loss.backward, monkeypatch)  # which adds to the gradients
        trained.append([*model.parameters(), *gradients(list(model.parameters()))])
    assert_same(*trained)


LIMIT = 0.05  # of the norm


def clipping(model: nn.Module, inside: bool) -> AdamW:
    return AdamW(model.parameters(), max_grad_norm=LIMIT if inside else None, **SETTINGS)


def clipped_step(optimizer: AdamW, inside: bool) -> None:
    if not inside:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], LIMIT)
    optimizer.step()
    optimizer.zero_grad()


def test_norms_of_gradients_that_are_written_without_a_trace(emu_device: ModuleType) -> None:
    """Who holds an array of a gradient may have written there since its norm was taken in backward."""
    trained = []
    for inside in (True, False):
        model = decoder()
        with offloaded(model):
            optimizer = clipping(model, inside)
            for step in range(5):
                loss_of(model, batch(step)).backward()
                arrays = [gradient.numpy() for gradient in gradients(held(optimizer))]
                for array in arrays:
                    array *= 3
                clipped_step(optimizer, inside)
        trained.append(list(model.parameters()))
    assert_same(*trained)


class Branches(nn.Module):
    """Two layers in one block, of which the second one is used at will."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


def test_norms_after_a_backward_unlike_those_before() -> None:
    """Whether a block has all its gradients is told by the backwards before: here that misses the second one."""
    trained = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleList([Branches(), Branches()])})
        model.forward = lambda x, both, model=model: model.layers[1](model.layers[0](x, both), both)  # type: ignore[method-assign, misc]
        with headrace.offload(model, device="cpu"):
            optimizer = clipping(model, inside)
            for step in range(6):
                x = torch.full((2, 8), 1.0 + step)
                model(x, True).square().sum().backward()
                if step > 3:
                    model(x, False).square().sum().backward()
                clipped_step(optimizer, inside)
        trained.append(list(model.parameters()))
    assert_same(*trained)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_nobody_has_gradients_where_nobody_took_them(
    emu_device: ModuleType, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no step of an ordinary loop waits."""
    shared = []
    is_shared = optimizer.gradient_is_shared

    def seen(parameter: Any) -> bool:
        shared.append(is_shared(parameter))
        return shared[-1]

    monkeypatch.setattr(optimizer, "gradient_is_shared", seen)
    model = decoder()
    with offloaded(model):
        train(model, AdamW(model.parameters(), overlap=overlap, **SETTINGS), 3)
    assert len(shared) == 3 * len(list(model.parameters()))
    assert not any(shared)
