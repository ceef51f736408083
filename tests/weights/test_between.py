"""What may happen between forward and backward, and in hooks? What cannot be made right is refused."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import headrace
from tests.support.compare import assert_same, assert_same_gradients, assert_same_weights, gradients_of, on_cpu
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder, linears


def budget_bytes(model: nn.Module) -> int:
    return weight_bytes(model) // 2


def test_remove_within_a_pass_is_refused(decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device) -> None:
    plain = copy.deepcopy(decoder)
    handle = headrace.offload(decoder, device=compute_device, device_memory=budget_bytes(decoder))
    hook = decoder.layers[2].register_forward_hook(lambda *_: handle.remove())
    with pytest.raises(headrace.StateError, match="call it after that"):
        decoder(tokens)
    hook.remove()
    loss_of(decoder, tokens).backward()
    handle.remove()
    loss_of(plain, tokens).backward()
    assert_same_gradients(decoder, plain)


def test_a_backward_after_remove_is_refused(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device
) -> None:
    handle = headrace.offload(decoder, device=compute_device, device_memory=budget_bytes(decoder))
    loss = loss_of(decoder, tokens)
    handle.remove()
    with pytest.raises(headrace.StateError, match="before remove"):
        loss.backward()
    assert all(parameter.grad is None for parameter in decoder.parameters())
    loss_of(decoder, tokens).backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_a_gradient_that_needs_no_weight_is_not_lost_after_remove(compute_device: torch.device) -> None:
    model = nn.Embedding(8, 4)
    handle = headrace.offload(model, device=compute_device)
    loss = model(torch.arange(4)).sum()
    handle.remove()
    with pytest.raises(headrace.StateError, match="before remove"):
        loss.backward()


class Borrowing(nn.Module):
    """Computes with the weights of a module that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.lender, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        borrowed = nn.functional.linear(hidden, self.lender.weight) + self.lender.bias
        return self.inner(borrowed)  # type: ignore[no-any-return]


@pytest.mark.parametrize("thaws", [False, True])
def test_a_weight_of_no_call_is_frozen_or_thawed_before_backward(compute_device: torch.device, thaws: bool) -> None:
    model = Borrowing()
    plain = copy.deepcopy(model)

    def run(model: Borrowing) -> list[Any]:
        found = []
        for _ in range(2):
            model.lender.requires_grad_(not thaws)
            loss = model(torch.ones(2, 8)).sum()
            model.lender.requires_grad_(thaws)
            loss.backward()
            found.append(on_cpu(gradients_of(model)))
            model.zero_grad()
        return found

    with headrace.offload(model, device=compute_device, device_memory=4096, blocks=[model.lender, model.inner]):
        found = run(model)
    assert_same(found, run(plain))


def test_refresh_before_backward(decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device) -> None:
    """Backward computes with what was written, as a plain model's does after a write through a kept `p.data`."""

    tokens = tokens.to(compute_device)

    def run(model: Decoder, handle: Any) -> list[torch.Tensor]:
        kept = model.layers[1].down.weight.data
        loss = loss_of(model, tokens)
        kept.mul_(0.5)
        if handle is not None:
            handle.refresh()
        loss.backward()
        return on_cpu(gradients_of(model))

    expected = run(copy.deepcopy(decoder).to(compute_device), None)
    with headrace.offload(decoder, device=compute_device, device_memory=budget_bytes(decoder)) as handle:
        found = run(decoder, handle)
    assert_same(found, expected)


