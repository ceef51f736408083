"""What is new where somebody adds a place to rest, a unit of travel, or a policy of eviction? A class, or a function.

Each of these is a sketch of such an addition. What it does not say is the engine's, which computes the same bits.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import headrace
from headrace.planning import Problem
from headrace.weights.model.managed_param import Layout
from headrace.weights.model.partition import Partition, partition
from headrace.weights.movement import planner
from headrace.weights.movement.executor import Executor
from headrace.weights.rest.rests import Rest
from headrace.weights.rest.tiers import Tiers
from tests.support.compare import assert_same, assert_same_gradients
from tests.support.held import weight_bytes
from tests.support.models import linears, seeded


class InDict(Rest):
    """A place to rest: bytes in a dict, by the names of blocks."""

    def __init__(self, kept: dict[str, bytearray], name: str, nbytes: int) -> None:
        self._kept = kept.setdefault(name, bytearray(nbytes))
        self.memory = torch.frombuffer(self._kept, dtype=torch.uint8)

    def tensors(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        regions = [torch.frombuffer(self._kept, dtype=torch.uint8, offset=layout.region[0]) for layout in layouts]
        return [layout.view(own, first_byte=layout.region[0]) for layout, own in zip(layouts, regions, strict=True)]


def train(model: nn.Module, device: torch.device, steps: int = 4) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.full((4, 32), 0.1 * step, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_a_new_place_to_rest(monkeypatch: pytest.MonkeyPatch, compute_device: torch.device) -> None:
    kept: dict[str, bytearray] = {}

    def rest_for(_: Any, name: str, parameters: Any, layouts: Any, nbytes: int) -> Rest:
        return InDict(kept, name, nbytes)

    monkeypatch.setattr(Tiers, "rest_for", rest_for)
    model = linears(6, 32)
    plain = copy.deepcopy(model).to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 3) as handle:
        assert_same(train(model, compute_device), train(plain, compute_device))
        assert handle.stats().onload_bytes > weight_bytes(model)
        assert sum(map(len, kept.values())) >= weight_bytes(model)
        weights = torch.frombuffer(kept["5"], dtype=torch.float32)[: 32 * 32].view(32, 32)
        assert torch.equal(weights, plain[5].weight.cpu())


def halved(*args: Any, **named: Any) -> Partition:
    """A unit of travel: half of a layer. Both halves come when the layer is called, and each goes by itself."""
    parts = partition(*args, **named)
    parts.streamed = [
        replace(part, name=f"{part.name}.{half}", keys=keys)
        for part in parts.streamed
        for half, keys in enumerate((part.keys[: len(part.keys) // 2], part.keys[len(part.keys) // 2 :]))
    ]
    return parts


def test_a_new_unit_of_travel(monkeypatch: pytest.MonkeyPatch, compute_device: torch.device) -> None:
    monkeypatch.setattr(headrace.api, "partition", halved)
    model = seeded(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(6))))
    plain = copy.deepcopy(model).to(compute_device)
    memory = 5 * weight_bytes(model) // 12  # two layers and a half
    with headrace.offload(model, device=compute_device, device_memory=memory, blocks=list(model)) as handle:
        assert [block.name for block in handle.settled_blocks("a look")][:3] == ["0.0", "0.1", "1.0"]
        assert_same(train(model, compute_device), train(plain, compute_device))
        stats = handle.stats()
        assert stats.onload_bytes > 2 * weight_bytes(model)
        assert stats.device_peak_bytes <= stats.device_budget_bytes
    assert_same_gradients(model, plain)


def test_a_new_policy_of_eviction(monkeypatch: pytest.MonkeyPatch, emu_device: ModuleType) -> None:
    """At random, where no plan has decided ahead: every block that computes finds room, and within the budget."""
    chance, asked = random.Random(0), 0

    def at_random(*_: Any) -> float:
        nonlocal asked
        asked += 1
        return chance.random()

    def plans_nothing(problem: Problem) -> NoReturn:
        raise IndexError("no plans here")

    monkeypatch.setattr(Executor, "_next_use", at_random)
    monkeypatch.setattr(planner, "make_plan", plans_nothing)
    device = torch.device("emu", 1)
    model = linears(8, 32)
    plain = copy.deepcopy(model).to(device)
    with headrace.offload(model, device=device, device_memory=weight_bytes(model) // 2) as handle:
        with pytest.warns(RuntimeWarning, match="no plans here"):
            losses = train(model, device)
        assert_same(losses, train(plain, device))
        stats = handle.stats()
        assert asked
        assert stats.onload_bytes > 2 * weight_bytes(model)
        assert stats.device_peak_bytes <= stats.device_budget_bytes
    assert_same_gradients(model, plain)
