"""Do all hooks on gradients of parameters see what they see in a plain run, and in the same order?"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import headrace
from tests.support.compare import assert_same
from tests.support.models import linears, seeded

Log = list[tuple[str, Any]]
Watch = Callable[[Sequence[nn.Parameter], Log], list[Any]]  # gives nodes to keep, and hooks to remove


def build() -> nn.Module:
    return seeded(linears, 5, 16)


def all_of_them(parameters: Sequence[nn.Parameter], log: Log) -> list[Any]:
    return [register_multi_grad_hook(parameters, lambda gradients: log.append(("all", [g.sum() for g in gradients])))]


def some_of_them(parameters: Sequence[nn.Parameter], log: Log) -> list[Any]:
    return [register_multi_grad_hook(parameters[2:5], lambda gradients: log.append(("some", len(gradients))))]


def any_of_them(parameters: Sequence[nn.Parameter], log: Log) -> list[Any]:
    return [register_multi_grad_hook(parameters, lambda gradient: log.append(("any", gradient.sum())), mode="any")]


def of_nodes(parameters: Sequence[nn.Parameter], log: Log) -> list[Any]:
    """As Horovod, Apex and Megatron do it: after the gradient was accumulated."""
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]
    return nodes + [
        node.register_hook(lambda *_, index=index: log.append((f"node {index}", parameters[index].grad.sum())))
        for index, node in enumerate(nodes)
    ]


def before_nodes(parameters: Sequence[nn.Parameter], log: Log) -> list[Any]:
    nodes = [get_gradient_edge(parameter).node for parameter in parameters]
    return nodes + [
        node.register_prehook(lambda gradients, index=index: log.append((f"before {index}", gradients[0].sum())))
        for index, node in enumerate(nodes)
    ]


def everything(parameters: Sequence[nn.Parameter], log: Log) -> list[Any]:
    hooks = [
        parameter.register_hook(
            lambda gradient, index=index: log.append((f"hook {index}", gradient.sum())) or gradient * 2
        )
        for index, parameter in enumerate(parameters[::2])
    ]
    hooks += [
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: log.append((f"late {index}", p.grad.sum())))
        for index, parameter in enumerate(parameters)
    ]
    return hooks + all_of_them(parameters, log) + of_nodes(parameters, log) + before_nodes(parameters, log)


def remove(kept: Sequence[Any]) -> None:
    """Hooks on several nodes refer to them, and nobody would ever collect them, nor the parameters."""
    for one in kept:
        if hasattr(one, "remove"):
            one.remove()


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


@pytest.mark.core(zeroes=False)
@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("watch", [all_of_them, some_of_them, any_of_them, of_nodes, before_nodes, everything])
def test_hooks_fire_as_in_a_plain_run(compute_device: torch.device, watch: Watch, before: bool, zeroes: bool) -> None:
    """`before`: they are registered before the model is offloaded."""
    logs: list[Log] = [[], []]
    model = build().to(compute_device)
    kept = watch(list(model.parameters()), logs[0])
    plain = run(model, logs[0], compute_device, zeroes=zeroes)

    model = build()
    if before:
        kept += watch(list(model.parameters()), logs[1])
    with headrace.offload(model, device=compute_device, device_memory=4000) as handle:
        if not before:
            kept += watch(list(model.parameters()), logs[1])
        ours = run(model, logs[1], compute_device, zeroes=zeroes)
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= 4000
    remove(kept)
    assert len(ours) == len(plain)
    assert_same(ours, plain)
    assert [what for what, _ in logs[1]] == [what for what, _ in logs[0]]
    for (_, value), (_, expected) in zip(plainly(logs[1]), plainly(logs[0]), strict=True):
        assert all(map(torch.equal, value, expected)) if isinstance(value, list) else torch.equal(value, expected)


def test_gradients_that_somebody_watches_keep_their_dtype(compute_device: torch.device) -> None:
    model, log = build(), []
    with headrace.offload(model, device=compute_device, device_memory=4000, grad_dtype=torch.bfloat16):
        kept = everything(list(model.parameters()), log)
        run(model, log, compute_device, zeroes=False)
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    remove(kept)
    assert [what for what, _ in log].count("all") == 3


def test_a_gradient_that_a_hook_saw_and_nobody_keeps_is_not_copied(compute_device: torch.device) -> None:
    """It lies in the memory that was made for it, and is made once."""
    model = build()
    with headrace.offload(model, device=compute_device, device_memory=4000) as handle:
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
    with headrace.offload(model, device=compute_device, device_memory=4000):
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


def penalised(model: nn.Module, device: torch.device, *, zeroes: bool, first: bool) -> list[torch.Tensor]:
    """Losses with a term on parameters themselves, computed before or after the forward."""

    def penalty(step: int) -> torch.Tensor:
        return sum((p.cpu().pow(2).sum() * (step + 1) for p in model.parameters()), torch.zeros(()))

    values = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(8, 256).to(device)
        early = penalty(step) if first else None
        loss = model(x).pow(2).mean().cpu()
        (loss + (penalty(step) if early is None else early)).backward()
        values += [p.grad.cpu().clone() for p in model.parameters()]
        if zeroes:
            model.zero_grad(set_to_none=False)
    return values


@pytest.mark.emu("threads")
@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_loss_term_on_parameters_adds_to_their_gradients(
    compute_device: torch.device, zeroes: bool, first: bool
) -> None:
    """On a thread of autograd's: nobody adds to the same gradient meanwhile. Sums may be taken in another order."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return linears(4, 256)

    plain = penalised(make().to(compute_device), compute_device, zeroes=zeroes, first=first)
    model = make()
    with headrace.offload(model, device=compute_device, device_memory="700KiB") as handle:
        ours = penalised(model, compute_device, zeroes=zeroes, first=first)
        assert handle.stats().device_peak_bytes <= 700 << 10
    for gradient, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_dense_gradients_after_sparse_ones() -> None:
    """An embedding tied to a linear layer; each backward uses one of them, or both."""

    def train(model: nn.ModuleList) -> torch.Tensor:
        rows = torch.arange(5)
        for uses in ("embedding", "linear", "both"):
            hidden = model[0](rows) if uses != "linear" else torch.ones(5, 16)
            (model[1](hidden) if uses != "embedding" else hidden).pow(2).sum().backward()
        gradient = model[0].weight.grad
        return gradient.to_dense() if gradient.is_sparse else gradient

    class Tied(nn.ModuleList):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__([nn.Embedding(20, 16, sparse=True), nn.Linear(16, 20, bias=False)])
            self[1].weight = self[0].weight

    plain, model = train(Tied()), Tied()
    with headrace.offload(model, device="cpu"):
        assert torch.equal(train(model), plain)


