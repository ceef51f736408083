"""What the ranks of the tests of pipelines and of tensor parallel models run; see programs.py."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import headrace
from headrace import LayoutError, StateError, optim

WIDTH, LAYERS, MICRO_BATCHES, STEPS = 64, 6, 4, 3
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
BUDGET_BYTES = 3 * LAYER_BYTES + 4096
PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


class Stage(nn.Module):
    """The one of that number, and the head where it is the last."""

    def __init__(self, number: int, *, last: bool, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3) if last else nn.Identity()
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class OnHost(nn.Module):
    """What travels between ranks is on the CPU, where gloo takes it."""

    def __init__(self, stage: nn.Module, device: str) -> None:
        super().__init__()
        self.stage = stage
        self.device = device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stage(x.to(self.device)).cpu()  # type: ignore[no-any-return]


def pipeline(kind: Any, stages: list[nn.Module], device: str) -> Any:
    """The schedule of this rank's stages, of which ranks have the same number, one after the other."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    count = world * len(stages)
    made = [
        PipelineStage(OnHost(stage, device), rank + world * index, count, torch.device("cpu"))
        for index, stage in enumerate(stages)
    ]
    several = kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
    return kind(made if several else made[0], MICRO_BATCHES, loss_fn=nn.functional.mse_loss)


def step(schedule: Any, number: int) -> list[torch.Tensor]:
    """One step; the losses of its micro-batches, on the rank that has the last stage."""
    rank, losses = distributed.get_rank(), []
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, 3, generator=generator)
    last = rank == distributed.get_world_size() - 1
    schedule.step(*([] if rank else [x]), **({"target": y, "losses": losses} if last else {}))
    return losses


def stages_of_this_rank(count: int, **settings: Any) -> list[nn.Module]:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    numbers = [rank + world * index for index in range(count)]
    return [Stage(number, last=number == count * world - 1, **settings) for number in numbers]


def trains_as_without(name: str, device: str, most_loads: float, recomputes: bool = False) -> None:
    """Losses, gradients and weights of the same pipeline without headrace, bit for bit, within the budget."""
    kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "Interleaved1F1B": ScheduleInterleaved1F1B}[name]
    if device == "emu":
        from emulator import emu

        emu.reset(allocator="exact", scheduler="random", seed=distributed.get_rank(), one_host_clock=True)
    count = 2 if name == "Interleaved1F1B" else 1
    mine, plain = (stages_of_this_rank(count, recomputes=recomputes) for _ in range(2))
    handles = [headrace.offload(stage, device=device, device_memory=BUDGET_BYTES) for stage in mine]
    weights = [[p for stage in stages for p in stage.parameters()] for stages in (mine, plain)]
    optimizers: list[Any] = [optim.AdamW(stage.parameters(), lr=0.01, overlap="forward") for stage in mine]
    copies = [one.to(device) for one in plain]
    schedules = [pipeline(kind, mine, device), pipeline(kind, copies, device)]
    if device == "cpu":
        optimizers.append(torch.optim.AdamW(weights[1], lr=0.01, fused=True))
    for number in range(STEPS):
        losses = [step(schedule, number) for schedule in schedules]
        assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
        for one, two in zip(*weights, strict=True):
            assert torch.equal(one.grad, two.grad.cpu())  # type: ignore[arg-type,union-attr]
        for optimizer in optimizers if device == "cpu" else ():
            optimizer.step()
        for stage in (*mine, *plain):
            stage.zero_grad()
    for one, two in zip(*weights, strict=True):
        assert torch.equal(one, two.cpu())
    for handle, stage in zip(handles, mine, strict=True):
        stats, held = handle.stats(), sum(p.nbytes for p in stage.parameters())
        assert 0 < stats.device_peak_bytes <= BUDGET_BYTES
        assert held < stats.onload_bytes / STEPS <= most_loads * held
        assert stats.offload_bytes == STEPS * MICRO_BATCHES * held
        handle.remove()


