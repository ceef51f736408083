"""Do the values that a selective checkpoint keeps leave, whatever its policy calls them? With the same bits."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import headrace
from tests.activations.models import SAVED_BYTES, Stack, all_leaving, rows, step
from tests.support.compare import assert_same

LAYERS = 8
KEEPING = [policy for policy in CheckpointPolicy if not policy.name.endswith("RECOMPUTE")]
# PyTorch 2.15 tells that a selective checkpoint keeps tensors past the hooks, and that it will not in future.
pytestmark = pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")


@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("policy", KEEPING)
def test_what_is_kept_leaves(policy: CheckpointPolicy, with_weights: bool, compute_device: torch.device) -> None:
    """A layer's input is kept, and what its product gives; the last may still be there when backward needs them."""
    expected = [step(Stack(LAYERS).to(compute_device), rows(compute_device, seed)) for seed in range(4)]
    model = Stack(LAYERS, checkpointing=policy)
    whole, handle = all_leaving(model, compute_device, with_weights=with_weights)
    for seed in range(4):
        handle.reset_stats()
        assert_same(step(model, rows(compute_device, seed)), expected[seed])
        stats = handle.stats()
        assert stats.offload_bytes >= (2 * LAYERS - 1) * SAVED_BYTES
        assert stats.onload_bytes >= (2 * LAYERS - 3) * SAVED_BYTES
        assert stats.host_held_bytes == 0
    whole.remove()
    assert_same(step(model.to(compute_device), rows(compute_device, 3)), expected[3])


@pytest.mark.emu("lazy")
@pytest.mark.parametrize("policy", KEEPING)
def test_what_is_kept_frees_device_memory(policy: CheckpointPolicy, emu_device: Any) -> None:
    """Between forward and backward the device holds less by exactly what the host holds more."""
    emu_device.configure(allocator="exact")
    held = []
    for offloads in (False, True):
        model = Stack(LAYERS, checkpointing=CheckpointPolicy.MUST_SAVE if not offloads else policy).to("emu")
        handle = headrace.offload_activations(model, min_bytes=0, all_leave=True) if offloads else None
        for _ in range(3):
            x = rows("emu")
            loss = model(x).square().sum()
            host_bytes = 0 if handle is None else handle.stats().host_held_bytes
            held.append((torch.accelerator.memory_allocated(), host_bytes))
            loss.backward()  # type: ignore[no-untyped-call]
            model.zero_grad()
        del loss, x, model
    (plain, _), (here, away) = held[2], held[-1]
    assert away >= (2 * LAYERS - 1) * SAVED_BYTES
    assert plain - here == away


def test_policies_do_what_pytorch_does_outside_of_a_forward() -> None:
    """A checkpoint around the model keeps everything that autograd saves, and so the policy is PyTorch's alone."""
    model = Stack(2)
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True) as handle:
        y: Tensor = checkpoint(model, rows("cpu"), use_reentrant=False, context_fn=contexts)  # type: ignore[assignment]
        y.sum().backward()  # type: ignore[no-untyped-call]
        assert handle.stats().offload_bytes == 0


class Inside(nn.Module):
    """A layer and, behind it, a function in a selective checkpoint that keeps whatever it computes."""

    def __init__(self, function: Any, policy: CheckpointPolicy, **settings: Any) -> None:
        super().__init__()
        self.layer = Stack(1)
        self.function = function
        self.contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: policy, **settings)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.function, self.layer(x), use_reentrant=False, context_fn=self.contexts)


def nested(x: Tensor) -> Tensor:
    """The inner checkpoint computes again while the outer one does, which counts the operators."""
    only = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.exp.default])
    inner: Any = checkpoint(lambda y: y.exp().tanh() * y, x.sin(), use_reentrant=False, context_fn=only)
    return inner.cos() * x


def views(x: Tensor) -> Tensor:
    first, second = (x * 2).chunk(2)
    return torch.cat([first.t().exp(), second.t().tanh()]).square()


@pytest.mark.parametrize("function", [nested, views, torch.sin])
def test_odd_functions(function: Any, compute_device: torch.device) -> None:
    plain = Inside(function, CheckpointPolicy.MUST_SAVE).to(compute_device)
    model = Inside(function, CheckpointPolicy.PREFER_CPU_OFFLOAD).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for seed in range(3):
            assert_same(step(model, rows(compute_device, seed)), step(plain, rows(compute_device, seed)))
        assert handle.stats().offload_bytes > 3 * SAVED_BYTES
    assert handle.stats().host_held_bytes == 0


def test_a_kept_value_that_is_written_to_raises(compute_device: torch.device) -> None:
    kept: list[Tensor] = []

    def written(x: Tensor) -> Tensor:
        kept.append(x.exp())
        return kept[0].tanh() * kept[0]

    model = Inside(written, CheckpointPolicy.MUST_CPU_OFFLOAD).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True):
        loss = model(rows(compute_device)).sum()
        kept[0].detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    kept.clear()  # else the graph, which has the function, and the function's list hold each other
    if compute_device.type == "emu":
        from emulator import emu

        emu.take_reports()  # the copy to the host may be torn: nobody may use it


def test_a_kept_value_that_stays_may_be_written_to_where_the_user_says_so(compute_device: torch.device) -> None:
    def written(x: Tensor) -> Tensor:
        kept.append(x.exp())
        return (kept[0] * 1).tanh()

    results = []
    for offloads in (False, True):
        kept: list[Tensor] = []
        model = Inside(written, CheckpointPolicy.MUST_SAVE, allow_cache_entry_mutation=True).to(compute_device)
        settings: dict[str, Any] = {"min_bytes": 0, "all_leave": True, "modules": [model.layer]}
        handle = headrace.offload_activations(model, **settings) if offloads else None
        loss = model(rows(compute_device)).sum()
        kept[0].detach().mul_(2)
        loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
        assert handle is None or handle.stats().offload_bytes > 0
    assert_same(*results)


def test_a_second_backward_raises_as_where_values_are_saved() -> None:
    """Without headrace, `..._CPU_OFFLOAD` is recomputed, any number of times."""
    function = Stack(1)
    for offloads, policy in ((False, CheckpointPolicy.MUST_SAVE), (True, CheckpointPolicy.MUST_CPU_OFFLOAD)):
        model = Inside(function, policy)
        handle = headrace.offload_activations(model, min_bytes=0, all_leave=True) if offloads else None
        loss = model(rows("cpu")).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="only allowed to backward once"):
            loss.backward()
        assert handle is None or handle.stats().offload_bytes > 0
