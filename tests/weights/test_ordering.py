"""Is every edge between lanes needed? Each is taken out in turn, and the detector must name what it then finds.

The edges are those of docs/design/ordering.md, by number. The package has no switch for this: a test replaces the one
method that makes the edge. Host accesses, which no device sees, are announced to the detector by the tests.
"""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.optim import AdamW
from headrace.runtime import lanes as lanes_module
from headrace.runtime.lanes import Lane, Lanes
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.gradients import Gradients
from headrace.weights.movement.residency import Residency
from tests.support.compare import assert_same, assert_same_gradients, on_cpu
from tests.support.held import weight_bytes
from tests.support.instances import instances
from tests.support.loops import loss_of
from tests.support.models import linears

pytestmark = pytest.mark.emu("random:0", "random:1")


def offloaded(model: nn.Module, **settings: Any) -> headrace.Offloaded:
    """A budget of about half of the model: every block comes and goes."""
    return headrace.offload(model, device="emu", device_memory=weight_bytes(model) // 2, **settings)


def train(emu: ModuleType, model: nn.Module, tokens: torch.Tensor, micro_batches: int = 1, steps: int = 4) -> None:
    """Training steps in which the host reads gradients and writes homes, announced to the detector."""
    with offloaded(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            for _ in range(micro_batches):
                loss_of(model, tokens).backward()
            for parameter in model.parameters():
                emu.host_access(parameter.grad, write=False, what="host reads a gradient")
                emu.host_access(parameter, write=True, what="host writes a home")
            optimizer.step()
            optimizer.zero_grad()


def infer(emu: ModuleType, model: nn.Module, tokens: torch.Tensor, through_data: bool, **settings: Any) -> None:
    """Passes without gradients, between which the host writes homes without waiting for anything itself."""
    with offloaded(model, **settings), torch.no_grad():
        for _ in range(4):
            model(tokens)
            for parameter in model.parameters():
                written = parameter.data if through_data else parameter
                emu.host_access(written, write=True, what="host writes a home")
                written.mul_(0.5)


def without_waiting_on(lane: Lane) -> Callable[..., Any]:
    """`copy` of the lanes, but this lane does not wait for the event it is given."""
    copy = lanes_module.StreamLanes.copy

    def altered(self: Lanes, copied_on: Lane, copies: Any, after: Any) -> Any:
        return copy(self, copied_on, copies, torch.Event("emu") if copied_on is lane else after)

    return altered


_evict = Residency.evict


def evict_without_arrival(self: Residency, block: Block) -> None:
    """`Residency.evict`, but a buffer that is still arriving goes back to the allocator at once."""
    arrive, self.arrive = self.arrive, lambda block: None
    try:
        if block.buffer is not None:
            block.presence = Presence.PRESENT
        _evict(self, block)
    finally:
        self.arrive = arrive


def found(emu: ModuleType) -> str:
    reports = emu.take_reports()
    assert reports, "the edge is gone and nobody noticed"
    return "\n".join(reports)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_training_as_it_is_has_no_race(emu_device, decoder, tokens, micro_batches):
    train(emu_device, decoder, tokens, micro_batches)
    assert emu_device.take_reports() == []


@pytest.mark.parametrize(("through_data", "settings"), [(True, {}), (False, {"prefetch": 0})])
def test_inference_as_it_is_has_no_race(emu_device, decoder, tokens, through_data, settings):
    infer(emu_device, decoder, tokens, through_data, **settings)
    assert emu_device.take_reports() == []


@pytest.mark.emu("random:0", "threads")
def test_training_from_disk_on_a_users_stream_has_no_race(emu_device: ModuleType, tmp_path: Path) -> None:
    """Threads that read and copy enter lanes beside the main thread, whose current stream stays the user's."""
    model = linears(24, 128)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 128)
    users = torch.Stream(device="emu:1")
    with (
        users,
        offloaded(
            model, disk=tmp_path, host_memory=weight_bytes(model) * 3 // 2, activations={"min_bytes": 0}
        ) as handle,
    ):
        there = x.to("emu:1")
        for _ in range(10):
            model.zero_grad()
            model(there).sum().backward()
            assert torch.accelerator.current_stream() == users
        assert handle.stats().fetch_bytes > 0
    plain(x).sum().backward()
    assert_same_gradients(model, plain)


def test_threads_of_headrace_choose_the_device(emu_device: ModuleType, tmp_path: Path) -> None:
    """Otherwise each would make a context on the first device where the model is on another one."""
    model = linears(24, 128)
    settings = {"host_memory": weight_bytes(model) * 3 // 2, "activations": {"min_bytes": 0, "tier": "disk"}}
    with offloaded(model, disk=tmp_path, **settings) as handle:
        handle.limit_copies(10 * 2**30)
        for _ in range(3):
            model(torch.randn(8, 128, device="emu:1")).sum().backward()
        names = {thread.name.split("_")[0] for thread in threading.enumerate()}
        assert names >= {"headrace-fetch", "headrace-send", "headrace-activations", "headrace-pace", "headrace-host"}
        assert set(emu_device.contexts()) == {1}


def test_a_state_dict_of_device_tensors_is_loaded_when_no_copy_reads_the_homes(emu_device, decoder, tokens):
    state = {name: value.to("emu") for name, value in decoder.state_dict().items()}
    with offloaded(decoder), torch.no_grad():
        for _ in range(4):
            decoder(tokens)
        decoder.load_state_dict(state)  # while loads for the next pass are in flight
    assert emu_device.take_reports() == []


def test_edge_1_onload_waits_for_the_allocation(emu_device, decoder, tokens, monkeypatch):
    monkeypatch.setattr(lanes_module.StreamLanes, "copy", without_waiting_on(Lane.ONLOAD))
    train(emu_device, decoder, tokens)
    assert "copy H2D" in found(emu_device)


def test_edge_2_compute_waits_for_the_arrival(emu_device, decoder, tokens, monkeypatch):
    def arrive(self: Residency, block: Block) -> None:
        if block.arrival is not None and block.presence is not Presence.PRESENT:
            block.becomes(Presence.PRESENT)

    monkeypatch.setattr(Residency, "arrive", arrive)
    train(emu_device, decoder, tokens)
    reports = found(emu_device)
    assert "read-after-write" in reports
    assert "copy H2D" in reports


def test_edge_3_a_buffer_that_is_arriving_is_not_let_go(emu_device, decoder, tokens, monkeypatch):
    monkeypatch.setattr(Residency, "evict", evict_without_arrival)
    residencies = instances(monkeypatch, Residency)
    with offloaded(decoder) as handle, torch.no_grad():
        for _ in range(3):
            decoder(tokens)
        residency, block = residencies[0], handle.settled_blocks("a look")[0]
        for other in list(residency.with_buffers()):
            residency.evict(other)
        residency.onload(block)  # sent for, and let go before anybody waited
        residency.evict(block)
        residency._buffers.close()  # the allocator gets its memory back
    reports = found(emu_device)
    assert "free" in reports
    assert "copy H2D" in reports


def test_edge_4_offload_waits_for_the_gradient(emu_device, decoder, tokens, monkeypatch):
    monkeypatch.setattr(lanes_module.StreamLanes, "copy", without_waiting_on(Lane.OFFLOAD))
    train(emu_device, decoder, tokens)
    reports = found(emu_device)
    assert "read-after-write" in reports
    assert "copy D2H" in reports


def test_edge_5_a_gradient_stays_until_its_copy_is_done(emu_device, decoder, tokens, monkeypatch):
    monkeypatch.setattr(Gradients, "_release_oldest", lambda self: self._leaving.popleft() and None)
    train(emu_device, decoder, tokens)
    reports = found(emu_device)
    assert "free" in reports
    assert "copy D2H" in reports


def test_edge_6_backward_returns_when_gradients_are_home(emu_device, decoder, tokens, monkeypatch):
    def deliver(self: Gradients, _in_hooks: Callable[[], None]) -> None:
        self._submit_ready()
        arrived = self._targets
        self._forget()
        for param, gradient in arrived.items():
            param.home.grad = gradient

    monkeypatch.setattr(Gradients, "deliver", deliver)
    train(emu_device, decoder, tokens)
    reports = found(emu_device)
    assert "host reads a gradient" in reports
    assert "copy D2H" in reports


@pytest.mark.parametrize("waits", [True, False])
def test_edge_7_additions_wait_for_the_staged_copy(emu_device, decoder, tokens, monkeypatch, waits):
    """The host lane's reads are announced when it is given them; with the wait before that, they are in order."""

    def run(self: Lanes, job: Callable[[], None], after: Any) -> Any:
        if waits:
            after.synchronize()
        for piece in staged:
            emu_device.host_access(piece, write=False, what="host adds a staged gradient")
        return self._host.submit(job)

    staged: list[torch.Tensor] = []
    send = Gradients._send

    def remember(self: Gradients, direct: Any, pieces: Any, what: str) -> None:
        staged[:] = [one.piece for one in pieces]
        send(self, direct, pieces, what)

    monkeypatch.setattr(Gradients, "_send", remember)
    monkeypatch.setattr(Lanes, "run", run)
    train(emu_device, decoder, tokens, micro_batches=2)
    if waits:
        assert emu_device.take_reports() == []
        return
    reports = found(emu_device)
    assert "host adds a staged gradient" in reports
    assert "copy D2H" in reports


def test_edge_8_homes_are_handed_out_when_no_copy_reads_them(emu_device, decoder, tokens, monkeypatch):
    monkeypatch.setattr(Block, "wait_until_free", lambda self: None)
    infer(emu_device, decoder, tokens, through_data=True)
    reports = found(emu_device)
    assert "host writes a home" in reports
    assert "copy H2D" in reports


def test_edge_9_a_pass_ends_when_what_it_used_was_read(emu_device, decoder, tokens, monkeypatch):
    monkeypatch.setattr(Residency, "wait_for_consumed_reads", lambda self: None)
    infer(emu_device, decoder, tokens, through_data=False, prefetch=0)
    reports = found(emu_device)
    assert "host writes a home" in reports
    assert "copy H2D" in reports


@pytest.mark.emu("lazy")
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("blocks_that_fit", [2, 4])
def test_edge_9_counts_loads_that_were_consumed_in_another_order(emu_device, gradients, blocks_that_fit):
    """The load that is consumed last was submitted before the pass; others, submitted in it, are behind it."""
    torch.manual_seed(0)
    model, hidden = linears(5, 16), torch.randn(4, 16)
    plain, parameters = copy.deepcopy(model), list(model.parameters())
    outputs, expected = [], []
    fits_bytes = blocks_that_fit * weight_bytes(model[0])
    with headrace.offload(model, device="emu", device_memory=fits_bytes, blocks=list(model)) as handle:
        with torch.set_grad_enabled(gradients):
            for passes in range(9):
                if passes > 5:
                    with torch.no_grad():
                        for parameter in (*parameters, *plain.parameters()):
                            parameter.mul_(1.5)
                outputs.append(model(hidden).detach())
                expected.append(plain(hidden).detach())
        assert handle.stats().onload_bytes > weight_bytes(model)
        assert_same(on_cpu(outputs), expected)


@pytest.mark.emu("lazy")
def test_edge_9_holds_at_the_end_of_a_backward_without_gradients_of_parameters(emu_device):
    torch.manual_seed(0)
    model, hidden = linears(5, 16).requires_grad_(False), torch.randn(4, 16)
    plain, parameters = copy.deepcopy(model), list(model.parameters())
    gradients, expected = [], []
    with headrace.offload(model, device="emu", device_memory=2 * weight_bytes(model[0]), blocks=list(model)):
        for _ in range(6):
            for run, found in ((model, gradients), (plain, expected)):
                given = hidden.to("emu" if run is model else "cpu", copy=True).requires_grad_()
                run(given).square().sum().backward()
                found.append(given.grad)
            for parameter in (*parameters, *plain.parameters()):
                parameter.mul_(1.1)
        assert_same(on_cpu(gradients), expected)


@pytest.mark.parametrize("waits", [True, False])
def test_edge_10_a_load_waits_for_the_update_of_its_homes(emu_device, decoder, tokens, monkeypatch, waits):
    """The native kernel writes them on the optimizer's thread; `tests/support/kernel_accesses.py` announces it."""
    if not waits:
        monkeypatch.setattr(Block, "wait_for_updates", lambda self: self.updates.clear())
        monkeypatch.setattr(Block, "being_updated", False)
    with offloaded(decoder):
        optimizer = AdamW(decoder.parameters(), lr=0.1, overlap="forward")
        for _ in range(4):
            loss_of(decoder, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        loss_of(decoder, tokens)
        optimizer.synchronize()
    if waits:
        assert emu_device.take_reports() == []
        return
    reports = found(emu_device)
    assert "the optimizer's kernel on the host (thread" in reports
    assert "copy H2D" in reports
