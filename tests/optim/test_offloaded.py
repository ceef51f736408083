"""Does training give the same bits when weights visit a device, or live there and their gradients come to the host?"""

import copy
import gc
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.optim import SGD, Adafactor, AdamW, Lion
from tests.optim.references import copies, give_gradients, parameters, ties_up
from tests.support.compare import assert_same
from tests.support.loops import random_batches, steps

SHAPES = ((40, 30), (9,), (130, 70), ())


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(24, 24) for _ in range(5)), nn.Linear(24, 3)).to(dtype)


def train(net: nn.Module, optimizer: Any, count: int, *, clip: float | None = None, accumulate: int = 1) -> None:
    dtype = next(net.parameters()).dtype
    batches = [batch.to(dtype) for batch in random_batches(count * accumulate, 6, 24, device="emu")]
    steps(net, optimizer, batches, micro_batches=accumulate, clip=clip)


@pytest.mark.core(clip=0.05)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_homes_of_an_offloaded_model(emu_device: ModuleType, clip: float | None) -> None:
    """An offloaded model trains as with PyTorch's own optimizer, clipping inside ours and before theirs."""
    trained = []
    for own in (True, False):
        net = model(torch.float32)
        with headrace.offload(net, device="emu", device_memory=3 * 24 * 32 * 4, blocks=list(net)) as handle:
            if own:
                train(net, AdamW(net.parameters(), lr=0.01, max_grad_norm=clip), 6)
            else:
                stock = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
                train(net, stock, 6, clip=clip)
            assert handle.stats().onload_bytes > 0
        trained.append(list(net.parameters()))
    assert_same(*trained)


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_steps_skipped_for_gradients_that_are_not_finite_are_reported(emu_device: ModuleType, overlap: str) -> None:
    net = model(torch.float32)
    with headrace.offload(net, device="emu", device_memory=3 * 24 * 32 * 4, blocks=list(net)) as handle:
        optimizer = AdamW(net.parameters(), lr=0.01, max_grad_norm=1.0, overlap=overlap)
        train(net, optimizer, 1)
        net(torch.full((6, 24), torch.inf)).sum().backward()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        assert (handle.stats().steps, handle.stats().skipped_steps, optimizer.skipped_steps) == (2, 1, 1)
        assert "2, 1 skipped: gradients were not finite" in str(handle.report())
        optimizer.step()  # without gradients there is nothing to skip
        train(net, optimizer, 1)
        assert (handle.stats().steps, handle.stats().skipped_steps) == (4, 1)
        handle.reset_stats()
        assert handle.stats().skipped_steps == 0


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_steps_that_took_gradients_that_are_not_finite_are_reported(emu_device: ModuleType, overlap: str) -> None:
    """Clipping does not find them: with a norm that is NaN it makes every gradient NaN."""
    net = model(torch.float32)
    with headrace.offload(net, device="emu", device_memory=3 * 24 * 32 * 4, blocks=list(net)) as handle:
        optimizer = AdamW(net.parameters(), lr=0.01, overlap=overlap)
        train(net, optimizer, 3)
        assert handle.stats().not_finite_steps == 0
        net(torch.full((6, 24), torch.inf)).sum().backward()
        if overlap != "backward":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert (handle.stats().steps, handle.stats().not_finite_steps, optimizer.not_finite_steps) == (4, 1, 1)
        assert "4, 1 took gradients that were not finite" in str(handle.report())
        handle.reset_stats()
        assert handle.stats().not_finite_steps == 0


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adafactor", "Muon"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.emu("random:0")
def test_gradients_that_are_not_finite_are_counted_on_the_device(
    emu_device: ModuleType, name: str, fraction: float
) -> None:
    weights = [torch.nn.Parameter(torch.ones(16, 40, device="emu")) for _ in range(2)]
    optimizer = getattr(headrace.optim, name)(weights, device_fraction=fraction)
    for step in range(5):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        if step in (1, 3):
            weights[step // 2].grad[3, 7] = torch.nan if step == 1 else torch.inf
        optimizer.step()
    copied = copy.deepcopy(optimizer)
    assert optimizer.not_finite_steps == 2
    assert copied.not_finite_steps == 2
    assert copy.deepcopy(optimizer).not_finite_steps == 2


@pytest.mark.emu("random:0")
def test_counting_them_takes_no_memory_for_each_step(emu_device: ModuleType) -> None:
    """Until somebody asks, which is after training."""
    weight = torch.nn.Parameter(torch.ones(16, 40, device="emu"))
    optimizer = headrace.optim.SGD([weight], lr=0.0, device_fraction=1.0)
    held = []
    for step in range(24):
        weight.grad = torch.full_like(weight, torch.nan if step % 8 == 1 else 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        torch.accelerator.synchronize()
        held.append(torch.accelerator.memory_allocated())
    assert len(set(held[4:])) == 1
    assert optimizer.not_finite_steps == 3


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_parameters_of_two_offloaded_models_are_refused(emu_device: ModuleType, overlap: str) -> None:
    one, other = model(torch.float32), model(torch.float32)
    both = [*one.parameters(), *other.parameters()]
    free = nn.Parameter(torch.ones(3))
    refusal = r"parameter 13, '0.weight' of shape \(24, 24\), belongs to another offloaded model than parameter 1"
    early = AdamW([free, *both], overlap=overlap)
    with headrace.offload(one, device="emu"):
        AdamW([free, *both], overlap=overlap)  # nobody else manages the others
        with headrace.offload(other, device="emu"):
            with pytest.raises(ValueError, match=refusal):
                AdamW([free, *both], overlap=overlap)
            before = [parameter.detach().clone() for parameter in both]
            both[-1].grad = torch.ones_like(both[-1])
            with pytest.raises(ValueError, match=refusal):
                early.step()
            assert_same(both, before)
        early.step()
    assert not torch.equal(both[-1], before[-1])


def test_narrow_homes_equal_narrow_weights_on_the_device(emu_device: ModuleType) -> None:
    managed = model(torch.bfloat16)
    plain = copy.deepcopy(managed).to("emu")
    train(plain, AdamW(plain.parameters(), lr=0.01), 6)
    with headrace.offload(managed, device="emu", device_memory=3 * 24 * 32 * 4, blocks=list(managed)):
        train(managed, AdamW(managed.parameters(), lr=0.01), 6)
    assert_same(list(managed.parameters()), list(plain.parameters()))


def test_narrow_homes_accumulated_and_clipped(emu_device: ModuleType) -> None:
    trained = []
    for inside in (None, 0.05):
        net = model(torch.bfloat16)
        with headrace.offload(net, device="emu", device_memory=3 * 24 * 32 * 4, blocks=list(net)):
            optimizer = AdamW(net.parameters(), lr=0.01, max_grad_norm=inside)
            train(net, optimizer, 6, accumulate=2, clip=0.05 if inside is None else None)
        trained.append(list(net.parameters()))
    assert_same(*trained)


def test_weights_of_an_offloaded_model_loaded_in_the_middle(emu_device: ModuleType) -> None:
    managed = model(torch.bfloat16)
    plain = copy.deepcopy(managed).to("emu")
    new = {name: torch.randn_like(value) for name, value in managed.state_dict().items()}
    optimizer, other = AdamW(plain.parameters(), lr=0.01), AdamW(managed.parameters(), lr=0.01)
    with headrace.offload(managed, device="emu", device_memory="64KiB"):
        for net, each in ((plain, optimizer), (managed, other)):
            train(net, each, 2)
            net.load_state_dict(new)
            train(net, each, 2)
    assert_same(list(managed.parameters()), list(plain.parameters()))


@pytest.mark.core(dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer_class", [AdamW, SGD, Lion, Adafactor])
def test_parameters_on_the_device(emu_device: ModuleType, dtype: torch.dtype, optimizer_class: Any) -> None:
    """Classic ZeRO-Offload: weights stay on the device, state and update are on the host."""
    on_host = parameters(dtype, SHAPES)
    on_device = [nn.Parameter(weight.detach().to("emu")) for weight in on_host]
    optimizer, other = optimizer_class(on_host), optimizer_class(on_device)
    for step in range(5):
        give_gradients(on_device, on_host, step)
        optimizer.step()
        other.step()
        if step == 2:  # somebody writes weights on the device
            with torch.no_grad():
                on_host[0].fill_(0.5)
                on_device[0].fill_(0.5)
    assert_same(on_device, on_host)
    for entries in other.state.values():
        assert all(value.device.type == "cpu" for value in entries.values())


def test_state_moved_to_the_device_comes_back(emu_device: ModuleType) -> None:
    """Lightning moves optimizer.state to the device, accelerate a state_dict."""
    ours, theirs = parameters(torch.bfloat16, SHAPES), parameters(torch.bfloat16, SHAPES)
    optimizer, other = AdamW(ours), AdamW(theirs)
    for step in range(3):
        give_gradients(ours, theirs, step)
        optimizer.step()
        other.step()
        if step == 0:
            for entries in optimizer.state.values():
                entries.update({name: value.to("emu") for name, value in entries.items()})
        else:
            moved = copy.deepcopy(optimizer.state_dict())
            for entries in moved["state"].values():
                entries.update({name: value.to("emu") for name, value in entries.items()})
            optimizer.load_state_dict(moved)
    assert_same(ours, theirs)
    assert all(value.device.type == "cpu" for entries in optimizer.state.values() for value in entries.values())


def test_clipping_counts_parameters_of_both_places(emu_device: ModuleType) -> None:
    on_host = parameters(torch.float32, SHAPES)
    mixed = [nn.Parameter(w.detach().to("emu") if index % 2 else w.detach().clone()) for index, w in enumerate(on_host)]
    optimizer, other = AdamW(on_host), AdamW(mixed, max_grad_norm=0.5)
    for step in range(3):
        give_gradients(mixed, on_host, step)
        reference = nn.utils.get_total_norm([w.grad for w in mixed if w.grad is not None])
        for weight in on_host:
            weight.grad.mul_(torch.clamp(0.5 / (reference.cpu() + 1e-6), max=1.0))  # type: ignore[union-attr]
        optimizer.step()
        other.step()
    assert_same(mixed, on_host)


def test_device_bytes_do_not_grow(emu_device: ModuleType) -> None:
    """The step takes no device memory, and 14 bytes per parameter of the host's."""
    weight = nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16, device="emu"))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW([weight])
    before = torch.accelerator.max_memory_allocated()
    optimizer.step()
    optimizer.step()
    assert torch.accelerator.max_memory_allocated() == before
    assert optimizer.held_bytes() <= 14.01 * weight.numel()


def test_narrow_master_on_the_device(emu_device: ModuleType) -> None:
    ours = [nn.Parameter(weight.detach().to("emu")) for weight in parameters(torch.bfloat16, SHAPES)]
    exact = copies(parameters(torch.bfloat16, SHAPES), torch.float32)
    optimizer, reference = AdamW(ours), torch.optim.AdamW(exact, fused=True)
    for step in range(4):
        give_gradients(ours, exact, step)
        optimizer.step()
        reference.step()
    assert_same(ours, [ties_up(weight) for weight in exact])


@pytest.mark.parametrize("settings", [{}, {"device_fraction": 0.5}, {"device_fraction": 1.0}], ids=str)
def test_weights_that_leave_the_device_leave_nothing_there(emu_device: ModuleType, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).to("emu")
    optimizer = AdamW(net.parameters(), **settings)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    weights = sum(parameter.nbytes for parameter in net.parameters())
    before = torch.accelerator.memory_allocated()
    net.cpu()
    assert torch.accelerator.memory_allocated() <= before - weights
