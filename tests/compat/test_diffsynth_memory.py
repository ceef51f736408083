"""Do the pinned pool and the four offloaders of DiffSynth-Studio do here what its page says of them?"""

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from headrace.compat.diffsynth import (
    AlwaysOnGPUParamOffloader,
    BufferOffloader,
    PinnedArenaPool,
    PinnedBuffer,
    StaticParamOffloader,
    TrainableParamOffloader,
)

PAGE_BYTES = 4096


def frozen(*shape: int) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(*shape), requires_grad=False)


def mixed() -> nn.Module:
    """Frozen and trained parameters, and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 70), nn.BatchNorm1d(70), nn.Linear(70, 70))
    model[0].requires_grad_(False)
    return model


def test_a_buffer_is_carved_from_the_front(device: torch.device):
    buffer = PinnedBuffer(3 * PAGE_BYTES - 5, device)
    assert (buffer.capacity, buffer.used) == (3 * PAGE_BYTES, 0)
    first, second = buffer.allocate(17), buffer.allocate(5000)
    assert first is not None
    assert second is not None
    assert second.data_ptr() - first.data_ptr() == 64
    assert buffer.used == 64 + 5120
    assert buffer.allocate(2 * PAGE_BYTES) is None
    assert buffer.pinned == (device.type != "cpu")


# There, a model of any size took 1 GiB of host memory, and sizes were rounded up to powers of two
def test_a_pool_takes_what_frozen_parameters_and_buffers_need(device: torch.device):
    model = mixed()
    kept = [*model[0].parameters(), *model.buffers()]
    pool = PinnedArenaPool.from_model(model, device=device)
    wanted = sum(tensor.nbytes for tensor in kept)
    assert wanted <= pool.capacity <= wanted + 256 * len(kept) + PAGE_BYTES
    before = pool.capacity
    copies = [pool.allocate_like(tensor) for tensor in kept]
    assert pool.capacity == before
    for copied, tensor in zip(copies, kept, strict=True):
        assert torch.equal(copied, tensor)
        assert copied.is_pinned() == (device.type != "cpu")
    addresses = sorted((copied.data_ptr(), copied.nbytes) for copied in copies)
    for (begin, nbytes), (following, _) in pairwise(addresses):
        assert begin + nbytes <= following


def test_a_pool_grows_when_it_is_full(device: torch.device):
    pool = PinnedArenaPool(PAGE_BYTES, min_chunk_size=2 * PAGE_BYTES, device=device)
    copies = [pool.allocate_like(torch.full((1000,), float(index))) for index in range(3)]
    assert [chunk.capacity for chunk in pool.chunks] == [PAGE_BYTES, 2 * PAGE_BYTES]
    assert [copied[0].item() for copied in copies] == [0, 1, 2]
    pool.allocate_like(torch.zeros(5000))
    assert pool.capacity == 3 * PAGE_BYTES + 5 * PAGE_BYTES


def test_strides_are_kept(device: torch.device):
    pool = PinnedArenaPool(2**16, device=device)
    last = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    kept = pool.allocate_like(last)
    assert kept.stride() == last.stride()
    assert torch.equal(kept, last)


def test_frozen_parameters_visit_the_device_and_nothing_is_copied_back(device: torch.device):
    param = frozen(256, 64)
    values, linear = param.detach().clone(), nn.functional.linear
    offloader = StaticParamOffloader(param, device, PinnedArenaPool(2**17, device=device))
    x = torch.randn(3, 64)
    for _ in range(2):
        assert (param.numel(), param.device.type) == (0, device.type)
        offloader.onload()
        offloader.onload()
        assert param.device.type == device.type
        assert torch.equal(linear(x.to(device), param).cpu(), linear(x, values))
        offloader.offload()
    assert offloader.pool.capacity == 2**17
    offloader.remove()
    assert torch.equal(param, values)
    assert param.device.type == "cpu"


def test_frozen_parameters_leave_no_memory_on_the_device(emulator: ModuleType):
    param = frozen(256, 64)
    offloader = StaticParamOffloader(param, "emu")
    before = emulator.stats()["allocated_bytes"]
    offloader.onload()
    assert emulator.stats()["allocated_bytes"] >= before + param.nbytes
    moved_bytes = emulator.stats()["d2h_bytes"]
    offloader.offload()
    torch.accelerator.synchronize()
    assert emulator.stats()["allocated_bytes"] == before
    assert emulator.stats()["d2h_bytes"] == moved_bytes


def test_trained_parameters_and_their_gradients_come_back(device: torch.device):
    layers = [nn.Linear(64, 64) for _ in range(3)]
    plain = [nn.Linear(64, 64) for _ in range(3)]
    for layer, other in zip(layers, plain, strict=True):
        other.load_state_dict(layer.state_dict())
    pool = PinnedArenaPool(2**17, device=device)
    offloaders = [TrainableParamOffloader(p, device, pool) for layer in layers for p in layer.parameters()]
    x = torch.randn(8, 64)

    def step(network: list[nn.Linear], inputs: torch.Tensor, before: Any, after: Any) -> None:
        optimizer = torch.optim.AdamW([p for layer in network for p in layer.parameters()], lr=0.1)
        for _ in range(3):
            before()
            nn.Sequential(*network)(inputs).square().mean().backward()
            after()
            optimizer.step()
            optimizer.zero_grad()

    def onload() -> None:
        for offloader in offloaders:
            assert offloader.param.device.type == "cpu"
            offloader.onload()

    def offload() -> None:
        for offloader in offloaders:
            offloader.offload_grad()
            assert offloader.param.grad is not None
            assert {offloader.param.device.type, offloader.param.grad.device.type} == {"cpu"}

    step(layers, x.to(device), onload, offload)
    step(plain, x, lambda: None, lambda: None)
    for layer, other in zip(layers, plain, strict=True):
        assert torch.equal(layer.weight, other.weight)
        assert torch.equal(layer.bias, other.bias)


def test_what_is_always_on_the_device_stays_there(device: torch.device):
    param = nn.Parameter(torch.randn(4, 4))
    values = param.detach().clone()
    offloader = AlwaysOnGPUParamOffloader(param, device)
    for move in (offloader.onload, offloader.offload):
        move()
        assert param.device.type == device.type
    assert torch.equal(param.cpu(), values)


# There, what a module wrote to its buffers was lost
def test_buffers_come_back_with_what_was_written(device: torch.device):
    norm, plain = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    offloaders = [BufferOffloader(norm, name, device) for name in list(norm._buffers)]
    parameters = [AlwaysOnGPUParamOffloader(param, device) for param in norm.parameters()]
    x = torch.randn(16, 8)
    for _ in range(2):
        for offloader in offloaders:
            offloader.onload()
        assert norm.running_mean.device.type == device.type
        norm(x.to(device))
        plain(x)
        for offloader in offloaders:
            offloader.offload()
        assert norm.running_mean.device.type == "cpu"
    assert len(parameters) == 2
    assert torch.equal(norm.running_mean, plain.running_mean)
    assert norm.num_batches_tracked == 2


def test_each_offloader_says_what_it_does_not_take(device: torch.device):
    with pytest.raises(ValueError, match="StaticParamOffloader takes parameters with requires_grad=False"):
        StaticParamOffloader(nn.Parameter(torch.zeros(2)), device)
    with pytest.raises(ValueError, match="TrainableParamOffloader takes parameters with requires_grad=True"):
        TrainableParamOffloader(frozen(2), device)
    module = nn.Module()
    module.register_buffer("nothing", None)
    with pytest.raises(ValueError, match="'nothing' of this Module is None"):
        BufferOffloader(module, "nothing", device)


def test_a_pool_for_another_device_is_refused(emulator: ModuleType):
    assert emulator.stats() is not None
    current = torch.accelerator.current_device_index()
    with pytest.raises(ValueError, match=f"memory is for cpu, and the target is emu:{current}"):
        StaticParamOffloader(frozen(2), "emu", PinnedArenaPool(64, device="cpu"))
