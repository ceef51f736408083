"""Does a model that sleeps free its memory, on the device and on the host, and compute the same once it is awake?"""

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.memory.ledger import Tier
from headrace.weights.model.managed_param import ManagedParam
from tests.support.compare import on_cpu
from tests.support.held import allocated_bytes, is_counted, weight_bytes
from tests.support.loops import steps
from tests.support.models import Layer, Stack, seeded

WIDTH = 128
LAYER_BYTES = weight_bytes(Layer(WIDTH))
BATCH = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def stack(layers: int = 6, dtype: torch.dtype = torch.float32) -> Stack:
    return seeded(lambda: Stack(Layer(WIDTH) for _ in range(layers))).to(dtype)


def host_bytes(handle: headrace.Offloaded) -> int:
    """The bytes of weights in host memory, without the staging memory of fetches."""
    gc.collect()
    return handle._ledger.held_bytes(Tier.HOST, "weights")


def train(model: nn.Module, handle: Any = None, **settings: Any) -> list[torch.Tensor]:
    """The losses and the weights of 5 steps; the handle's model sleeps after each, and wakes up for every other."""

    def sleep(step: int) -> None:
        if handle is None:
            return
        handle.sleep(host=True)
        assert host_bytes(handle) == 0
        assert weight_bytes(model) <= handle.stats().disk_bytes < 1.2 * weight_bytes(model)  # each time the same files
        if step % 2:
            handle.wake()
            assert host_bytes(handle) >= weight_bytes(model)

    optimizer = headrace.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    batches = [BATCH.to(next(model.parameters()).dtype) + step for step in range(5)]
    return [*steps(model, optimizer, batches, after_step=sleep), *on_cpu(list(model.parameters()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", [{}, {"overlap": "forward"}, {"tier": "disk"}], ids=str)
def test_training(compute_device: torch.device, tmp_path: Path, dtype: torch.dtype, settings: dict[str, str]) -> None:
    expected = train(stack(dtype=dtype))
    model = stack(dtype=dtype)
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES, disk=tmp_path / "weights")
    own = settings | ({"disk": str(tmp_path / "state")} if settings.get("tier") else {})
    assert all(map(torch.equal, train(model, handle, **own), expected))
    handle.remove()


def test_between_forward_and_backward(compute_device: torch.device, tmp_path: Path) -> None:
    plain, model = stack(), stack()
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES, disk=tmp_path)
    for _ in range(4):
        losses = [one(BATCH).square().mean() for one in (plain, model)]
        handle.sleep(host=True)
        assert host_bytes(handle) == 0
        for loss in losses:
            loss.backward()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)


def test_writes_while_it_sleeps(compute_device: torch.device, tmp_path: Path) -> None:
    """Weights on disk are tensors that can be read and written. One whose memory is kept stays where it is."""
    plain, model = stack(), stack()
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES, disk=tmp_path)
    handle.sleep(host=True)
    kept = next(model.layers[1].parameters()).data
    for one in (plain, model):
        with torch.no_grad():
            next(one.layers[0].parameters()).mul_(2)
            next(one.layers[1].parameters()).data.add_(1)
    with torch.no_grad():
        assert torch.equal(model(BATCH).cpu(), plain(BATCH))
    assert 5 * LAYER_BYTES <= host_bytes(handle) < 5.5 * LAYER_BYTES  # whole pages
    assert torch.equal(kept, next(plain.layers[1].parameters()))
    kept.add_(1)
    next(plain.layers[1].parameters()).data.add_(1)
    handle.refresh()
    with torch.no_grad():
        assert torch.equal(model(BATCH).cpu(), plain(BATCH))


def test_waking_loads_what_the_next_pass_begins_with(compute_device: torch.device) -> None:
    model = stack()
    handle = headrace.offload(model, device=compute_device, device_memory=8 * LAYER_BYTES)
    with torch.no_grad():
        for _ in range(3):
            expected = model(BATCH).cpu()
    before = handle.stats()
    assert before.onload_bytes == 6 * LAYER_BYTES
    for wakes in (False, True):
        handle.sleep()
        if wakes:
            handle.wake()
            handle.synchronize()
            assert not is_counted(compute_device) or allocated_bytes(compute_device) >= 6 * LAYER_BYTES
        handle.reset_stats()
        with torch.no_grad():
            assert torch.equal(model(BATCH).cpu(), expected)
        assert handle.stats().onload_bytes == (0 if wakes else 6 * LAYER_BYTES)
    handle.wake()  # nothing to do
    handle.remove()
    with pytest.raises(headrace.StateError, match=r"wake\(\) came after remove"):
        handle.wake()


