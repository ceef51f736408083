"""Does training go on exactly, here and there, when what it works with is sent to other processes?

`torch.multiprocessing` moves the storage of a tensor that it sends, in place. What a queue gives back in the same
process is what another one would get: other tensors over the same shared memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import nn

import headrace
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder, large_decoder

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O

Act = Callable[[nn.Module, torch.optim.Optimizer], Any]
Make = Callable[..., torch.optim.Optimizer]


def sent(value: Any) -> Any:
    """What another process would get."""
    queue: Any = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(value)
    return queue.get()


def send_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return sent(model.state_dict())


def send_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return sent(model)


def send_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return sent([parameter.grad for parameter in model.parameters()])


def send_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return sent(optimizer.state_dict())


def share(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [parameter.share_memory_() for parameter in model.parameters()]


def share_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [parameter.data.share_memory_() for parameter in model.parameters()]


def train(device: torch.device | None, act: Act, make: Make = torch.optim.AdamW, **settings: Any) -> list[torch.Tensor]:
    """Losses, all gradients, and the weights; `act` between a backward and its step, and again after the step."""
    model = large_decoder()
    optimizer = make(model.parameters(), lr=1e-2)
    handle = None
    if device is not None:
        handle = headrace.offload(model, device=device, device_memory=weight_bytes(model) // 3, **settings)
    tokens = torch.arange(16).view(2, 8)
    values, kept = [], []
    for step in range(4):
        for batch in range(2):  # gradients of the second are added to those of the first, which were sent
            loss = loss_of(model, tokens + step + batch)
            loss.backward()
            values.append(loss.detach().cpu())
            if step == 1:
                kept.append(act(model, optimizer))
        values += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            kept.append(act(model, optimizer))
    values += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    if handle is not None:
        assert handle.stats().onload_bytes > 2 * weight_bytes(model)
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
    return values


@pytest.mark.core(tier="disk", act=["send_state", "share"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("act", [send_state, send_model, send_gradients, send_optimizer, share, share_data])
def test_training_goes_on(act: Act, tier: str, compute_device: torch.device, tmp_path: Path) -> None:
    settings = {"host_memory": "256KiB", "disk": tmp_path} if tier == "disk" else {}
    ours, plain = train(compute_device, act, **settings), train(None, act)
    assert_same(ours, plain)


@pytest.mark.extended
@pytest.mark.parametrize("act", [send_model, send_gradients, share])
def test_training_goes_on_beside_updates(act: Act, compute_device: torch.device) -> None:
    def make(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return headrace.optim.AdamW(parameters, lr=lr, overlap="forward")

    ours, plain = train(compute_device, act, make), train(None, act, headrace.optim.AdamW)
    assert_same(ours, plain)


def test_what_another_process_writes_is_computed_with(compute_device: torch.device) -> None:
    """Nothing in this process tells of such writes, not even a version."""

    def losses(device: torch.device | None, param_dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Decoder()
        if device is not None:
            headrace.offload(model, device=device, device_memory=weight_bytes(model), param_dtype=param_dtype)
        tokens = torch.arange(16).view(2, 8)
        values = [loss_of(model, tokens).detach().cpu()]
        theirs = sent(dict(model.named_parameters()))
        for _ in range(3):
            with torch.no_grad():
                theirs["head.weight"].mul_(1.5)
                theirs["layers.2.up.bias"].add_(0.5)
            values.append(loss_of(model, tokens).detach().cpu())
        return values

    ours = losses(compute_device)
    assert_same(ours, losses(None))
    assert len({loss.item() for loss in ours}) == 4
    assert len({loss.item() for loss in losses(compute_device, torch.bfloat16)}) == 4


def test_gradients_that_were_sent_stay_as_they_are(compute_device: torch.device, tmp_path: Path) -> None:
    model = large_decoder()
    settings = {"device": compute_device, "device_memory": weight_bytes(model) // 3}
    headrace.offload(model, **settings, host_memory="256KiB", disk=tmp_path)
    tokens = torch.arange(16).view(2, 8)
    for _ in range(3):
        loss_of(model, tokens).backward()
        theirs = sent([parameter.grad for parameter in model.parameters()])
        before = [gradient.clone() for gradient in theirs]
        model.zero_grad()
        loss_of(model, tokens + 5).backward()
        assert_same(theirs, before)
        assert not any(map(torch.equal, theirs, (parameter.grad for parameter in model.parameters())))
        model.zero_grad()


def test_a_parameter_in_the_place_of_one_that_was_sent(compute_device: torch.device) -> None:
    """Who was sent the old one keeps that."""
    torch.manual_seed(0)
    model = Decoder()
    headrace.offload(model, device=compute_device, device_memory=weight_bytes(model))
    tokens = torch.arange(16).view(2, 8)
    loss_of(model, tokens)
    theirs = sent(model.head.weight)
    before = theirs.detach().clone()
    model.head.weight = nn.Parameter(torch.ones_like(before))
    assert torch.equal(model(tokens).cpu()[..., 0], model(tokens).cpu()[..., 5])  # all rows of the head are the same
    assert torch.equal(theirs, before)
