"""Does the tutorial's CPUOffloadOptimizer train as AdamW does, with its memory layout and without its faults?"""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.compat.tutorial import CPUOffloadOptimizer, OffloadConfig
from tests.support.compare import assert_same
from tests.support.loops import random_batches, steps

pytestmark = pytest.mark.core(device="emu")


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24), nn.Linear(24, 4)).to(dtype)


def train(model: nn.Module, optimizer: Any, device: torch.device, count: int = 5, dtype: Any = torch.float32) -> None:
    steps(model, optimizer, [batch.to(dtype) for batch in random_batches(count, 8, 24, device=device)])
    optimizer.synchronize()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


class MasterWeights:
    """What the tutorial means: float32 masters of narrow weights, AdamW on the CPU, weights rounded to even."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self.model = model
        self.masters = [nn.Parameter(p.detach().float().cpu().clone()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **settings)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float().cpu()
        self.optimizer.step()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            parameter.copy_(master.to(parameter.dtype))

    def synchronize(self) -> None:
        pass


def test_settings_that_are_set_between_steps_count(device: torch.device) -> None:
    plain, model = small().to(device), small().to(device)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    optimizer = CPUOffloadOptimizer(model, lr=1e-2)
    for settings in ({"lr": 1e-3}, {"betas": (0.8, 0.9), "eps": 1e-3}, {"weight_decay": 0.5}, {"lr": 0.0}):
        for name, value in settings.items():
            setattr(optimizer, name, value)
            reference.param_groups[0][name] = value
            assert getattr(optimizer, name) == optimizer.param_groups[0][name] == value
        train(model, optimizer, device, count=2)
        steps(plain, reference, random_batches(2, 8, 24, device=device))
        assert_same(state(model), state(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_example_trains_as_master_weights_do(
    device: torch.device, dtype: torch.dtype, threads: int, overlap: bool
) -> None:
    ours, theirs = small(dtype).to(device), small(dtype).to(device)
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.05}
    optimizer = CPUOffloadOptimizer(ours, **settings, config=OffloadConfig(num_threads=threads, overlap_comm=overlap))
    train(ours, optimizer, device, dtype=dtype)
    train(theirs, MasterWeights(theirs, **settings), device, dtype=dtype)
    assert all(torch.equal(value, state(theirs)[name]) for name, value in state(ours).items())
    assert optimizer.step_count == 5
    assert set(optimizer.cpu_m) == set(optimizer.cpu_v) == set(optimizer.cpu_params) == set(optimizer.gpu_params)
    held = [*optimizer.cpu_m.values(), *optimizer.cpu_v.values(), *optimizer.cpu_params.values()]
    assert {(tensor.device.type, tensor.dtype) for tensor in held} == {("cpu", torch.float32)}


@pytest.mark.parametrize("offloads", [True, False])
def test_bytes_on_the_device(emulator: Any, offloads: bool) -> None:
    """2 bytes for each bfloat16 parameter between steps, 4 at most; the tutorial keeps its gradients: 4 always."""
    model = nn.Linear(256, 256, bias=False, dtype=torch.bfloat16).to("emu")
    count = model.weight.numel()
    held = torch.accelerator.memory_allocated()
    optimizer = CPUOffloadOptimizer(model, config=OffloadConfig(offload_optimizer=offloads))
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats()
        model(torch.ones(1, 256, dtype=torch.bfloat16, device="emu")).sum().backward()
        torch.accelerator.synchronize()
        backward_peak = torch.accelerator.max_memory_allocated() - held
        assert not offloads or 2 * count <= backward_peak < 2 * count + 8192  # a gradient beside the weight
        assert model.weight.grad is not None
        optimizer.step()
    torch.accelerator.synchronize()
    on_device = torch.accelerator.memory_allocated() - held
    assert on_device < 4096 if offloads else on_device >= 8 * count  # moments; and the master
    assert (optimizer.held_bytes() >= 12 * count) == offloads
    shown = [*optimizer.cpu_params.values(), *optimizer.cpu_m.values(), *optimizer.cpu_v.values()]
    assert [tensor.device.type for tensor in shown] == ["cpu"] * 3


def test_gradients_stay_where_they_are_not_offloaded(emulator: Any) -> None:
    model = nn.Linear(8, 8).to("emu")
    optimizer = CPUOffloadOptimizer(model, config=OffloadConfig(offload_gradients=False))
    model(torch.ones(1, 8, device="emu")).sum().backward()
    optimizer.step()
    assert model.weight.grad is not None
    optimizer.zero_grad()
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("settings", "changes", "trained"),
    [({}, {}, False), ({"lr": -1.0}, {}, True), ({}, {"offload_optimizer": False}, True)],
)
def test_what_is_refused_leaves_the_model_as_it_was(
    device: torch.device, settings: dict[str, Any], changes: dict[str, bool], trained: bool
) -> None:
    model = small().requires_grad_(trained)
    with pytest.raises(ValueError, match=r"trained|lr|learning|updated"):
        CPUOffloadOptimizer(model, **settings, config=OffloadConfig(offload_parameters=True, **changes))
    headrace.offload(model, device=device).remove()  # which raises for an offloaded one


def test_offloaded_parameters_are_headraces(device: torch.device) -> None:
    ours, theirs = small(), small()
    optimizer = CPUOffloadOptimizer(ours, lr=1e-2, config=OffloadConfig(offload_parameters=True))
    reference = MasterWeights(theirs, lr=1e-2, weight_decay=0.01)
    train(ours, optimizer, device)
    assert optimizer.handle is not None
    optimizer.handle.remove()
    headrace.offload(theirs, device=device)
    train(theirs, reference, device)
    assert all(torch.equal(value, state(theirs)[name]) for name, value in state(ours).items())


def test_a_parameter_without_gradient_is_left_alone(device: torch.device) -> None:
    """The tutorial updates it with memory that nobody filled, or with the last step's gradient."""
    model = small().to(device)
    before = state(copy.deepcopy(model))
    optimizer = CPUOffloadOptimizer(model, lr=0.1)
    model[0](torch.ones(1, 24, device=device)).sum().backward()
    optimizer.step()
    after = state(model)
    assert torch.equal(after["3.weight"], before["3.weight"])
    assert not torch.equal(after["0.weight"], before["0.weight"])
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(state(model)["0.weight"], after["0.weight"])


