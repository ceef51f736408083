"""Does memory go when its owner does?"""

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import headrace
from headrace import live
from headrace.memory import locking
from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.autograd import EndOfBackward
from headrace.runtime.lanes import Lanes
from headrace.weights.passes import backward as backward_module
from headrace.weights.passes.backward import Backward
from headrace.weights.passes.engine import Engine
from tests.support.compare import assert_same, assert_same_gradients
from tests.support.held import comes_true, is_gone, weight_bytes
from tests.support.instances import instances
from tests.support.interrupts import PACKAGE, interrupted_at
from tests.support.loops import loss_of
from tests.support.models import Decoder, seeded


def test_remove_gives_everything_back_but_the_weights(compute_device, tokens, monkeypatch: pytest.MonkeyPatch):
    ledgers, engines = instances(monkeypatch, Ledger), instances(monkeypatch, Engine)
    model = Decoder()
    handle = headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2)
    for _ in range(3):
        loss_of(model, tokens).backward()
    model.zero_grad()
    (ledger,), (engine,) = ledgers, [weakref.ref(engines.pop())]
    handle.remove()
    del handle
    assert is_gone(engine)
    assert ledger.held_bytes(Tier.DEVICE) == 0
    assert ledger.held_bytes(Tier.HOST, "gradients") == 0
    assert ledger.held_bytes(Tier.HOST, "weights") >= weight_bytes(model)  # the homes' own memory
    del model
    gc.collect()
    assert ledger.held_bytes(Tier.HOST) == 0


@pytest.mark.parametrize("trains", [False, True])
def test_after_remove_weights_go_with_the_model_and_wait_for_no_collection(
    compute_device, tokens, trains: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also where somebody keeps the handle."""
    ledgers, model = instances(monkeypatch, Ledger), Decoder()
    handle = headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2)
    for _ in range(3):
        with torch.set_grad_enabled(trains):
            loss = loss_of(model, tokens)
        if trains:
            loss.backward()
    del loss
    gc.collect()
    gc.disable()
    try:
        model.zero_grad()
        handle.remove()
        weights = [weakref.ref(parameter) for parameter in model.parameters()]
        del model
        for _ in range(100):
            if ledgers[0].held_bytes(Tier.HOST, "weights") == 0:
                break
            time.sleep(0.01)
        assert ledgers[0].held_bytes(Tier.HOST, "weights") == 0
        assert all(weight() is None for weight in weights)
        assert handle.stats().device_peak_bytes > 0
    finally:
        gc.enable()


def test_after_remove_what_was_kept_of_a_pass_is_refused(tokens) -> None:
    """Somebody keeps the handle, too."""
    model, kept = Decoder(), []
    handle = headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2)
    with model.layers[0].up.register_forward_hook(lambda module, *_: kept.append(module.weight)):
        loss = loss_of(model, tokens)
    handle.remove()
    with pytest.raises(headrace.StateError, match="no longer offloaded"):
        kept[0] + 1
    with pytest.raises(headrace.StateError, match="let go"):
        loss.backward()
    handle.refresh()
    handle.synchronize()


@pytest.mark.parametrize("first", [1, 1500, 2500])
def test_remove_that_ctrl_c_broke_off_can_be_called_again(compute_device, tokens, first: int) -> None:
    plain = seeded(Decoder).to(compute_device)
    expected = loss_of(plain, tokens.to(compute_device))
    for moment in itertools.count(first, 171):
        model = seeded(Decoder)
        handle = headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2)
        loss_of(model, tokens.to(compute_device)).backward()
        broken_off = interrupted_at(moment, handle.remove, PACKAGE)
        handle.remove()
        assert is_plain(model)
        assert torch.equal(loss_of(model.to(compute_device), tokens.to(compute_device)), expected)
        if not broken_off or moment > first + 1000:
            break
    assert moment > 1000


def is_plain(model: torch.nn.Module) -> bool:
    left = any("_compiled_call_impl" in vars(module) for module in model.modules())
    return not left and all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_remove_lets_go_of_the_model_whatever_fails(tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spill that failed is told, once all is done."""
    model = Decoder()
    handle = headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2, activations=True)
    loss_of(model, tokens).backward()
    own = handle.activations.remove

    def failing() -> None:
        own()
        raise headrace.DiskError(5, "the drive is gone")

    monkeypatch.setattr(handle.activations, "remove", failing)
    with pytest.raises(headrace.DiskError, match="the drive is gone"):
        handle.remove()
    assert is_plain(model)
    handle.reset_stats()
    assert handle.stats().device_peak_bytes == 0
    handle.remove()
    headrace.offload(model, device="cpu").remove()


