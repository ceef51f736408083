"""Does memory go when its owner does?"""

import gc
import time
import weakref
from typing import Any, ClassVar

import pytest
import torch

import millrace
from millrace.memory import arena
from millrace.memory.ledger import Tier
from tests.engine.models import Decoder, loss_of, weight_bytes


def is_gone(reference: weakref.ref[Any]) -> bool:
    """Autograd's device thread lets go of a graph in its own time."""
    for _ in range(100):
        gc.collect()
        if reference() is None:
            return True
        time.sleep(0.01)
    return False


def test_remove_gives_everything_back_but_the_weights(compute_device, tokens):
    model = Decoder()
    handle = millrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2)
    for _ in range(3):
        loss_of(model, tokens).backward()
    model.zero_grad()
    ledger, engine = handle._ledger, weakref.ref(handle._engine)
    handle.remove()
    del handle
    assert is_gone(engine)
    assert ledger.held_bytes(Tier.DEVICE) == 0
    assert ledger.held_bytes(Tier.HOST, "gradients") == 0
    assert ledger.held_bytes(Tier.HOST, "weights") >= weight_bytes(model)  # the homes' own memory
    del model
    gc.collect()
    assert ledger.held_bytes(Tier.HOST) == 0


@pytest.mark.emu("random:0")
def test_registered_memory_is_given_back(emu_device, tokens):
    before = emu_device.stats()["registered_bytes"]
    model = Decoder()
    with millrace.offload(model, device="emu", device_memory=weight_bytes(model) // 2):
        loss_of(model, tokens).backward()
        assert emu_device.stats()["registered_bytes"] >= before + 2 * weight_bytes(model)
    parameter = weakref.ref(model.head.weight)
    del model
    assert is_gone(parameter)
    torch.accelerator.synchronize()
    assert emu_device.stats()["registered_bytes"] == before


def test_the_class_of_a_model_goes_with_its_last_module(compute_device):
    class Local(torch.nn.Linear):
        made: ClassVar[list[torch.nn.Module]] = []  # as a script's globals do, a class may refer to its objects

    model = Local(4, 4)
    Local.made.append(model)
    millrace.offload(model, device=compute_device, device_memory="1MiB")
    model(torch.ones(2, 4))
    own = weakref.ref(Local)
    del model, Local
    assert is_gone(own)


def test_a_model_that_is_dropped_takes_its_handle_along(compute_device, tokens):
    model = Decoder()
    handle = weakref.ref(millrace.offload(model, device=compute_device, device_memory=weight_bytes(model) // 2))
    loss_of(model, tokens).backward()
    assert handle() is not None  # the model keeps it alive
    del model
    assert is_gone(handle)


@pytest.mark.emu("random:0")
def test_a_device_that_registers_nothing_gets_pinned_memory_all_the_same(emu_device, tokens, monkeypatch):
    """As XPU and NPU do: the memory comes from PyTorch's own pinned allocator."""
    monkeypatch.setattr(arena, "can_register_host_memory", lambda device: False)
    model = Decoder()
    before = emu_device.stats()["pinned_bytes"]
    with millrace.offload(model, device="emu", device_memory=weight_bytes(model) // 2) as handle:
        for _ in range(3):
            loss_of(model, tokens).backward()
        assert all(parameter.is_pinned() and parameter.grad.is_pinned() for parameter in model.parameters())
        assert emu_device.stats()["pinned_bytes"] >= before + 2 * weight_bytes(model)
        assert handle.stats().onload_bytes > 0
        ledger = handle._ledger
    del model, handle
    gc.collect()
    assert ledger.by_purpose() == {}
