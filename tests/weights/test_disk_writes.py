"""User code writes weights in place while they are handed over to the disk: is nothing lost, and nothing refused?

Every test holds the hand-over at one moment until the write has happened.
"""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.memory.disk.checksums import Checksums
from headrace.memory.disk.file import DirectFile
from headrace.memory.disk.mapping import Mapping
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.residency import Residency
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.instances import instances
from tests.support.models import linears, seeded

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O

WIDTH, LAYERS = 64, 8


def build() -> nn.Sequential:
    return seeded(linears, LAYERS, WIDTH, nn.Tanh)


def offload(model: nn.Module, device: torch.device, disk: Path) -> headrace.Offloaded:
    block_bytes = weight_bytes(model) // LAYERS
    return headrace.offload(model, device=device, device_memory=3 * block_bytes, host_memory=6 * block_bytes, disk=disk)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class Held:
    """A function of the disk store that waits, before or after its work, from `hold` until `let_go`."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, *, before: bool) -> None:
        self._function, self._before = getattr(owner, name), before
        self._holds, self._last_argument = False, None
        patch.setattr(owner, name, lambda *args: self._call(*args))

    def _call(self, *args: Any) -> None:
        if not self._before:
            self._function(*args)
        if self._holds and self._last_argument in (None, args[-1]):
            self._reached.set()
            self._free.wait(0.25)  # the write itself may wait for this one
        if self._before:
            self._function(*args)

    def hold(self, last_argument: Any = None) -> None:
        """Whoever calls it waits, or whoever does so with that argument."""
        self._last_argument = last_argument
        self._reached, self._free = threading.Event(), threading.Event()
        self._holds = True

    def wait(self) -> None:
        """The caller waits until somebody does."""
        self._reached.wait(20)

    def let_go(self) -> None:
        """Fails where nobody has come: then the test shows nothing."""
        self._holds = False
        self._free.set()
        assert self._reached.is_set()


MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "before its checksums are made": (Checksums, "note_all", True),
    "before it goes to the file": (Mapping, "flush", True),
    "before the file is read": (Mapping, "flush", False),
}


@pytest.fixture(params=MOMENTS)
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Held:
    owner, name, before = MOMENTS[request.param]
    return Held(monkeypatch, owner, name, before=before)


WRITES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "foreach": lambda weights: torch._foreach_mul_(weights, 0.99),
    "clamp": lambda weights: [weight.clamp_(-0.1, 0.1) for weight in weights],
}


@pytest.mark.emu("random:0", guard_pinned=False)  # a load that reads meanwhile may be torn; the visit renews the block
@pytest.mark.parametrize("write", WRITES)
def test_after_a_step(compute_device: torch.device, tmp_path: Path, held: Held, write: str) -> None:
    """A step asks for what the next pass begins with, and then ordinary code changes it once more."""

    def train(model: nn.Module, held: Held | None = None) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for step in range(5):
            losses.append(model(inputs(step).to(compute_device)).square().mean())
            losses[-1].backward()
            if held is not None and step == 3:  # a plan is followed by then
                held.hold()
            optimizer.step()
            optimizer.zero_grad()
            if held is not None and step == 3:
                held.wait()
            with torch.no_grad():
                WRITES[write](list(model.parameters()))
            if held is not None and step == 3:
                held.let_go()
        return [loss.detach().cpu() for loss in losses]

    plain, model = build().to(compute_device), build()
    expected = train(plain)
    with offload(model, compute_device, tmp_path) as handle:
        assert_same(train(model, held), expected)
        assert_same(model.parameters(), plain.cpu().parameters())
        assert handle.stats().fetch_bytes > weight_bytes(model)


class Layers(nn.Module):
    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self._calls = calls  # its layers, or computes with their weights

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            linear = layer if self._calls else partial(nn.functional.linear, weight=layer.weight, bias=layer.bias)
            hidden = linear(hidden).tanh()
        return hidden


@pytest.mark.parametrize("calls", [True, False])
def test_between_forward_and_backward(
    compute_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: bool
) -> None:
    """A bias is written, which backward does not read, while its block is on its way for backward."""

    def train(model: Layers, blocks: list[Block] | None = None) -> list[torch.Tensor]:
        gradients: list[torch.Tensor] = []
        for step in range(2):
            loss = model(inputs(step).to(compute_device)).square().mean()
            if blocks is not None:
                block = send_for_one(blocks)
                held.wait()
            with torch.no_grad():
                torch._foreach_add_([layer.bias for layer in model.layers], 0.01)
            if blocks is not None:
                held.let_go()
                assert block.presence is Presence.ARRIVING
            loss.backward()
            gradients += [p.grad.cpu().clone() for p in model.parameters() if p.grad is not None]
        return gradients

    def send_for_one(blocks: list[Block]) -> Block:
        """As a plan would: which one it has on its way at that moment is another matter."""
        (residency,) = residencies
        block = next(block for block in blocks if block.is_fetched)
        residency.evict(block)
        residency.make_room(block, ())
        held.hold(f"'{block.name}'")
        residency.onload(block)
        return block

    plain, model = seeded(Layers, calls).to(compute_device), seeded(Layers, calls)
    expected = train(plain)
    held, residencies = Held(monkeypatch, DirectFile, "read", before=True), instances(monkeypatch, Residency)
    with offload(model, compute_device, tmp_path) as handle:
        assert_same(train(model, handle.settled_blocks("a look")), expected)
        assert_same(model.parameters(), plain.cpu().parameters())
        assert handle.stats().fetch_bytes > weight_bytes(model)
