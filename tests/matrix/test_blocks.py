"""Is a model exact however it is cut into blocks, whatever stays on the device, and however far ahead blocks come?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.matrix.models import CASES, Decoder
from tests.support.compare import assert_same, on_cpu
from tests.support.held import weight_bytes
from tests.support.loops import adamw, train
from tests.support.offloaded import assert_exact, assert_moves_as_planned, assert_streamed, offload

DENSE, EXPERTS = CASES[0], CASES[2]
Settings = Callable[[Any], dict[str, Any]]


CUTS: dict[str, Settings] = {
    "size": lambda model: {"blocks": "20KiB"},
    "bytes": lambda model: {"blocks": 60_000},
    "leaves": lambda model: {"blocks": 1},
    "module_list": lambda model: {"blocks": [model.layers]},
    "modules": lambda model: {"blocks": [model.layers[0], model.layers[3].mlp, model.head]},
    "patterns": lambda model: {"blocks": ["layers.[0-2]", "layers.[3-5].mlp"]},
    "resident": lambda model: {"resident": ["embedding*", model.head, "layers.2.attention.*"]},
    "on_demand": lambda model: {"prefetch": 0},
    "one_ahead": lambda model: {"prefetch": 1},
}


@pytest.mark.core(cut=["modules", "size", "on_demand", "one_ahead"])
@pytest.mark.parametrize("cut", CUTS)
def test_cuts(cut: str, compute_device: torch.device) -> None:
    """Every way to name blocks; what a list does not name is cut by size."""
    batches = DENSE.on(compute_device)
    plain = train(DENSE.build().to(compute_device), batches, DENSE.forward)
    model = DENSE.build()
    handle = offload(model, compute_device, 0.5, **CUTS[cut](model))
    assert_same(train(model, batches, DENSE.forward), plain)
    assert_streamed(handle, model)
    optimizer = adamw(model.parameters())

    def cycle() -> None:
        optimizer.zero_grad()
        DENSE.forward(model, batches[0])[1].backward()
        optimizer.step()

    assert_moves_as_planned(handle, model, cycle)


def test_experts_as_blocks(compute_device: torch.device) -> None:
    """Which experts are called changes with every batch: what nobody expected comes on demand."""
    batches = EXPERTS.on(compute_device, 5)
    handle, _ = assert_exact(
        EXPERTS.build,
        lambda model: train(model, batches, DENSE.forward),
        compute_device,
        0.3,
        blocks=["layers.*.mlp.experts.*"],
    )
    assert len(handle.plan.problem.block_bytes) > 20  # type: ignore[union-attr]


def test_smallest_budget_there_is(compute_device: torch.device) -> None:
    """Room for one block at a time and nothing else: every block comes when it is needed."""
    batches = DENSE.on(compute_device)
    model = DENSE.build()
    largest = max(weight_bytes(layer) for layer in model.layers)
    small = sum(p.nbytes for p in model.norm.parameters())
    plain = train(DENSE.build().to(compute_device), batches, DENSE.forward)
    handle = headrace.offload(
        model, device=compute_device, device_memory=largest + small + 2_000, blocks=[model.layers]
    )
    assert_same(train(model, batches, DENSE.forward), plain)
    stats = handle.stats()
    assert largest <= stats.device_peak_bytes <= stats.device_budget_bytes


def test_two_offloaded_models_in_turn(compute_device: torch.device) -> None:
    """A teacher without gradients beside a student that learns from it, on one device."""

    def make() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([Decoder(layers=4), Decoder(layers=5)])

    def steps(teacher: nn.Module, student: nn.Module) -> dict[str, Tensor]:
        optimizer = adamw(student.parameters())
        for inputs, _ in DENSE.on(compute_device, 4):
            with torch.no_grad():
                wanted = teacher(inputs).softmax(-1)
            (student(inputs).log_softmax(-1) * wanted).sum().neg().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: on_cpu(parameter) for name, parameter in student.named_parameters()}

    expected = steps(*make().to(compute_device))
    teacher, student = make()
    handles = [offload(model, compute_device, 0.45) for model in (teacher, student)]
    assert_same(steps(teacher, student), expected, "the student")
    for handle, model in zip(handles, (teacher, student), strict=True):
        assert_streamed(handle, model)