def test_a_forward_and_backward_within_a_hook_of_backward(compute_device: torch.device) -> None:
    """As gradient caches do it: representations first, then the model once more for each part, in a hook."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        parts = [torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
        parts = [part if offloads else part.to(compute_device) for part in parts]
        with torch.no_grad():
            reached = [model(part) for part in parts]
        reached = [one.detach().requires_grad_() for one in reached]
        loss = torch.cat(reached).square().mean()
        loss.backward()

        @torch.enable_grad()
        def again(gradient: torch.Tensor) -> None:
            for part, one in zip(parts, reached, strict=True):
                ((model(part) * one.grad).sum() * gradient).backward()

        last = loss.detach().requires_grad_()
        last.register_hook(again)
        last.backward()
        return on_cpu(gradients_of(model))

    results = []
    for offloads in (True, False):
        torch.manual_seed(0)
        model = linears(6, 16, nn.Tanh)
        if offloads:
            handle = headrace.offload(model, device=compute_device, device_memory=budget_bytes(model))
            results.append(run(model))
            assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
            assert handle.stats().onload_bytes > weight_bytes(model)
        else:
            results.append(run(model.to(compute_device)))
    offloaded, plain = on_cpu(results)
    assert_same(offloaded, plain)


def test_models_are_offloaded_in_inference_mode(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device
) -> None:
    with torch.inference_mode():
        handle = headrace.offload(decoder, device=compute_device, device_memory=budget_bytes(decoder))
        decoder(tokens)
    loss_of(decoder, tokens).backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())
    handle.remove()
    with torch.inference_mode():
        made_there = nn.Linear(4, 4)
    with pytest.raises(headrace.LayoutError, match="made in torch"):
        headrace.offload(made_there, device=compute_device)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Any, lengths: torch.Tensor | None = None) -> torch.Tensor:
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(x)[0].data)


def test_lengths_stay_on_the_host(compute_device: torch.device) -> None:
    """Beside inputs on the device, and in packed sequences, where PyTorch wants them."""
    torch.manual_seed(0)
    model, x, lengths = Recurrent(), torch.randn(3, 5, 8), torch.tensor([5, 3, 2])
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    plain = copy.deepcopy(model).to(compute_device)
    with headrace.offload(model, device=compute_device):
        for inputs in ((x.to(compute_device), lengths), (packed.to(compute_device),)):
            assert torch.equal(model(*inputs), plain(*inputs))
        assert torch.equal(model(packed), plain(packed.to(compute_device)))  # a batch on the CPU


def _compile_layers(decoder: Decoder) -> None:
    for index, layer in enumerate(decoder.layers):
        decoder.layers[index] = torch.compile(layer, backend="eager")  # type: ignore[call-overload]


def _compile_in_place(decoder: Decoder) -> None:
    decoder.compile(backend="eager")


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own
@pytest.mark.filterwarnings("ignore:.*compile:RuntimeWarning")  # layers that are not, or in the place of the model
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("compiles", [_compile_layers, _compile_in_place])
def test_what_is_compiled_before_offload_or_after(
    decoder: Decoder,
    tokens: torch.Tensor,
    compute_device: torch.device,
    compiles: Callable[[Decoder], None],
    before: bool,
) -> None:
    plain, tokens = copy.deepcopy(decoder).to(compute_device), tokens.to(compute_device)
    if before:
        compiles(decoder)
    with headrace.offload(decoder, device=compute_device, device_memory=budget_bytes(decoder)) as handle:
        if not before:
            compiles(decoder)
        for _ in range(3):
            for model in (plain, decoder):
                model.zero_grad()
                loss_of(model, tokens).backward()
        assert_same_gradients(decoder, plain)
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
        assert handle.stats().onload_bytes > 3 * weight_bytes(decoder)
        assert_same_weights(copy.deepcopy(decoder), plain)
    torch.compiler.reset()


def test_an_interrupt_between_two_layers_of_backward_leaves_nothing_bound(
    decoder: Decoder, tokens: torch.Tensor
) -> None:
    """On entering the release of the layer before: its note is gone already."""
    homes = [id(parameter) for parameter in decoder.parameters()]
    entered = 0

    def interrupt(frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal entered
        caller = frame.f_back
        released = frame.f_code.co_name == "release" and caller is not None
        if event == "call" and released and caller.f_code.co_name == "reach":  # type: ignore[union-attr]
            entered += 1
            if entered == 2:
                sys.setprofile(None)
                raise KeyboardInterrupt

    with headrace.offload(decoder, device="cpu", device_memory=budget_bytes(decoder)):
        loss = loss_of(decoder, tokens)
        sys.setprofile(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
        finally:
            sys.setprofile(None)
        assert entered == 2
        assert [id(parameter) for parameter in decoder.parameters()] == homes


def test_assigned_states_are_computed_with(compute_device: torch.device) -> None:
    """`load_state_dict(assign=True)` after a pass; of recurrent layers too, whose old parameters somebody still has."""

    def make() -> Recurrent:
        torch.manual_seed(0)
        return Recurrent()

    x = torch.randn(2, 3, 8).to(compute_device)
    state = {name: tensor * 0.5 for name, tensor in make().state_dict().items()}
    plain = make()
    plain.load_state_dict(state)
    expected = plain.to(compute_device)(x)
    for resident in ((), ("*",)):
        model = make()
        kept = list(model.parameters())
        with headrace.offload(model, device=compute_device, resident=resident) as handle:
            model(x)
            held_bytes = handle.stats().device_peak_bytes
            model.load_state_dict(state, assign=True)
            handle.reset_stats()
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)
            assert handle.stats().device_peak_bytes <= held_bytes
        assert len(kept) == len(list(model.parameters()))


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("again", [False, True])
def test_a_parameter_that_gets_other_data_before_backward(
    decoder: Decoder, tokens: torch.Tensor, compute_device: torch.device, tmp_path: Path, tier: str, again: bool
) -> None:
    """Autograd goes on with what it saved, the data of before: there is none, or it is given back in time."""
    plain = copy.deepcopy(decoder)
    disk: dict[str, Any] = {"host_memory": "34KiB", "disk": tmp_path} if tier == "disk" else {}
    handle = headrace.offload(decoder, device=compute_device, device_memory=budget_bytes(decoder), **disk)
    for _ in range(2):
        loss = loss_of(decoder, tokens)
        weight = next(p for p in decoder.parameters() if p.dim() == 2 and p is not decoder.embedding.weight)
        before = weight.data
        weight.data = weight.data * 2
        if again:
            weight.data = before
            loss.backward()
            loss_of(plain, tokens).backward()
            assert_same_gradients(decoder, plain)
        else:
            with pytest.raises(headrace.WeightChangedError, match=r"was given other data \(p.data = t\) after forward"):
                loss.backward()
            plain.load_state_dict(decoder.state_dict())
            for model in (decoder, plain):
                model.zero_grad()
                loss_of(model, tokens).backward()
            assert_same_gradients(decoder, plain)
    assert handle.stats().fetch_bytes > 0 or tier == "host"
    handle.remove()


def test_weights_that_are_written_twice_after_a_step_come_once(compute_device: torch.device) -> None:
    """And those that the plan keeps on the device come ahead of their visits, when the next pass begins."""
    brought, batches = [], 2
    for times in range(1, 3):
        model = linears(6, 16)
        optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(times)]
        handle = headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2)
        for step in range(5):
            if step == 3:
                handle.reset_stats()
            for _ in range(batches):
                model(torch.ones(2, 16, device=compute_device)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        stats = handle.stats()
        assert not stats.demand_onloads
        brought.append(stats.onload_bytes)
        handle.remove()
    assert brought[0] == brought[1] < 2 * batches * 2 * weight_bytes(model)