def later_stages_offload_fewer_activations() -> None:
    """All ranks have room for what one micro-batch saves. With 1F1B, the first of two ranks holds two at once."""
    from emulator import emu

    emu.reset(allocator="exact", scheduler="random", seed=distributed.get_rank(), one_host_clock=True)
    (mine,), (plain,) = (stages_of_this_rank(1) for _ in range(2))
    tensor_bytes = 8 // MICRO_BATCHES * WIDTH * 4
    saved_bytes = (2 * LAYERS + distributed.get_rank()) * tensor_bytes  # the last saves the input of its head, too
    schedules = [pipeline(Schedule1F1B, [stage.to("emu")], "emu") for stage in (mine, plain)]
    with headrace.offload_activations(mine, min_bytes=0, device_memory=saved_bytes) as handle:
        for number in range(2 * STEPS):
            handle.reset_stats()
            losses = [step(schedule, number) for schedule in schedules]
            assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
            for one, two in zip(mine.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
        assert handle.plan is not None
        assert handle.plan.problem.nbytes == saved_bytes
        left_bytes = handle.stats().offload_bytes
    if distributed.get_rank():
        assert left_bytes == 0
    else:
        assert MICRO_BATCHES * saved_bytes // 2 <= left_bytes < MICRO_BATCHES * saved_bytes


def a_split_backward_is_refused() -> None:
    """Plain stages may have it beside offloaded ones."""
    (mine,), (plain,) = stages_of_this_rank(1), stages_of_this_rank(1)
    with headrace.offload(mine, device="cpu", device_memory=BUDGET_BYTES):
        mine(torch.ones(1, WIDTH))
        step(pipeline(ScheduleInterleavedZeroBubble, [plain], "cpu"), 0)
        assert all(parameter.grad is not None for parameter in plain.parameters())
        split = "splits the backward .* use ScheduleGPipe"
        expected: Any = (StateError, split) if distributed.get_rank() else (RuntimeError, "")  # whose inputs need none
        with pytest.raises(expected[0], match=expected[1]):
            step(pipeline(ScheduleInterleavedZeroBubble, [mine], "cpu"), 0)
        print("done", flush=True)
        os._exit(0)  # the group cannot be left together any more


class Parallel(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(32), "up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
            for _ in range(4)
        )
        self.head = nn.Linear(32, 7)
        for layer in self.layers:
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](layer["norm"](x)).relu())  # type: ignore[index,operator]
        return self.head(x)  # type: ignore[no-any-return]


def tensor_parallel(recomputes: bool) -> None:
    """DTensors are refused; with the lines of the page each rank offloads its shards, and nothing changes."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    mine, plain = Parallel(mesh), Parallel(mesh)
    with pytest.raises(LayoutError, match=r"'layers.0.up.weight' .* is a DTensor: .*docs/parallel\.md"):
        headrace.offload(mine, device="cpu")
    keep_own_shards(mine)
    assert not any(isinstance(parameter, DTensor) for parameter in mine.parameters())
    held = sum(parameter.nbytes for parameter in mine.parameters())
    budget = held * 3 // 4
    with headrace.offload(mine, device="cpu", device_memory=budget) as handle:
        optimizers = [optim.AdamW(one.parameters(), lr=0.01) for one in (mine, plain)]
        for number in range(STEPS):
            x = torch.randn(3, 32, generator=torch.Generator().manual_seed(number))
            losses = []
            for one in (mine, plain):
                y = checkpoint(one, x, use_reentrant=False) if recomputes else one(x)
                losses.append(y.square().mean())
                losses[-1].backward()
            assert torch.equal(*losses)
            for name, parameter in plain.named_parameters():
                own = whole(mine, name).grad
                assert own is not None
                assert torch.equal(own, local(parameter.grad)), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in plain.named_parameters():
            assert torch.equal(whole(mine, name), local(parameter)), name
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= budget
        assert stats.onload_bytes > held


def tensor_parallel_replicas() -> None:
    """Two replicas of two shards: the replicas of a shard share one offloaded copy, and average its gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    mine, plain = Parallel(mesh["shards"]), Parallel(mesh["shards"])
    keep_own_shards(mine)
    held = sum(parameter.nbytes for parameter in mine.parameters())
    with headrace.offload(mine, device="cpu", mesh=mesh["replicas"], device_memory=held * 3 // 4) as handle:
        optimizers = [optim.AdamW(one.parameters(), lr=0.01) for one in (mine, plain)]
        for number in range(STEPS):
            seed = 2 * number + mesh.get_local_rank("replicas")
            x = torch.randn(3, 32, generator=torch.Generator().manual_seed(seed))
            for one in (mine, plain):
                one(x).square().mean().backward()
            for parameter in plain.parameters():
                gradient = local(parameter.grad)
                distributed.all_reduce(gradient, group=mesh["replicas"].get_group())
                gradient.div_(2)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in plain.named_parameters():
            assert torch.equal(whole(mine, name), local(parameter)), name
        assert handle.stats().device_peak_bytes <= held * 3 // 4 < handle.stats().onload_bytes


def keep_own_shards(model: nn.Module) -> None:
    """As the page has it."""
    lines: dict[str, Any] = {}
    exec(re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], lines)
    lines["keep_own_shards"](model)


def whole(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter of that name, wherever it is now."""
    module, _, last = name.rpartition(".")
    found: Any = dict(model.named_parameters())
    return found.get(name, found.get(f"{module}.parametrizations.{last}.original"))  # type: ignore[no-any-return]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
