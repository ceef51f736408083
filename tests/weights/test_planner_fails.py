"""Does a pass go on when the planner fails, or when every pass goes another way?"""

import warnings
from typing import NoReturn

import pytest
import torch
from torch import nn

import headrace
from headrace.planning import Problem
from headrace.weights.movement import planner as planner_module
from headrace.weights.movement.trace import MOST_TRACES, TraceBook
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.instances import instances
from tests.support.loops import loss_of
from tests.support.models import Decoder


def fails(problem: Problem) -> NoReturn:
    raise IndexError("no such choice")


def train(model: nn.Module, tokens: torch.Tensor, steps: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = loss_of(model, tokens)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # a trace of its own, for which the planner fails too
            losses.append(loss_of(model, tokens))
    return losses


def test_a_planner_that_fails_is_named_once_and_blocks_come_on_demand(
    monkeypatch: pytest.MonkeyPatch, decoder: Decoder, tokens: torch.Tensor
) -> None:
    plain = Decoder()
    plain.load_state_dict(decoder.state_dict())
    expected = train(plain, tokens)
    monkeypatch.setattr(planner_module, "make_plan", fails)
    with (
        headrace.offload(decoder, device="cpu", device_memory=weight_bytes(decoder) // 2) as handle,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        losses = train(decoder, tokens)
        stats = handle.stats()
    assert_same(losses, expected)
    (warning,) = told
    assert "the planner failed" in str(warning.message)
    assert "IndexError: no such choice" in str(warning.message)
    assert handle.plan is None
    assert stats.onload_bytes > 4 * weight_bytes(decoder)
    assert stats.device_peak_bytes <= stats.device_budget_bytes


class Skipping(nn.Module):
    """Which layers a forward visits is told by the bits of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(7))

    def forward(self, hidden: torch.Tensor, number: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if number >> index & 1:
                hidden = torch.tanh(layer(hidden))
        return hidden


def test_passes_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    books = instances(monkeypatch, TraceBook)
    model, hidden = Skipping(), torch.randn(2, 8)
    with torch.no_grad():
        expected = [model(hidden, number) for number in range(1, 128)]
        with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2) as handle:
            found = [model(hidden, number) for number in range(1, 128)]
            assert [len(book) for book in books] == [MOST_TRACES]
            assert handle.stats().onload_bytes > weight_bytes(model)
    assert_same(found, expected)