def test_the_dtype_of_gradients_ends_with_the_handle() -> None:
    model, x = build(), torch.ones(2, 16)
    with headrace.offload(model, device="cpu", grad_dtype=torch.bfloat16):
        model(x).sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
        model.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        model.zero_grad()
        with headrace.offload(model, device="cpu"):
            model(x).sum().backward()
            assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
            model.zero_grad()


def test_room_for_gradients_beside_others_is_asked_for_before_backward(compute_device: torch.device) -> None:
    torch.manual_seed(0)
    model = linears(8, 64)
    with headrace.offload(model, device=compute_device, device_memory=40000, host_memory=400000):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: None)
        x = torch.ones(2, 64).to(compute_device)
        model(x).sum().backward()
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(headrace.BudgetError, match=r"gradients need .* host_memory allows"):
            model(x)
        assert all(torch.equal(p.grad, kept) for p, kept in zip(model.parameters(), before, strict=True))
        model.zero_grad()
        model(x).sum().backward()


@pytest.mark.parametrize("way", ["a graph", "a look"])
def test_gradients_that_nobody_watches_any_more_are_added_to(compute_device: torch.device, way: str) -> None:
    """Each needs no memory of its own once the graph that was alive at offload(), or the look at the node, is over."""
    peaks = []
    for watches in (False, True):
        model = build()
        output = model(torch.ones(2, 16)) if watches and way == "a graph" else None
        with headrace.offload(model, device=compute_device, device_memory=4000) as handle:
            del output
            for parameter in model.parameters():
                if watches and way == "a look":
                    parameter.expand_as(parameter)
            run(model, [], compute_device, zeroes=False)
            peaks.append(handle.stats().host_peak_bytes)
    assert peaks[0] == peaks[1]


def test_a_node_that_was_kept_while_its_parameter_was_frozen(compute_device: torch.device) -> None:
    model, log = build(), []
    kept = of_nodes(list(model.parameters()), log)
    model[2].requires_grad_(False)
    with headrace.offload(model, device=compute_device, device_memory=4000):
        run(model, log, compute_device, zeroes=True)
        assert len(log) == 3 * 8
        model[2].requires_grad_(True)
        run(model, log, compute_device, zeroes=True)
    assert len(log) == 3 * 18
    remove(kept)


def evaluates(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(batch)


def goes_through_it(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        given = batch.clone().requires_grad_()
        return torch.autograd.grad(model(given).square().sum(), given)[0]


def calls_a_layer(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model[1](model[3](batch))


HOOKS: dict[str, Callable[[nn.Parameter, Callable[..., Any]], Any]] = {
    "late": lambda parameter, hook: parameter.register_post_accumulate_grad_hook(hook),
    "early": lambda parameter, hook: parameter.register_hook(hook),
    "of several": lambda parameter, hook: register_multi_grad_hook([parameter], hook),
}


@pytest.mark.core(memory="2560B")
@pytest.mark.parametrize("memory", ["2560B", "64MiB"])
@pytest.mark.parametrize("act", [evaluates, goes_through_it, calls_a_layer])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_may_call_the_model(kind: str, act: Callable[..., torch.Tensor], memory: str, compute_device) -> None:
    seen: list[list[torch.Tensor]] = []
    for model in (build(), build().to(compute_device)):
        found: list[torch.Tensor] = []
        batch = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(compute_device)

        def hook(_gradients: Any, model: nn.Module = model, batch: torch.Tensor = batch, found: Any = found) -> None:
            found.append(act(model, batch))

        if not seen:
            headrace.offload(model, device=compute_device, device_memory=memory, blocks=list(model))
        watched = HOOKS[kind](model[2].weight, hook)
        for _ in range(3):
            loss = model(batch).square().sum()
            loss.backward()
            found += [loss, *(parameter.grad.clone() for parameter in model.parameters())]
        watched.remove()
        model(batch).sum().backward()
        found += [evaluates(model, batch), *(parameter.grad for parameter in model.parameters())]
        seen.append([tensor.detach().cpu() for tensor in found])
    assert len(seen[0]) == len(seen[1]) > 3 * 12
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*seen, strict=True))


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_cannot_remove_the_handle(kind: str, evaluated: bool, compute_device: torch.device) -> None:
    model = build()
    batch = torch.randn(3, 16).to(compute_device)
    handle = headrace.offload(model, device=compute_device, device_memory="64MiB")

    def hook(_gradients: Any) -> None:
        if evaluated:
            evaluates(model, batch)
        handle.remove()

    watched = HOOKS[kind](model[2].weight, hook)
    with pytest.raises(headrace.StateError, match="within a forward or backward"):
        model(batch).sum().backward()
    watched.remove()
    model.zero_grad()
    model(batch).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    handle.remove()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
