"""Does HybridDeviceOptimizer pass Megatron's own matrix at equal bits, and without the faults that are known of it?"""

import copy
import io
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from headrace.compat import HybridDeviceOptimizer
from headrace.compat.hybrid import TorchSteps
from headrace.runtime.lanes import Lane, StreamLanes
from tests.optim.references import copies, give_gradients, parameters, ties_up
from tests.support.compare import assert_same

SHAPES = ((128, 64), (64,), (64, 48), (48,))
RULES: dict[str, tuple[type, dict[str, Any]]] = {
    "adam": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
pytestmark = pytest.mark.emu("random:0")


class FusedAdam(torch.optim.AdamW):
    """A class of that name, as Transformer Engine has one."""


def on_device(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach().to("emu")) for weight in weights]


def grouped(weights: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": weights[:2], "wd_mult": 1.0, "lr_mult": 1.0},
        {"params": weights[2:], "wd_mult": 0.0, "lr_mult": 2.0, "lr": 0.02, "weight_decay": 0.0},
    ]


def hybrid(weights: Any, fraction: float = 0.5, rule: str = "adam", **settings: Any) -> Any:
    kind, own = RULES[rule]
    return HybridDeviceOptimizer(weights, fraction, kind, kind, **{**own, **settings})


@pytest.mark.core(steps=10, fraction=0.5)
@pytest.mark.parametrize("steps", [1, 10])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("groups", [False, True])
def test_own_matrix(
    emu_device: ModuleType, steps: int, overlap: bool, fraction: float, rule: str, groups: bool
) -> None:
    kind, settings = RULES[rule]
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    reference = kind(grouped(theirs) if groups else theirs, fused=True, **settings)
    optimizer = hybrid(
        grouped(ours) if groups else ours,
        fraction,
        rule,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=overlap,
    )
    assert not optimizer.state
    for step in range(steps):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    name = "exp_avg" if rule == "adam" else "momentum_buffer"
    first, last = optimizer.entries[ours[0]], optimizer.entries[ours[-1]]
    assert (first[name].device.type == "cpu" if first else True) == (fraction > 0)
    assert (last[name].device.type == "emu") == (fraction < 1)
    assert_same(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert_same([optimizer.state[one][name]], [reference.state[other][name]])


def test_b1_a_parameter_without_gradient_is_left_alone(emu_device: ModuleType) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    optimizer, reference = hybrid(ours), torch.optim.AdamW(theirs, fused=True, **RULES["adam"][1])
    for step in range(3):
        give_gradients(ours, theirs, step)
        if step:
            ours[1].grad = theirs[1].grad = None
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@pytest.mark.emu("threads", "lazy", "random:1")
def test_b2_both_shares_wait_for_their_gradients(emu_device: ModuleType) -> None:
    """bfloat16, a fraction, overlap: the fixture fails on any race."""
    there = [weight.to(torch.bfloat16) for weight in on_device(parameters(shapes=SHAPES))]
    ours = [nn.Parameter(weight.detach()) for weight in there]
    exact = copies([weight.cpu() for weight in ours], torch.float32)
    optimizer, reference = hybrid(ours), torch.optim.AdamW(exact, fused=True, **RULES["adam"][1])
    for step in range(3):
        give_gradients(ours, exact, step)
        optimizer.step()
        reference.step()
    assert_same(ours, [ties_up(weight) for weight in exact])


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_b3_the_fraction_is_kept_to(emu_device: ModuleType, fraction: float) -> None:
    """Exact to a tensor, as there."""
    weights = [nn.Parameter(torch.zeros(1024, device="emu")) for _ in range(100)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = hybrid(weights, fraction)
    before = torch.accelerator.memory_allocated()
    optimizer.step()
    torch.accelerator.synchronize()
    on_it = (torch.accelerator.memory_allocated() - before) / (8 * 102_400)
    assert 1 - on_it == pytest.approx(fraction, abs=0.01)


def test_b4_the_closure_is_called_once_and_its_result_returned(emu_device: ModuleType) -> None:
    ours = on_device(parameters(shapes=SHAPES))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        loss = torch.stack([weight.square().sum() for weight in ours]).sum()
        loss.backward()
        return loss

    assert isinstance(hybrid(ours).step(closure), torch.Tensor)
    assert len(calls) == 1


def test_b5_either_class_names_the_rule(emu_device: ModuleType) -> None:
    ours = on_device(parameters(shapes=SHAPES))
    for classes in ((torch.optim.AdamW, None), (None, FusedAdam), (torch.optim.AdamW, FusedAdam), (None, None)):
        assert isinstance(HybridDeviceOptimizer(ours, 0.5, *classes), torch.optim.AdamW)
    assert isinstance(HybridDeviceOptimizer(ours, cpu_optimizer_cls=torch.optim.SGD, lr=0.1), torch.optim.SGD)
    for classes in ((torch.optim.SGD, FusedAdam), (torch.optim.Rprop, None)):
        assert isinstance(HybridDeviceOptimizer(ours, 0.5, *classes), TorchSteps)


def reloaded(optimizer: Any, ours: list[nn.Parameter], fraction: float) -> Any:
    """A new optimizer on the same weights, from a checkpoint on disk that holds plain values only."""
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    again = hybrid(ours, fraction)
    again.load_state_dict(torch.load(saved, weights_only=True))
    return again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_b6_b7_b13_resume(emu_device: ModuleType, dtype: torch.dtype, fraction: float) -> None:
    """Each share gets its own state back, `weights_only` reads it, and moments keep float32."""
    here = parameters(dtype, SHAPES)
    theirs, ours = on_device(here), on_device(here)
    reference, optimizer = hybrid(theirs, fraction), hybrid(ours, fraction)
    for step in range(6):
        give_gradients(ours, copies(here), step)
        for one, other in zip(ours, theirs, strict=True):
            other.grad = one.grad
        optimizer.step()
        reference.step()
        if step == 2:
            optimizer = reloaded(optimizer, ours, fraction)
    assert_same(ours, theirs)
    if fraction < 1:
        assert optimizer.entries[ours[-1]]["exp_avg"].device.type == "emu"
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    assert all(state["step"] == 6 for state in optimizer.state.values())


class HostMemory:
    """Whether host memory is pinned that weights come from, and that gradients go to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_weights: dict[int, bool] = {}
        self.gone_to: dict[int, bool] = {}
        copy = StreamLanes.copy

        def noted(lanes: StreamLanes, lane: Lane, copies: Any, after: Any) -> Any:
            for target, source in copies:
                if lane is Lane.ONLOAD:
                    self.of_weights[source.data_ptr()] = source.is_pinned()
                else:
                    self.gone_to[target.data_ptr()] = target.is_pinned()
            return copy(lanes, lane, copies, after)

        monkeypatch.setattr(StreamLanes, "copy", noted)

    def pinned(self) -> tuple[set[bool], set[bool]]:
        """Of weights, and of gradients."""
        gradients = {pinned for address, pinned in self.gone_to.items() if address not in self.of_weights}
        return set(self.of_weights.values()), gradients


def test_b8_nothing_is_pinned_when_nothing_should_be(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for pin in (True, False):
        emu_device.reset_stats()
        ours = on_device(parameters(shapes=SHAPES))
        for weight in ours:
            weight.grad = torch.ones_like(weight)
        optimizer = hybrid(ours, 1.0, pin_cpu_grads=pin, pin_cpu_params=pin)
        memory = HostMemory(monkeypatch)
        optimizer.step()
        assert memory.pinned() == ({pin}, {pin})


def test_b9_host_bytes(emu_device: ModuleType) -> None:
    """14 bytes for each bfloat16 parameter: gradient, weight, its other 16 bits, and two moments."""
    weight = nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16, device="emu"))
    weight.grad = torch.ones_like(weight)
    optimizer = hybrid([weight], 1.0)
    optimizer.step()
    assert optimizer.held_bytes() <= 14.01 * weight.numel()


@pytest.mark.parametrize("through_data", [False, True])
def test_b10_weights_loaded_after_construction_count(emu_device: ModuleType, through_data: bool) -> None:
    loaded = [torch.full(shape, 0.3, dtype=torch.bfloat16) for shape in SHAPES]
    ours = on_device(parameters(torch.bfloat16, SHAPES))
    exact = [nn.Parameter(value.float()) for value in loaded]
    optimizer = hybrid(ours, 0.5)
    give_gradients(ours, exact, 0)
    optimizer.step()
    for weight, value in zip(ours, loaded, strict=True):
        if through_data:
            weight.data.copy_(value)
        else:
            with torch.no_grad():
                weight.copy_(value)
    if through_data:
        optimizer.update_fp32_param_by_new_param()
    for weight in ours:
        weight.grad = torch.zeros_like(weight)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert_same(ours, loaded)
    masters = [state.get("master_remainder") for state in optimizer.state.values()]
    assert all(master is not None and not master.any() for master in masters)


def test_b11_float32_weights_beside_bfloat16_ones(emu_device: ModuleType) -> None:
    narrow, wide = parameters(torch.bfloat16, SHAPES[:2]), parameters(torch.float32, SHAPES[2:])
    ours = on_device([*narrow, *wide])
    exact = copies([*narrow, *wide], torch.float32)
    optimizer, reference = hybrid(ours), torch.optim.AdamW(exact, fused=True, **RULES["adam"][1])
    for step in range(3):
        give_gradients(ours, exact, step)
        optimizer.step()
        reference.step()
    assert_same(ours, [ties_up(exact[0]), ties_up(exact[1]), *exact[2:]])


def test_b12_no_copy_makes_the_host_wait_for_pageable_memory(emu_device: ModuleType) -> None:
    ours = on_device(parameters(shapes=SHAPES))
    optimizer = hybrid(ours, 1.0)
    for step in range(3):
        give_gradients(ours, copies([weight.cpu() for weight in ours]), step)
        if step == 2:
            torch.accelerator.synchronize()
            emu_device.reset_stats()
        optimizer.step()
    assert emu_device.stats()["host_syncs"] <= 2  # for the gradients to come, and for the last weights to have left


def test_b14_frozen_weights_beside_adapters(emu_device: ModuleType) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    for weight in (ours[0], theirs[0]):
        weight.requires_grad_(False)
    optimizer, reference = hybrid(ours), torch.optim.AdamW(theirs, fused=True, **RULES["adam"][1])
    for step in range(3):
        give_gradients(ours, theirs, step)
        ours[0].grad = theirs[0].grad = None
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    assert not optimizer.state_dict()["state"].get(0)


def test_dummy_step_makes_state_and_changes_nothing(emu_device: ModuleType) -> None:
    theirs = parameters(shapes=SHAPES)
    ours = on_device(theirs)
    optimizer, reference = hybrid(ours), torch.optim.AdamW(theirs, fused=True, **RULES["adam"][1])
    optimizer.dummy_step()
    assert all(not state["exp_avg"].any() for state in optimizer.state.values())
    assert_same(ours, theirs)
    give_gradients(ours, theirs, 0)
    optimizer.step()
    reference.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_updates_beside_passes_are_refused(emu_device: ModuleType, overlap: str) -> None:
    """The model is a plain one: its forward would read weights while they are updated."""
    ours = on_device(parameters(shapes=SHAPES))
    before = copies(ours)
    optimizer = hybrid(ours, overlap=overlap)
    give_gradients(ours, copies([weight.cpu() for weight in ours]), 0)
    with pytest.raises(ValueError, match=rf"overlap='{overlap}' .*parameter 0 .* lives on emu.* overlap at \"none\""):
        optimizer.step()
    assert_same(ours, before)
    assert not optimizer.state


@pytest.mark.parametrize("fraction", [-1, 1.5, float("nan"), True])
def test_fractions_are_checked(fraction: Any) -> None:
    with pytest.raises(ValueError, match="offload_fraction"):
        HybridDeviceOptimizer([nn.Parameter(torch.zeros(2))], fraction)


def test_settings_that_change_no_result_are_let_through() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = HybridDeviceOptimizer([weight], 0.5, torch.optim.AdamW, fused=True, foreach=False, lr=0.1)
    assert copy.deepcopy(optimizer).sub_optimizers[0].param_groups[0]["lr"] == 0.1
