"""Where the device reads host memory, and no budget says otherwise: do blocks compute where they rest, uncopied?"""

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.checkpoint import writing
from headrace.weights.rest import budgets
from tests.support.compare import assert_same, assert_same_gradients, assert_same_models, assert_same_weights
from tests.support.held import weight_bytes
from tests.support.models import linears

WIDTH = 32


class Looks(nn.Module):
    """Notes where the weight that computes lies."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.inner.weight.data_ptr())
        return self.inner(x).relu()


def train(model: nn.Module, optimizer: Any, steps: int = 5) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((4, WIDTH), 0.1 * (step + 1))).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_weights_compute_where_they_rest() -> None:
    model = nn.Sequential(*(Looks() for _ in range(4)))
    plain = copy.deepcopy(model)
    with headrace.offload(model, device="cpu") as handle:
        ours = train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert_same(ours, train(plain, torch.optim.SGD(plain.parameters(), lr=0.1)))
        assert all(layer.seen[-1] == layer.inner.weight.data_ptr() for layer in model)
        stats = handle.stats()
        assert stats.device_peak_bytes == stats.onload_bytes == 0
        assert weight_bytes(model) <= stats.host_bytes
    assert_same_models(model, plain)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_updates_of_ours(overlap: Any) -> None:
    """Updates within backward write homes while backward still reads old weights: then there is a copy."""
    model = linears(6, WIDTH)
    plain = copy.deepcopy(model)
    with headrace.offload(model, device="cpu") as handle:
        optimizer = headrace.optim.AdamW(model.parameters(), lr=1e-2, overlap=overlap)
        ours = train(model, optimizer)
        assert_same(ours, train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)))
        handle.synchronize()
        assert (handle.stats().device_peak_bytes > 0) is (overlap == "backward")
        assert_same_models(model, plain)


def test_a_budget_is_a_budget() -> None:
    model = linears(6, WIDTH)
    with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2) as handle:
        model(torch.ones(1, WIDTH))
        assert weight_bytes(model) // 3 < handle.stats().device_peak_bytes <= weight_bytes(model) // 2


def test_casts_are_what_computes() -> None:
    model = linears(3, WIDTH)
    plain = copy.deepcopy(model).to(torch.bfloat16)
    x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    with headrace.offload(model, device="cpu", param_dtype=torch.bfloat16) as handle, torch.no_grad():
        assert_same(model(x), plain(x))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            one.mul_(2)
            other.copy_(one)
        assert_same(model(x), plain(x))
        assert handle.stats().device_peak_bytes == 0


def test_memory_that_a_user_has_taken_is_not_written() -> None:
    """`p.data, average.data = average.data, p.data`, as averages of weights are swapped in."""
    model = linears(3, WIDTH)
    plain = copy.deepcopy(model)
    x = torch.ones(2, WIDTH)
    with headrace.offload(model, device="cpu") as handle, torch.no_grad():
        assert_same(model(x), plain(x))
        averages = [torch.full_like(parameter, 0.01) for parameter in plain.parameters()]
        others = [average.clone() for average in averages]
        for net, own in ((model, averages), (plain, others)):
            for parameter, average in zip(net.parameters(), own, strict=True):
                parameter.data, average.data = average.data, parameter.data
        for _ in range(2):
            assert_same(model(x), plain(x))
        assert_same(averages, others)
        assert handle.stats().device_peak_bytes > 0  # there is no other way
        for net, own in ((model, averages), (plain, others)):
            for parameter, average in zip(net.parameters(), own, strict=True):
                parameter.data, average.data = average.data, parameter.data
        assert_same(model(x), plain(x))
        assert_same(averages, others)


@pytest.mark.parametrize("passes", [0, 4])
def test_a_write_between_forward_and_backward_is_noticed(passes: int) -> None:
    """Also in a forward without visits, where autograd saves the leaves themselves."""
    model, x = linears(3, WIDTH), torch.ones(2, WIDTH, requires_grad=True)
    with headrace.offload(model, device="cpu") as handle:
        for _ in range(passes):
            model(x).sum().backward()
        loss = model(x).sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
        assert handle.stats().device_peak_bytes == 0


def test_what_the_model_writes() -> None:
    """nn.Embedding renormalises its rows as it is called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    tokens = torch.arange(8)
    with headrace.offload(model, device="cpu") as handle:
        for _ in range(3):
            assert_same(model(tokens), plain(tokens))
            assert_same_weights(model, plain)
        assert handle.stats().device_peak_bytes == 0


