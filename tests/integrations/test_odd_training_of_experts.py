"""Are experts trained one by one as in a plain run where loops do unusual things? To the sign of zero."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace
from tests.integrations.test_experts import IMPLEMENTATIONS, budget, experts_in
from tests.integrations.test_trained_experts import FEW, MANY, model_of
from tests.support.compare import assert_same_models

OTHER = torch.tensor([[33, 2]])


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    found: torch.Tensor = model(ids, labels=ids).loss
    return found


def graph_is_kept(model: Any) -> None:
    first = loss(model, FEW)
    first.backward(retain_graph=True)
    loss(model, MANY).backward()
    first.backward()


def forwards_before_backwards(model: Any) -> None:
    first, second, third = loss(model, FEW), loss(model, MANY), loss(model, OTHER)
    (third * 3).backward()
    (first - second).backward()


def negative_zeros(model: Any) -> None:
    (loss(model, FEW) * -0.0).backward()
    (loss(model, OTHER) * -0.0).backward()


def part_of_the_model(model: Any) -> None:
    model(FEW.to(model.device), output_hidden_states=True).hidden_states[1].sum().backward()


def step_in_backward(model: Any) -> None:
    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for ids in (FEW, OTHER, MANY):
        loss(model, ids).backward()


def gradients_are_replaced(model: Any) -> None:
    loss(model, FEW).backward()
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = None if number % 2 else parameter.grad.clone() * -1.5
    loss(model, OTHER).backward()


def frozen_before_backward(model: Any) -> None:
    first = loss(model, FEW)
    experts_in(model)[0].down_proj.requires_grad_(False)
    first.backward()
    experts_in(model)[0].down_proj.requires_grad_(True)
    loss(model, OTHER).backward()


def penalty_on_one_expert(model: Any) -> None:
    (loss(model, FEW) + experts_in(model)[0].down_proj[3].square().sum() * 0.1).backward()
    loss(model, OTHER).backward()


def called_twice_in_a_layer(model: Any) -> None:
    experts = model.model.layers[0].mlp
    own = experts.forward
    experts.forward = lambda hidden: own(hidden + own(hidden))
    loss(model, FEW).backward()
    loss(model, OTHER).backward()


def broken_off(model: Any) -> None:
    loss(model, FEW).backward()
    hook = experts_in(model)[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss(model, OTHER)
    hook.remove()
    loss(model, OTHER).backward()


PROGRAMS = [
    graph_is_kept,
    forwards_before_backwards,
    negative_zeros,
    part_of_the_model,
    step_in_backward,
    gradients_are_replaced,
    frozen_before_backward,
    penalty_on_one_expert,
    called_twice_in_a_layer,
    broken_off,
]


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_in_a_plain_run(
    compute_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    program: Callable[[Any], None],
    implementation: str,
) -> None:
    model = model_of("Qwen3Moe", implementation, monkeypatch)
    plain, limit = copy.deepcopy(model).to(compute_device), budget(model, 20)
    program(plain)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        program(model)
        assert handle.stats().expert_loads > 0
        assert handle.stats().device_peak_bytes <= limit
    assert_same_models(model, plain, some_missing=True)
