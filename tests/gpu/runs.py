"""How is a plain run made that an offloaded one must equal, and how are lanes held up?

Offloaded weights are stepped on the host, and a host's AdamW rounds differently from a device's. So the plain run steps
on the host, too: everything else of it is on the device.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from headrace.runtime import lanes as lanes_module
from tests.matrix.models import Case
from tests.support.compare import Outcome
from tests.support.held import Allocations
from tests.support.loops import adamw, infer, train

EMULATED = os.environ.get("HEADRACE_TEST_ACCELERATOR") == "emu"  # see conftest.py
STEPS = 3
LANES = ("onload", "offload", "compute")


class HostAdamW:
    """AdamW on host copies of device parameters."""

    def __init__(self, parameters: Any) -> None:
        self._there: list[nn.Parameter] = list(parameters)
        self._here = [nn.Parameter(parameter.detach().cpu()) for parameter in self._there]
        self._optimizer = adamw(self._here)

    def zero_grad(self) -> None:
        for parameter in self._there:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for here, there in zip(self._here, self._there, strict=True):
            here.grad = None if there.grad is None else there.grad.cpu()
        self._optimizer.step()
        for here, there in zip(self._here, self._there, strict=True):
            there.copy_(here)


class Runs:
    """Runs of one case on one device."""

    def __init__(
        self, case: Case, device: torch.device, *, checkpointing: str = "none", training: str = "full"
    ) -> None:
        self.case = case
        self.device = device
        self._kind = checkpointing, training
        self.batches = case.on(device, STEPS)

    @property
    def trains(self) -> bool:
        return self._kind[1] != "inference"

    def build(self) -> nn.Module:
        return self.case.build(*self._kind)

    def run(self, model: nn.Module, *, on_host: bool, allocations: Allocations | None = None) -> Outcome:
        """The steps; `on_host`: the parameters are host tensors already."""
        after = allocations.forward_done if allocations is not None else lambda step: None
        if not self.trains:
            return infer(model, self.batches, self.case.forward, after)
        make: Callable[[Any], Any] = adamw if on_host else HostAdamW
        return train(model, self.batches, self.case.forward, make, after)

    def plain(self) -> tuple[nn.Module, Outcome]:
        """The model with all weights on the device, and what it gave."""
        model = self.build().to(self.device)
        return model, self.run(model, on_host=False)


def sleep(device: torch.device) -> None:
    """Holds up the current stream for some milliseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(5_000_000)  # cycles
        return
    scratch = torch.ones(256, 256, device=device)
    for _ in range(20):
        scratch = scratch @ scratch * 0.001


def hold_up(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """Puts a sleep in front of every copy of one lane, or in front of every visit on the compute lane."""
    copy, tick = lanes_module.StreamLanes.copy, lanes_module.StreamLanes.tick

    def slow_copy(self: Any, copied_on: Any, copies: Any, after: Any) -> Any:
        if copied_on.value == lane:
            with self._streams[copied_on]:
                sleep(self.device)
        return copy(self, copied_on, copies, after)

    def slow_tick(self: Any) -> Any:
        sleep(self.device)
        return tick(self)

    monkeypatch.setattr(lanes_module.StreamLanes, "copy", slow_copy)
    if lane == "compute":
        monkeypatch.setattr(lanes_module.StreamLanes, "tick", slow_tick)