def test_another_model_has_the_host_meanwhile(compute_device: torch.device, tmp_path: Path) -> None:
    """Host memory for one of two: while the first sleeps, the second is made; the first computes from disk then."""
    first, second = stack(), stack()
    with headrace.budget(device_memory=4 * LAYER_BYTES, host_memory=10 * LAYER_BYTES) as shared:
        handle = headrace.offload(first.requires_grad_(False), device=compute_device, disk=tmp_path)
        handle.sleep(host=True)
        other = headrace.offload(second.requires_grad_(False), device=compute_device)
        with torch.no_grad():
            assert torch.equal(first(BATCH), second(BATCH))
        assert LAYER_BYTES <= host_bytes(handle) < 3 * LAYER_BYTES  # beside staging memory
        assert shared.host_peak_bytes <= 10 * LAYER_BYTES
        handle.sleep(host=True)
        other.remove()
        handle.wake()
        assert host_bytes(handle) >= weight_bytes(first)


def test_what_waking_reads_is_counted(compute_device: torch.device, tmp_path: Path) -> None:
    model = stack()
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES, disk=tmp_path)
    handle.sleep(host=True)
    handle.wake()
    stats = handle.stats()
    assert stats.fetch_bytes == weight_bytes(model)
    assert weight_bytes(model) <= stats.spill_bytes < 1.1 * weight_bytes(model)


def test_what_is_refused(compute_device: torch.device, tmp_path: Path) -> None:
    model = stack()
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES)
    with pytest.raises(ValueError, match=r"sleep\(host=True\) moves weights .* offload\(\) the model with disk="):
        handle.sleep(host=True)
    with pytest.raises(TypeError, match="host=1 "):
        handle.sleep(host=1)  # type: ignore[arg-type]
    hook = model.layers[2].register_forward_hook(lambda *_: handle.wake())
    with pytest.raises(headrace.StateError, match=r"wake\(\) was called within a forward"):
        model(BATCH)
    hook.remove()


def test_a_weight_that_was_given_other_memory_after_it_woke_up(compute_device: torch.device, tmp_path: Path) -> None:
    """The rest of its block goes to the files it had before, whose bytes are old."""
    plain, model = stack(), stack()
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES, disk=tmp_path)
    handle.sleep(host=True)
    handle.wake()
    for one in (plain, model):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(2)
        first = next(one.layers[1].parameters())
        first.data = torch.ones_like(first)
    handle.sleep(host=True)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_weights_that_travel_in_another_dtype(compute_device: torch.device, tmp_path: Path) -> None:
    """A step makes the casts old before the weights move."""
    plain, model = stack(), stack()
    settings = {"device": compute_device, "device_memory": 4 * LAYER_BYTES, "param_dtype": torch.bfloat16}
    headrace.offload(plain, **settings)
    handle = headrace.offload(model, disk=tmp_path, **settings)
    for step in range(3):
        losses = []
        for one in (plain, model):
            losses.append(one(BATCH.bfloat16()).float().square().mean())
            losses[-1].backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(parameter.grad)
                    parameter.grad = None
        assert torch.equal(*losses)
        handle.sleep(host=True)
        if step % 2:
            handle.wake()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_memory_that_was_kept_while_it_slept(compute_device: torch.device, tmp_path: Path) -> None:
    """The block comes back once nobody keeps its memory."""
    model = stack()
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES, disk=tmp_path)
    handle.sleep(host=True)
    kept = next(model.parameters()).data
    handle.wake()
    assert host_bytes(handle) < weight_bytes(model)
    del kept
    handle.wake()
    assert host_bytes(handle) >= weight_bytes(model)


def test_ctrl_c_amid_a_block(compute_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is as a whole where it was: later writes reach the next pass."""
    plain, model = stack(), stack()
    handle = headrace.offload(model, device=compute_device, device_memory=4 * LAYER_BYTES, disk=tmp_path)
    move = ManagedParam.move_to
    for asleep in (False, True):
        calls = []

        def interrupted(param: ManagedParam, rest: torch.Tensor, *, keeps: bool, calls: Any = calls) -> None:
            calls.append(param)
            if len(calls) == 3:
                raise KeyboardInterrupt
            move(param, rest, keeps=keeps)

        with monkeypatch.context() as patch:
            patch.setattr(ManagedParam, "move_to", interrupted)
            with pytest.raises(KeyboardInterrupt):
                (handle.wake if asleep else partial(handle.sleep, host=True))()
        with torch.no_grad():
            for one in (plain, model):
                for parameter in one.parameters():
                    parameter.mul_(1.5)
            assert torch.equal(model(BATCH).cpu(), plain(BATCH))
        handle.sleep(host=True)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