@pytest.mark.parametrize("passes", [0, 1])
def test_a_checkpoint_has_nothing_that_the_model_writes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """nn.Embedding renormalises its rows where they rest, once they have been read."""
    fill = writing.Piece.fill

    def late(*arguments: Any) -> None:
        time.sleep(0.02)
        fill(*arguments)

    monkeypatch.setattr(writing.Piece, "fill", late)
    model = nn.Sequential(nn.Embedding(2**14, 64, max_norm=1.0), nn.Linear(64, WIDTH))
    with headrace.offload(model, device="cpu"):
        for number in range(passes):
            model(torch.tensor([number]))
        begun = model[0].weight.detach().clone()
        saving = headrace.save(tmp_path / "saved", model, wait=False)
        model(torch.arange(2**14))
        saving.wait()
        assert not torch.equal(model[0].weight, begun)
        headrace.load(tmp_path / "saved", model)
        assert torch.equal(model[0].weight, begun)


class Drifts(nn.Linear):
    """From some moment on, the model itself writes the weight."""

    drifts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.drifts:
            with torch.no_grad():
                self.weight.mul_(0.5)
        return super().forward(x)


def test_a_checkpoint_is_refused_if_the_model_begins_to_write_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never did before, so nobody asked."""
    read_on, fill = threading.Event(), writing.Piece.fill
    monkeypatch.setattr(writing.Piece, "fill", lambda *arguments: (read_on.wait(60), fill(*arguments)))
    model = nn.Sequential(Drifts(256, 256), nn.Linear(256, WIDTH))
    with headrace.offload(model, device="cpu"), torch.no_grad():
        model(torch.ones(1, 256))
        saving = headrace.save(tmp_path / "saved", model, wait=False)
        model[0].drifts = True
        threading.Timer(0.2, read_on.set).start()
        model(torch.ones(1, 256))
        with pytest.raises(headrace.StateError, match=r"'0.weight' was written to while it was being saved"):
            saving.wait()
        assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("passes", [0, 4])
def test_a_weight_is_shared_between_forward_and_backward(passes: int) -> None:
    """It lies elsewhere from then on, and backward reads what it holds there, as it does plain."""
    model, x = linears(3, WIDTH), torch.ones(2, WIDTH)
    plain = copy.deepcopy(model)
    with headrace.offload(model, device="cpu") as handle:
        for net in (model, plain):
            for _ in range(passes):
                net(x).sum().backward()
            net.zero_grad()
            loss = net(x).square().sum()
            net[1].weight.share_memory_()
            net[1].weight.data.mul_(1.5)
            loss.backward()
        assert_same_gradients(model, plain)
        assert_same(model(x), plain(x))
        assert handle.stats().device_peak_bytes == 0


@pytest.mark.parametrize(
    "first", [nn.Embedding(2**14, WIDTH), nn.Sequential(nn.Embedding(1, 2**14), nn.Linear(2**14, WIDTH))]
)
def test_a_block_larger_than_what_is_free(monkeypatch: pytest.MonkeyPatch, first: nn.Module) -> None:
    model = nn.Sequential(copy.deepcopy(first), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    plain, tokens = copy.deepcopy(model), torch.zeros(8, dtype=torch.long)
    with monkeypatch.context() as little:
        little.setattr(budgets, "available_host_bytes", lambda: 2**20)
        handle = headrace.offload(model, device="cpu", host_memory="64MiB")
    with handle:
        for _ in range(3):
            for net in (model, plain):
                net(tokens).sum().backward()
            assert_same_gradients(model, plain)
        assert handle.stats().device_peak_bytes == 0
