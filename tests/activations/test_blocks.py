"""May a forward be more than the model's call: a block with the loss behind it, several calls, and backward too?"""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.runtime.autograd import top_hooks
from tests.activations.models import ROWS, SAVED_BYTES, WIDTH, Stack, results, rows, step
from tests.support.compare import assert_same

WORDS = 2 * WIDTH  # the logits are twice what a layer saves


class Speaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(6)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def loss_of(model: nn.Module, device: torch.device, seed: int = 0) -> Tensor:
    targets = torch.arange(ROWS).to(device)
    return nn.functional.cross_entropy(model(rows(device, seed)), targets)


def expected(device: torch.device, seeds: tuple[int, ...]) -> list[Tensor]:
    model = Speaks().to(device)
    loss = torch.stack([loss_of(model, device, seed) for seed in seeds]).sum()
    loss.backward()
    return results(model, loss)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_a_loss_counts_and_leaves(backward_inside: bool, compute_device: torch.device) -> None:
    """Two losses before the backward: the first one's tensors wait, and the ceiling holds for them too."""
    wanted = expected(compute_device, (0, 1))
    model = Speaks().to(compute_device)
    budget = 6 * SAVED_BYTES
    with headrace.offload_activations(model, min_bytes=4096, device_memory=budget) as handle:
        for _ in range(4):
            model.zero_grad()
            with handle.forward():
                loss = torch.stack([loss_of(model, compute_device, seed) for seed in (0, 1)]).sum()
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            assert_same(results(model, loss), wanted)
        plan = handle.plan
        assert handle.stats().host_held_bytes == 0
    assert plan is not None
    sizes = [saved.nbytes for saved in plan.problem.saved]
    assert sizes.count(2 * SAVED_BYTES) == 2  # both log-softmaxes are seen
    assert sizes.index(2 * SAVED_BYTES) in plan.offloaded
    assert plan.peak_bytes <= budget


def test_each_backward_of_a_block_begins_another_forward(compute_device: torch.device) -> None:
    plain, model = Speaks().to(compute_device), Speaks().to(compute_device)
    for seed in (0, 1):
        loss_of(plain, compute_device, seed).backward()
    with headrace.offload_activations(model, min_bytes=4096, device_memory=0) as handle:
        for _ in range(3):
            model.zero_grad()
            with handle.forward():
                for seed in (0, 1):
                    loss_of(model, compute_device, seed).backward()
            assert_same(results(model), results(plain))
        plan = handle.plan
        handle.reset_stats()
        with handle.forward():
            loss_of(model, compute_device).backward()
        assert plan is not None
        assert handle.stats().offload_bytes == plan.host_bytes > 5 * SAVED_BYTES


def test_gradients_inside_of_the_model_do_not_end_its_forward(compute_device: torch.device) -> None:
    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Stack(6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.body(x)
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return self.body(y) + gradient

    wanted = step(Penalised().to(compute_device), rows(compute_device))
    model = Penalised().to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for _ in range(4):
            assert_same(step(model, rows(compute_device)), wanted)
        plan = handle.plan
    assert plan is not None
    assert len(plan.offloaded) >= 10


def test_a_block_that_breaks_off(compute_device: torch.device) -> None:
    wanted = expected(compute_device, (0,))
    model = Speaks().to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for _ in range(3):
            with contextlib.suppress(KeyboardInterrupt), handle.forward():
                loss_of(model, compute_device)
                raise KeyboardInterrupt
            assert top_hooks(True) is None
            model.zero_grad()
            with handle.forward():
                loss = loss_of(model, compute_device)
            loss.backward()
            assert_same(results(model, loss), wanted)
            with torch.no_grad(), handle.forward():
                loss_of(model, compute_device)
        with handle.forward(), pytest.raises(headrace.StateError, match="inside of another"):
            handle.forward().__enter__()


def test_with_weights(compute_device: torch.device) -> None:
    wanted = expected(compute_device, (0,))
    model = Speaks()
    settings: dict[str, Any] = {"min_bytes": 0, "device_memory": 0}
    with headrace.offload(model, device=compute_device, activations=settings) as handle:
        assert handle.activations is not None
        for _ in range(4):
            model.zero_grad()
            with handle.activations.forward():
                loss = loss_of(model, compute_device)
            loss.backward()
            assert_same(results(model, loss), wanted)
        assert handle.activations.plan is not None
        assert 2 * SAVED_BYTES in {saved.nbytes for saved in handle.activations.plan.problem.saved}
