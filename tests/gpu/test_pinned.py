"""Is host memory page-locked for a real accelerator, so that copies run while the host goes on?"""

from typing import Any

import pytest
import torch

import headrace
from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.lanes import Lane, open_lanes
from tests.gpu.runs import Runs, hold_up
from tests.matrix.models import CASES

pytestmark = pytest.mark.gpu


def test_an_arena_is_page_locked_and_let_go(accelerator: torch.device) -> None:
    """Again and again at the same addresses: memory that stayed registered would be refused the second time."""
    torch.empty(1).pin_memory()  # is_pinned() asks the device only after it was used
    ledger = Ledger()
    for _ in range(20):
        arena = Arena(3_000_000, accelerator, ledger, "weights")
        tensor = arena.tensor(64, 1000)
        assert arena.pinned
        assert tensor.is_pinned()
        there = torch.arange(1000, device=accelerator).to(torch.uint8)
        tensor.copy_(there, non_blocking=True)
        torch.accelerator.synchronize()
        assert torch.equal(tensor, there.cpu())
        del arena, tensor
        assert ledger.held_bytes(Tier.HOST) == 0


def test_a_copy_is_submitted_and_not_waited_for(accelerator: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions: the lane sleeps, so the copy cannot be done when `copy` returns."""
    arena = Arena(1 << 20, accelerator, Ledger(), "weights")
    here, there = arena.tensor(0, 1 << 20), torch.zeros(1 << 20, dtype=torch.uint8, device=accelerator)
    here.fill_(5)
    for lane, pair in ((Lane.ONLOAD, (there, here)), (Lane.OFFLOAD, (here, there))):
        with monkeypatch.context() as patch:
            hold_up(patch, lane.value)
            lanes = open_lanes(accelerator)
            lanes.copy(lane, [pair], lanes.mark()).done.synchronize()  # first uses may wait
            transfer = lanes.copy(lane, [pair], lanes.mark())
            assert not transfer.done.query()
            transfer.done.synchronize()
            assert transfer.done.query()
            assert lanes.seconds(transfer.begun, transfer.done) > 0
            lanes.close()
    assert there.cpu().tolist() == [5] * (1 << 20)


def test_weights_and_gradients_rest_in_page_locked_memory(accelerator: torch.device) -> None:
    torch.empty(1).pin_memory()
    runs = Runs(CASES[0], accelerator)
    model: Any = runs.build()
    with headrace.offload(model, device=accelerator, device_memory=1 << 20) as handle:
        runs.case.forward(model, runs.batches[0])[1].backward()
        assert all(parameter.is_pinned() and parameter.grad.is_pinned() for parameter in model.parameters())
        assert handle.stats().host_bytes >= 2 * sum(parameter.nbytes for parameter in model.parameters())
