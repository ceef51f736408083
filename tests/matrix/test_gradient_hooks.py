"""Do all hooks on gradients of parameters see what they see in a plain run, and in the same order?"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import millrace

Log = list[tuple[str, Any]]
Watch = Callable[[Sequence[nn.Parameter], Log], Any]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))


def all_of_them(parameters: Sequence[nn.Parameter], log: Log) -> Any:
    return register_multi_grad_hook(parameters, lambda gradients: log.append(("all", [g.sum() for g in gradients])))


def some_of_them(parameters: Sequence[nn.Parameter], log: Log) -> Any:
    return register_multi_grad_hook(parameters[2:5], lambda gradients: log.append(("some", len(gradients))))


def any_of_them(parameters: Sequence[nn.Parameter], log: Log) -> Any:
    return register_multi_grad_hook(parameters, lambda gradient: log.append(("any", gradient.sum())), mode="any")


def of_nodes(parameters: Sequence[nn.Parameter], log: Log) -> Any:
    """As Horovod, Apex and Megatron do it: after the gradient was accumulated."""
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]
    for index, node in enumerate(nodes):
        node.register_hook(lambda *_, index=index: log.append((f"node {index}", parameters[index].grad.sum())))
    return nodes


def before_nodes(parameters: Sequence[nn.Parameter], log: Log) -> Any:
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    for index, node in enumerate(nodes):
        node.register_prehook(lambda gradients, index=index: log.append((f"before {index}", gradients[0].sum())))
    return nodes


def everything(parameters: Sequence[nn.Parameter], log: Log) -> Any:
    for index, parameter in enumerate(parameters[::2]):
        parameter.register_hook(
            lambda gradient, index=index: log.append((f"hook {index}", gradient.sum())) or gradient * 2
        )
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: log.append((f"late {index}", p.grad.sum())))
    return all_of_them(parameters, log), of_nodes(parameters, log), before_nodes(parameters, log)


def run(model: nn.Module, log: Log, device: torch.device, *, zeroes: bool) -> list[torch.Tensor]:
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(2, 16).to(device)).sum().backward()
        if zeroes:
            model.zero_grad()
    return [] if zeroes else [p.grad.cpu() for p in model.parameters()]


def plainly(log: Log) -> Log:
    return [
        (what, [v.cpu() for v in value] if isinstance(value, list) else torch.as_tensor(value).cpu())
        for what, value in log
    ]


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("watch", [all_of_them, some_of_them, any_of_them, of_nodes, before_nodes, everything])
def test_hooks_fire_as_in_a_plain_run(compute_device: torch.device, watch: Watch, before: bool, zeroes: bool) -> None:
    """`before`: they are registered before the model is offloaded."""
    logs: list[Log] = [[], []]
    model = build().to(compute_device)
    kept = [watch(list(model.parameters()), logs[0])]
    plain = run(model, logs[0], compute_device, zeroes=zeroes)

    model = build()
    if before:
        kept.append(watch(list(model.parameters()), logs[1]))
    with millrace.offload(model, device=compute_device, device_memory=4000) as handle:
        if not before:
            kept.append(watch(list(model.parameters()), logs[1]))
        ours = run(model, logs[1], compute_device, zeroes=zeroes)
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= 4000
    assert len(ours) == len(plain)
    assert all(map(torch.equal, ours, plain))
    assert [what for what, _ in logs[1]] == [what for what, _ in logs[0]]
    for (_, value), (_, expected) in zip(plainly(logs[1]), plainly(logs[0]), strict=True):
        assert all(map(torch.equal, value, expected)) if isinstance(value, list) else torch.equal(value, expected)


def test_gradients_that_somebody_watches_keep_their_dtype(compute_device: torch.device) -> None:
    model, log = build(), []
    with millrace.offload(model, device=compute_device, device_memory=4000, grad_dtype=torch.bfloat16):
        kept = everything(list(model.parameters()), log)
        run(model, log, compute_device, zeroes=False)
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert kept
    assert [what for what, _ in log].count("all") == 3


def test_a_gradient_that_a_hook_saw_and_nobody_keeps_is_not_copied(compute_device: torch.device) -> None:
    """It lies in the memory that was made for it, and is made once."""
    model = build()
    with millrace.offload(model, device=compute_device, device_memory=4000) as handle:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: None)
        run(model, [], compute_device, zeroes=True)
        once = handle.stats().host_peak_bytes
        model(torch.ones(2, 16).to(compute_device)).sum().backward()
        places = {p.grad.data_ptr() for p in model.parameters()}
        model.zero_grad()
        model(torch.ones(2, 16).to(compute_device)).sum().backward()
        assert {p.grad.data_ptr() for p in model.parameters()} == places
        assert handle.stats().host_peak_bytes == once


def test_parameters_that_an_evaluation_finds_in_the_place_of_others_are_watched(compute_device: torch.device) -> None:
    model, state, counts = build(), build().state_dict(), [0, 0]
    with millrace.offload(model, device=compute_device, device_memory=4000):
        model.load_state_dict(state, assign=True)
        handle = register_multi_grad_hook(list(model.parameters()), lambda _: counts.__setitem__(0, counts[0] + 1))
        nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
        for node in nodes:
            node.register_hook(lambda *_: counts.__setitem__(1, counts[1] + 1))
        with torch.inference_mode():
            model(torch.ones(2, 16))
        run(model, [], compute_device, zeroes=True)
        handle.remove()
    assert counts == [3, 30]


@pytest.mark.parametrize("way", ["a graph", "a look"])
def test_gradients_that_nobody_watches_any_more_are_added_to(compute_device: torch.device, way: str) -> None:
    """Each needs no memory of its own once the graph that was alive at offload(), or the look at the node, is over."""
    peaks = []
    for watches in (False, True):
        model = build()
        output = model(torch.ones(2, 16)) if watches and way == "a graph" else None
        with millrace.offload(model, device=compute_device, device_memory=4000) as handle:
            del output
            for parameter in model.parameters():
                if watches and way == "a look":
                    parameter.expand_as(parameter)
            run(model, [], compute_device, zeroes=False)
            peaks.append(handle.stats().host_peak_bytes)
    assert peaks[0] == peaks[1]


def test_a_node_that_was_kept_while_its_parameter_was_frozen(compute_device: torch.device) -> None:
    model, log = build(), []
    nodes = of_nodes(list(model.parameters()), log)
    model[2].requires_grad_(False)
    with millrace.offload(model, device=compute_device, device_memory=4000):
        run(model, log, compute_device, zeroes=True)
        assert len(log) == 3 * 8
        model[2].requires_grad_(True)
        run(model, log, compute_device, zeroes=True)
    assert len(log) == 3 * 18
    assert nodes
