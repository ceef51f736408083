"""Do forwards whose sizes nobody planned for keep to the ceiling of a plan, and give the same results?"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.activations import plan_cache
from tests.activations.models import SAVED_BYTES, Layer, Stack, results, rows
from tests.support.compare import assert_same
from tests.support.held import allocated_bytes, is_counted

LAYERS = 12
CEILING_BYTES = 8 * SAVED_BYTES  # at least three of the largest: what is computed now cannot leave
FORWARDS = 10
SLACK_BYTES = 32 << 10  # not saved, or rounded by the allocator


class ExpertLayer(nn.Module):
    """Each row goes to one of four experts; one without rows is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        parts = []
        for index, expert in enumerate(self.experts):
            places = torch.where(chosen == index)[0].to(x.device)
            if len(places):
                parts.append(expert(x[places]))
        return torch.cat(parts)


class Experts(nn.Module):
    """Rows go to others at every step, and to more or fewer experts."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(layers))

    def forward(self, x: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            x = layer(x, torch.randint(1 + seed % 4, (len(x),), generator=generator))
        return x


def random_lengths(model: nn.Module, device: torch.device, index: int) -> Tensor:
    return model(rows(device, index, count=random.Random(index).randrange(32, 160)))  # type: ignore[no-any-return]


def random_experts(model: nn.Module, device: torch.device, index: int) -> Tensor:
    return model(rows(device, index), index)  # type: ignore[no-any-return]


def grows(model: nn.Module, device: torch.device, index: int) -> Tensor:
    return model(rows(device, index, count=32 + 16 * index))  # type: ignore[no-any-return]


def shrinks(model: nn.Module, device: torch.device, index: int) -> Tensor:
    return grows(model, device, FORWARDS - index)


Call = Callable[[nn.Module, torch.device, int], Tensor]
KINDS: list[tuple[Callable[[], nn.Module], Call]] = [
    (lambda: Stack(LAYERS), random_lengths),
    (lambda: Stack(LAYERS), grows),
    (lambda: Stack(LAYERS), shrinks),
    (Experts, random_experts),
]


def run(model: nn.Module, call: Call, device: torch.device, index: int) -> tuple[list[Tensor], int, int]:
    """Results of a step, the device bytes after its forward, and the most that it took."""
    model.zero_grad()
    before_bytes = allocated_bytes(device)
    if is_counted(device):
        torch.accelerator.reset_peak_memory_stats(device)
    loss = call(model, device, index).sum()
    after_forward_bytes = allocated_bytes(device) - before_bytes
    loss.backward()
    most_bytes = torch.accelerator.max_memory_allocated(device) if is_counted(device) else 0
    return results(model, loss), after_forward_bytes, most_bytes - before_bytes


@pytest.mark.core(ceiling=None)
@pytest.mark.parametrize(("make", "call"), KINDS, ids=[call.__name__ for _, call in KINDS])
@pytest.mark.parametrize("ceiling", [CEILING_BYTES, None])
def test_sizes_that_change(
    make: Callable[[], nn.Module], call: Call, ceiling: int | None, compute_device: torch.device
) -> None:
    plain, model = make().to(compute_device), make().to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=ceiling) as handle:
        for index in range(FORWARDS):
            expected, plain_bytes, plain_peak_bytes = run(plain, call, compute_device, index)
            got, after_forward_bytes, peak_bytes = run(model, call, compute_device, index)
            assert_same(got, expected)
            assert peak_bytes <= plain_peak_bytes
            if ceiling is not None and index > 0 and is_counted(compute_device):
                assert after_forward_bytes <= min(plain_bytes, CEILING_BYTES + SLACK_BYTES)
        stats = handle.stats()
        assert stats.host_held_bytes == 0
        assert stats.recorded_forwards == 1
        assert stats.similar_forwards > 0
        assert stats.offloads > 0


@pytest.mark.core(call="random_lengths")
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("call", [random_lengths, random_experts])
@pytest.mark.parametrize(
    ("settings", "least_share", "most_share"),
    [
        ({"all_leave": True}, 0.7, 1.0),
        ({"device_memory": 0, "fraction": 0.4}, 0.2, 0.45),
        ({"device_memory": 0, "most_in_flight": 1}, 0.7, 1.0),
        ({"device_memory": 4 * SAVED_BYTES, "tier": "disk", "host_memory": "640KiB"}, 0.4, 1.0),
    ],
    ids=["all_leave", "fraction", "most_in_flight", "disk"],
)
def test_settings_hold_for_any_size(
    call: Call,
    settings: dict[str, Any],
    least_share: float,
    most_share: float,
    compute_device: torch.device,
    tmp_path: Path,
) -> None:
    """`least_share` and `most_share`: how much of what is saved leaves."""
    make: Callable[[], nn.Module] = Experts if call is random_experts else lambda: Stack(LAYERS)
    disk = tmp_path if "tier" in settings else None
    plain, model = make().to(compute_device), make().to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, disk=disk, **settings) as handle:
        run(model, call, compute_device, 3)  # is recorded, and everything leaves
        handle.reset_stats()
        saved_bytes = 0
        for index in range(4, FORWARDS):
            expected, plain_bytes, _ = run(plain, call, compute_device, index)
            assert_same(run(model, call, compute_device, index)[0], expected)
            saved_bytes += plain_bytes
        stats = handle.stats()
    assert stats.planned_forwards + stats.similar_forwards == FORWARDS - 4
    if is_counted(compute_device):
        assert least_share * saved_bytes <= stats.offload_bytes <= most_share * saved_bytes
        assert disk is None or stats.host_peak_bytes <= 640 << 10


class First(nn.Module):
    """Takes any number of inputs, and uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.tanh(parts[0] * self.scale).square().sum()


def gradients(model: nn.Module, count: int) -> list[Tensor]:
    """The gradients of `count` forwards, each with one input more than the one before; all before any backward."""
    inputs = [[torch.full((4, 4), 0.1 * index, requires_grad=True)] * index for index in range(1, count + 1)]
    for loss in [model(*parts) for parts in inputs]:
        loss.backward()
    return [parts[0].grad for parts in inputs if parts[0].grad is not None]


def test_kinds_of_inputs_that_never_come_again_are_forgotten() -> None:
    expected = gradients(First(), 80)
    with headrace.offload_activations(model := First(), min_bytes=1) as handle:
        found = gradients(model, 80)
        assert handle.stats().offload_bytes > 0
        handle.reset_stats()
        for kind in (1, 80):
            model(*[torch.ones(4, 4, requires_grad=True)] * kind).backward()
        stats = handle.stats()
        assert stats.recorded_forwards == 1  # the first kind, as if it had never come
        assert stats.similar_forwards + stats.planned_forwards == 1
    assert_same(found, expected)


def test_a_planner_that_fails_is_named_once_and_does_not_fail_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: object) -> None:
        raise IndexError("no such choice")

    expected = gradients(First(), 3)
    monkeypatch.setattr(plan_cache, "plan_activations", fails)
    with (
        headrace.offload_activations(model := First(), min_bytes=1) as handle,
        pytest.warns(RuntimeWarning, match="planner of activations failed.*IndexError: no such choice") as told,
    ):
        found = gradients(model, 3)
    assert len(told) == 1
    assert handle.plan is None
    assert_same(found, expected)