def test_the_end_of_the_process_amid_a_pass(tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a daemon thread computes: every model is let go of."""
    models = Decoder(), Decoder()
    handles = [headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2) for model in models]
    monkeypatch.setattr(live, "handles", weakref.WeakSet(handles))

    def end(*_: Any) -> None:
        live._let_all_go()
        raise RuntimeError("the end")

    for model in models:
        model.layers[1].register_forward_pre_hook(end)
    with pytest.raises((RuntimeError, IndexError)):  # of the pass, which nobody waits for
        models[0](tokens)
    assert all(map(is_plain, models))
    assert not live.handles


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda gradient: gradient,
    "view": lambda gradient: gradient[1:],
    "numpy": lambda gradient: gradient.numpy(),
    "dlpack": torch.from_dlpack,
    "storage": lambda gradient: gradient.untyped_storage(),
    "part of a storage": lambda gradient: gradient.untyped_storage()[:64],
    "graph": lambda gradient: (torch.ones_like(gradient, requires_grad=True) * gradient).grad_fn,
}


def contents(kept: Any) -> bytes:
    if isinstance(kept, torch.UntypedStorage):
        return bytes(kept.tolist())
    if isinstance(kept, torch.autograd.graph.Node):
        kept = kept._saved_other  # type: ignore[attr-defined]
    return (kept.numpy() if isinstance(kept, torch.Tensor) else kept).tobytes()


@pytest.mark.parametrize("way", list(KEPT))
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_gradient_that_is_kept_is_not_written_over(way, tier, tokens, tmp_path):
    """And its memory is used again when it is kept no longer."""
    model = Decoder()
    room = {"disk": tmp_path, "host_memory": 48 * 1024} if tier == "disk" else {}
    with headrace.offload(model, device="cpu", **room) as handle:
        parameters = list(model.parameters())
        loss_of(model, tokens).backward()
        kept = [KEPT[way](parameter.grad) for parameter in parameters]
        addresses = {parameter.grad.data_ptr() for parameter in parameters}
        before = [contents(one) for one in kept]
        for step in range(2):
            model.zero_grad()
            loss_of(model, (tokens + step) % 32).mul(3).backward()
            assert addresses.isdisjoint({parameter.grad.data_ptr() for parameter in parameters})
        assert [contents(one) for one in kept] == before
        assert tier == "host" or handle.stats().disk_bytes > 0
        kept.clear()
        sizes = handle.stats().host_bytes, handle.stats().disk_bytes
        for _ in range(2):
            model.zero_grad()
            loss_of(model, tokens).backward()
        assert (handle.stats().host_bytes, handle.stats().disk_bytes) == sizes


@pytest.mark.emu("random:0")
def test_registered_memory_is_given_back(emu_device, tokens):
    before = emu_device.stats()["registered_bytes"]
    model = Decoder()
    with headrace.offload(model, device="emu", device_memory=weight_bytes(model) // 2):
        loss_of(model, tokens).backward()
        assert emu_device.stats()["registered_bytes"] >= before + 2 * weight_bytes(model)
    del model

    def is_given_back() -> bool:
        torch.accelerator.synchronize()
        return emu_device.stats()["registered_bytes"] == before

    assert comes_true(is_given_back)


def test_the_class_of_a_model_goes_with_its_last_module(compute_device):
    class Local(torch.nn.Linear):
        made: ClassVar[list[torch.nn.Module]] = []  # as a script's globals do, a class may refer to its objects

    model = Local(4, 4)
    Local.made.append(model)
    headrace.offload(model, device=compute_device, device_memory="1MiB")
    model(torch.ones(2, 4))
    own = weakref.ref(Local)
    del model, Local
    assert is_gone(own)


def test_a_model_that_is_dropped_takes_its_handle_along(compute_device, tokens):
    model = Decoder()
    handle = weakref.ref(headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2))
    loss_of(model, tokens).backward()
    assert handle() is not None  # the model keeps it alive
    del model
    assert is_gone(handle)


@pytest.mark.emu("random:0")
def test_a_device_that_registers_nothing_gets_pinned_memory_all_the_same(emu_device, tokens, monkeypatch):
    """As XPU and NPU do: the memory comes from PyTorch's own pinned allocator."""
    monkeypatch.setattr(locking, "can_register_host_memory", lambda device: False)
    ledgers = instances(monkeypatch, Ledger)
    model = Decoder()
    before = emu_device.stats()["pinned_bytes"]
    with headrace.offload(model, device="emu", device_memory=weight_bytes(model) // 2) as handle:
        for _ in range(3):
            loss_of(model, tokens).backward()
        assert all(parameter.is_pinned() and parameter.grad.is_pinned() for parameter in model.parameters())
        assert emu_device.stats()["pinned_bytes"] >= before + 2 * weight_bytes(model)
        assert handle.stats().onload_bytes > 0
    del model, handle
    assert comes_true(lambda: [ledger.by_purpose() for ledger in ledgers] == [{}])


def test_a_backward_that_is_let_go_of_on_a_thread_of_ours_waits_for_nobody(compute_device, tokens, monkeypatch):
    """The garbage collector runs on any thread, also on that of the lane whose copies a broken backward waits for."""
    plain, model = Decoder().to(compute_device), Decoder()
    model.load_state_dict(plain.state_dict())
    loss_of(plain, tokens.to(compute_device)).backward()
    all_lanes, backwards = instances(monkeypatch, Lanes), instances(monkeypatch, Backward)
    ends: list[Any] = []
    monkeypatch.setattr(backward_module, "EndOfBackward", lambda ended: (ends.append(ended), EndOfBackward(ended))[1])
    with headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2):
        (lanes,), (backward,) = all_lanes, backwards
        told: list[bool] = []

        def let_go(_: torch.Tensor) -> None:
            lanes.run(lambda: ends[-1](completed=False), lanes.mark()).result()
            told.append(backward.task is not None)

        model.layers[0].register_forward_hook(lambda _module, _inputs, output: output.register_hook(let_go) and None)
        loss_of(model, tokens).backward()
        assert told == [True]
        assert_same_gradients(model, plain)


def test_memory_beside_gradients_that_are_kept_is_made_before_backward(
    tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page-locking it would stall that."""
    model, kept = Decoder(), list[Any]()
    with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2):
        for step in range(3):
            loss = loss_of(model, tokens)
            arenas = instances(monkeypatch, Arena)
            loss.backward()
            assert arenas == [], f"step {step}"
            monkeypatch.undo()
            kept += [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
    assert_same(kept[: len(kept) // 3], kept[-len(kept) // 3 :])


class Settling:
    """In the place of the lock of a backward's end: tells when the main thread is about to wait for it."""

    def __init__(self) -> None:
        self.lock, self.is_awaited = threading.RLock(), threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.is_awaited.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_remove_waits_for_autograds_thread_to_end_a_backward_that_raised(
    tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder()
    handle = headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2)
    backward, held, settling, has_begun = handle._engine.backward, list[Any](), Settling(), threading.Event()

    def stop(_: torch.Tensor) -> None:
        held.append(backward._end())  # autograd lets go of it, but it ends the backward only once we do
        raise RuntimeError("stop")

    hook = model.layers[0].register_forward_hook(lambda _module, _args, output: output.register_hook(stop) and None)
    with pytest.raises(RuntimeError, match="stop"):
        loss_of(model, tokens).backward()
    hook.remove()
    drop = backward.drop_gradients

    def waits() -> None:
        has_begun.set()
        assert settling.is_awaited.wait(60)
        drop()

    monkeypatch.setattr(backward, "settling", settling)
    monkeypatch.setattr(backward, "drop_gradients", waits)
    ends = threading.Thread(target=held.clear)  # as autograd's thread does, when it lets go of the graph
    ends.start()
    assert has_begun.wait(60)
    handle.remove()
    ends.join()
    assert is_plain(model)
