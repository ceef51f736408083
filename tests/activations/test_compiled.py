"""Do activations of compiled layers, under autocast, and of models of transformers leave, with the same results?"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.activations.models import SAVED_BYTES, Stack, results, rows, step
from tests.support.compare import assert_same


def compiled_layers() -> nn.Module:
    model = Stack(6)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def compiled_whole() -> nn.Module:
    return torch.compile(Stack(6), backend="aot_eager")  # type: ignore[return-value]


@pytest.fixture
def _fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("make", [compiled_layers, compiled_whole])
def test_compiled(make: Callable[[], nn.Module]) -> None:
    """Compiled code returns other tensors over the memory that it saved: they are stored once all the same."""
    expected = step(make(), rows("cpu"))
    model = make()
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for _ in range(4):
            assert_same(step(model, rows("cpu")), expected)
        plan = handle.plan
    assert plan is not None
    assert len(plan.problem.saved) == 7
    if make is compiled_layers:
        assert plan.host_bytes >= 5 * SAVED_BYTES


@pytest.mark.usefixtures("_fresh_compiler")
def test_compilation_around_it_is_refused() -> None:
    model = Stack(2)
    with (
        headrace.offload_activations(model, min_bytes=0),
        pytest.raises(headrace.StateError, match="compile first"),
    ):
        torch.compile(model, backend="aot_eager")(rows("cpu"))


@pytest.mark.parametrize("with_weights", [False, True])
def test_autocast(with_weights: bool, compute_device: torch.device) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast(compute_device.type, torch.bfloat16):
            loss = model(rows(compute_device)).float().square().sum()
        loss.backward()
        return results(model, loss)

    expected = run(Stack().to(compute_device))
    settings: dict[str, Any] = {"min_bytes": 0, "device_memory": 0}
    model = Stack()
    if with_weights:
        handle: Any = headrace.offload(model, device=compute_device, activations=settings)
    else:
        handle = headrace.offload_activations(model.to(compute_device), **settings)
    with handle:
        for _ in range(4):
            assert_same(run(model), expected)


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("with_weights", [False, True])
def test_transformers(checkpointing: bool | None, with_weights: bool, compute_device: torch.device) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=64,
        use_cache=False,
    )
    tokens = torch.arange(32).reshape(2, 16).to(compute_device)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        if checkpointing is not None:
            model.activation_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        return model.train()

    def run(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return results(model, loss)

    expected = run(make().to(compute_device))
    settings: dict[str, Any] = {"min_bytes": 0, "device_memory": 0}
    model = make()
    if with_weights:
        handle: Any = headrace.offload(model, device=compute_device, activations=settings)
        activations = handle.activations
    else:
        handle = activations = headrace.offload_activations(model.to(compute_device), **settings)
    with handle:
        for _ in range(4):
            assert_same(run(model), expected)
        plan = activations.plan
        assert len(plan.offloaded) >= 3
        assert activations.stats().onloads >= 3 * len(plan.offloaded)
