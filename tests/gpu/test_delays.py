"""Does every wait between lanes hold when a lane is slow? A sleep stands in front of its copies, or of visits.

On a fast lane a missing wait shows rarely. Each delay has a control, which takes out the wait that it is meant to
expose and must then give wrong results: else the delay would prove nothing.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace
from headrace.runtime import lanes as lanes_module
from headrace.runtime.lanes import Lane
from headrace.weights.movement.block import Presence
from headrace.weights.movement.gradients import Gradients
from headrace.weights.movement.residency import Residency
from tests.gpu.runs import EMULATED, LANES, Runs, hold_up
from tests.matrix.models import CASES, Case
from tests.support.compare import Outcome, assert_same
from tests.support.held import weight_bytes

pytestmark = pytest.mark.gpu

DENSE = next(case for case in CASES if case.name == "dense")
DELAYED = [case for case in CASES if case.name in ("dense", "tied", "unet", "multihead")]


def offloaded(runs: Runs, **settings: Any) -> Outcome:
    model = runs.build()
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    budget_bytes = int(weight_bytes(model) * runs.case.share) + buffer_bytes
    with headrace.offload(model, device=runs.device, device_memory=budget_bytes, **settings):
        return runs.run(model, on_host=True)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("training", ["full", "inference"])
@pytest.mark.parametrize("case", DELAYED, ids=lambda case: case.name)
def test_a_slow_lane_changes_nothing(
    case: Case, training: str, lane: str, accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(case, accelerator, training=training)
    _, plain = runs.plain()
    hold_up(monkeypatch, lane)
    assert_same(offloaded(runs), plain)


@pytest.mark.parametrize("lane", LANES)
def test_a_slow_lane_changes_nothing_in_accumulated_gradients(
    lane: str, accelerator: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches: the second one's gradients go through staging memory and are added by the host lane."""
    runs = Runs(DENSE, accelerator)

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        for batch in runs.batches[:2]:
            runs.case.forward(model, batch)[1].backward()
        return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}

    plain = gradients(runs.build().to(accelerator))
    hold_up(monkeypatch, lane)
    model = runs.build()
    with headrace.offload(model, device=accelerator, device_memory=weight_bytes(model) // 2):
        for name, gradient in gradients(model).items():
            assert torch.equal(gradient, plain[name]), name


def without_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute does not wait for a block to arrive."""

    def arrive(self: Residency, block: Any) -> None:
        if block.presence is Presence.ARRIVING:
            block.becomes(Presence.PRESENT)

    monkeypatch.setattr(Residency, "arrive", arrive)


def without_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward returns while gradients are still leaving."""

    def deliver(self: Gradients, _in_hooks: Any = None) -> None:
        self._submit_ready()
        arrived = self._targets
        self._forget()
        for param, gradient in arrived.items():
            param.home.grad = gradient

    monkeypatch.setattr(Gradients, "deliver", deliver)


def without_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients leave before compute has made them."""
    copy = lanes_module.StreamLanes.copy

    def hasty(self: Any, lane: Lane, copies: Any, after: Any) -> Any:
        return copy(self, lane, copies, torch.Event(self.device) if lane is Lane.OFFLOAD else after)

    monkeypatch.setattr(lanes_module.StreamLanes, "copy", hasty)


@pytest.mark.parametrize(
    ("lane", "take_out"), [("onload", without_arrival), ("offload", without_delivery), ("compute", without_compute)]
)
def test_the_delay_shows_a_wait_that_is_missing(
    lane: str,
    take_out: Callable[[pytest.MonkeyPatch], None],
    accelerator: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(DENSE, accelerator)
    _, plain = runs.plain()
    take_out(monkeypatch)
    hold_up(monkeypatch, lane)
    with pytest.raises(AssertionError, match=r"differs|output"):
        assert_same(offloaded(runs), plain)
    torch.accelerator.synchronize()
    if EMULATED:
        from emulator import emu

        emu.take_reports()  # races are what this test makes