def test_weights_that_were_loaded_later_count(device: torch.device) -> None:
    """The tutorial overwrites them with masters made before."""
    model = small(torch.bfloat16).to(device)
    optimizer = CPUOffloadOptimizer(model, lr=0.0, weight_decay=0.0)
    train(model, optimizer, device, count=1, dtype=torch.bfloat16)
    loaded = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded)
    train(model, optimizer, device, count=1, dtype=torch.bfloat16)
    assert all(torch.equal(value, loaded[name].cpu()) for name, value in state(model).items())


def test_checkpoints_and_schedules(device: torch.device) -> None:
    """The tutorial's is no torch.optim.Optimizer: no schedule takes it, and its state cannot be saved."""
    models = small().to(device), small().to(device)
    straight = CPUOffloadOptimizer(models[0], lr=1e-2)
    train(models[0], straight, device, count=3)
    first = CPUOffloadOptimizer(models[1], lr=1e-2)
    train(models[1], first, device, count=3)
    saved = io.BytesIO()
    torch.save(first.state_dict(), saved)
    saved.seek(0)
    again = CPUOffloadOptimizer(models[1], lr=0.5)
    again.load_state_dict(torch.load(saved, weights_only=True))
    assert again.step_count == 3
    for model, optimizer in zip(models, (straight, again), strict=True):
        torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, device, count=2)
    assert all(torch.equal(value, state(models[0])[name]) for name, value in state(models[1]).items())


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_threads=0"):
        CPUOffloadOptimizer(small(), config=OffloadConfig(num_threads=0))
    frozen = small().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of this Sequential is trained"):
        CPUOffloadOptimizer(frozen)
