"""Do the faults that users of other systems reported stay away? Each test is named after the report."""

import gc
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.activations.stash import Stash
from tests.activations.models import SAVED_BYTES, Layer, Stack, rows, step
from tests.support.compare import assert_same
from tests.support.held import allocated_bytes


@pytest.mark.emu("threads", "lazy", "random:0", "random:1")
def test_megatron_7398_a_reload_does_not_race_its_own_copy_out(emu_device: ModuleType) -> None:
    """The last tensors are sent for while their copies out are under way, or used before those have begun."""
    emu_device.configure(d2h_bytes_per_second=1e6)
    expected = step(Stack().to("emu"), rows("emu"))
    model = Stack().to("emu")
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        for _ in range(4):
            assert_same(step(model, rows("emu")), expected)
    assert emu_device.take_reports() == []


@pytest.mark.emu("threads", "lazy", "random:2", "random:3")
def test_torchtune_1867_no_nan(emu_device: ModuleType) -> None:
    """Memory that was let go of is poisoned with NaN: a copy that came too late, or a reload, would bring it in."""
    model = Stack(12).to("emu")
    with headrace.offload_activations(model, min_bytes=0, device_memory=2 * SAVED_BYTES):
        for seed in range(5):
            assert not any(result.isnan().any() for result in step(model, rows("emu", seed)))


class Labelled(Tensor):
    """A subclass that means something by what it is, as DTensor does."""

    @staticmethod
    def of(tensor: Tensor) -> "Labelled":
        return tensor.as_subclass(Labelled)


def test_torchtune_2683_subclasses_are_left_alone(compute_device: torch.device) -> None:
    class Wraps(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = Labelled.of(super().forward(x)).sin()
            assert type(y) is Labelled
            return y.as_subclass(Tensor)

    expected = step(Stack(4, Wraps).to(compute_device), rows(compute_device))
    model = Stack(4, Wraps).to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for _ in range(3):
            assert_same(step(model, rows(compute_device)), expected)
        assert handle.stats().skipped > 0
        assert handle.stats().offloads > 0


def test_trl_4280_a_graph_outlives_the_next_forward(compute_device: torch.device) -> None:
    """There a second forward wiped what was known of the first one's tensors."""
    expected = step(Stack().to(compute_device), rows(compute_device))
    model = Stack().to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        losses = [model(rows(compute_device)).square().sum() for _ in range(4)]
        for loss in losses[::-1]:
            model.zero_grad()
            loss.backward()
            assert_same([p.grad.cpu() for p in model.parameters()], expected[1:])


def test_transformer_engine_1582_memory_is_freed(emu_device: ModuleType) -> None:
    device = torch.device("emu", 1)
    model, x = Stack(16).to(device), rows(device)
    model(x).sum().backward()
    before = allocated_bytes(device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=2 * SAVED_BYTES):
        for _ in range(3):
            step(model, x)
        loss = model(x).sum()
        assert allocated_bytes(device) - before < 5 * SAVED_BYTES  # of 17 that autograd has
        loss.backward()
        del loss
        assert allocated_bytes(device) - before == 0


def test_weights_are_not_copied_as_activations(compute_device: torch.device) -> None:
    class Uses(nn.Module):
        """Autograd saves the weight itself, views of it, and a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 128)
            self.norm = nn.LayerNorm(128)
            self.register_buffer("scale", torch.ones(128, 128))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.linear(x)) @ self.scale
            return torch.tanh(y * self.linear.weight[:64] + y * self.linear.weight.view(2, 64, 128)[1])

    model = Stack(3, Uses).to(compute_device)
    with headrace.offload_activations(model, min_bytes=4096, device_memory=0) as handle:
        for _ in range(2):
            step(model, rows(compute_device))
        plan = handle.plan
    assert plan is not None
    assert {saved.nbytes for saved in plan.problem.saved} == {SAVED_BYTES}
    assert len(plan.problem.saved) == 3 * 3 + 1  # the outputs of linear, norm's product and tanh, and the input


@pytest.mark.emu("lazy")
@pytest.mark.parametrize("budget_tensors", [0, 4, None])
def test_the_host_waits_for_nothing(emu_device: ModuleType, budget_tensors: int | None) -> None:
    budget = None if budget_tensors is None else budget_tensors * SAVED_BYTES
    model = Stack().to("emu")
    with headrace.offload_activations(model, min_bytes=0, device_memory=budget):
        for _ in range(3):
            step(model, rows("emu"))
        x = rows("emu")
        gc.collect()  # host memory of tests before this one: to unregister it waits for the device
        torch.accelerator.synchronize()
        emu_device.reset_stats()
        for _ in range(3):
            model(x).square().sum().backward()
        assert emu_device.stats()["host_syncs"] == 0


# order ----------------------------------------------------------------------------------------------------------------
def train(steps: int = 4) -> None:
    model = Stack().to("emu")
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        for seed in range(steps):
            step(model, rows("emu", seed))


def found(emu: ModuleType) -> str:
    reports = emu.take_reports()
    assert reports, "the edge is gone and nobody noticed"
    return "\n".join(reports)


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("lane", ["offload", "onload"])
def test_copies_wait_for_what_compute_was_given(emu_device: ModuleType, monkeypatch, lane: str) -> None:
    from headrace.runtime import lanes

    copy = lanes.StreamLanes.copy

    def altered(self, copied_on, copies, after):
        return copy(self, copied_on, copies, torch.Event("emu") if copied_on.value == lane else after)

    monkeypatch.setattr(lanes.StreamLanes, "copy", altered)
    train()
    assert f"copy {'D2H' if lane == 'offload' else 'H2D'}" in found(emu_device)


@pytest.mark.emu("random:0")
def test_device_memory_goes_when_its_copy_is_done(emu_device: ModuleType, monkeypatch) -> None:
    let_go = Stash.let_go

    def altered(self, item):
        self._wait, kept = (lambda *_: None), self._wait
        try:
            let_go(self, item)
        finally:
            self._wait = kept

    monkeypatch.setattr(Stash, "let_go", altered)
    train()
    reports = found(emu_device)
    assert "free" in reports
    assert "copy D2H" in reports


@pytest.mark.emu("random:0")
def test_compute_waits_for_the_arrival(emu_device: ModuleType, monkeypatch) -> None:
    def altered(self, item):
        item.arriving = None

    monkeypatch.setattr(Stash, "arrive", altered)
    train()
    reports = found(emu_device)
    assert "read-after-write" in reports
    assert "copy H2D" in reports


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("takes_edge_away", [False, True])
def test_host_memory_is_given_away_behind_its_copies(
    emu_device: ModuleType, monkeypatch, takes_edge_away: bool
) -> None:
    """A backward of a part sends for what nobody waits for; then the next forward takes that host memory."""
    kept: list[Tensor] = []
    put_back = Stash.put_back

    def altered(self, item):
        if item.arriving is not None and item.memory is not None:
            kept.append(item.memory)  # so that the device memory's own edge stays
            item.arriving = None
        put_back(self, item)

    model = Stack().to("emu")
    with headrace.offload_activations(model, min_bytes=0, device_memory=3 * SAVED_BYTES):
        for _ in range(3):
            step(model, rows("emu"))
        if takes_edge_away:
            monkeypatch.setattr(Stash, "put_back", altered)
        torch.autograd.grad(model(rows("emu")).square().sum(), list(model.layers[5].parameters()))
        step(model, rows("emu"))
    if takes_edge_away:
        assert kept
        reports = found(emu_device)
        assert "write-after-read: copy D2H" in reports
        assert "copy H2D" in reports
