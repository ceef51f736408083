"""Do single tensors rest in tiers as the tutorial's managers say: limits kept, values kept, loads waited for?"""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.compat.tutorial import (
    LayerPrefetcher,
    NVMeConfig,
    NVMeOffloadManager,
    OffloadSystemConfig,
    OffloadTier,
    UnifiedOffloadManager,
)
from headrace.memory.disk.file import DirectFile
from headrace.memory.ledger import Tier
from tests.support.models import linears

pytestmark = pytest.mark.core(device="emu")

WIDTH = 64
LAYER_BYTES = WIDTH * WIDTH * 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64]


def layers(count: int = 6) -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = linears(count, WIDTH, bias=False)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    return model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.named_parameters()}


class Odd(nn.Module):
    """A parameter of each dtype; names that one file for each name confuses; shapes () and (0,)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for index, dtype in enumerate(DTYPES):
            value = (torch.randn(3, 5 + index, generator=generator) * 50).to(dtype)
            self.register_parameter(f"of_{index}", nn.Parameter(value, requires_grad=False))
        self.a = nn.Module()
        self.a.b_c = nn.Parameter(torch.full((2,), 1.0))
        self.a_b = nn.Module()
        self.a_b.c = nn.Parameter(torch.full((2,), 2.0))
        self.scalar = nn.Parameter(torch.tensor(3.5))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(4, 9, generator=generator).t())


@pytest.fixture
def nvme(device: torch.device, tmp_path: Path) -> Iterator[Any]:
    """Makes managers over a directory, and closes them."""
    made: list[Any] = []

    def make(model: nn.Module, **settings: Any) -> NVMeOffloadManager:
        settings = {"block_size": 4096, "aio_queue_depth": 3, "prefetch_depth": 0, **settings}
        made.append(NVMeOffloadManager(model, NVMeConfig(nvme_path=str(tmp_path / "nvme"), **settings), device=device))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def unified(device: torch.device, tmp_path: Path) -> Iterator[Any]:
    made: list[Any] = []

    def make(model: nn.Module, gpu: int, cpu: int, **settings: Any) -> UnifiedOffloadManager:
        config = OffloadSystemConfig(
            gpu_memory_limit=gpu, cpu_memory_limit=cpu, nvme_path=str(tmp_path / "nvme"), **settings
        )
        made.append(UnifiedOffloadManager(model, config, device=device))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


# NVMeOffloadManager -------------------------------------------------------------------------------------------------
def test_the_example_of_the_drive(nvme: Any, device: torch.device) -> None:
    """prefetch, load_to_gpu, offload_from_gpu, get_memory_stats: bytes by tier, values kept."""
    model = layers()
    before = values(model)
    manager = nvme(model)
    names = list(before)
    assert all(parameter.numel() == 0 for parameter in model.parameters())
    stats = manager.get_memory_stats()
    assert (stats["gpu_memory"], stats["nvme_memory"], stats["offload_ratio"]) == (0, 6 * LAYER_BYTES, 1)
    assert stats["count"] == 6
    assert set(stats["tiers"].values()) == {"nvme"}

    assert manager.prefetch(names[:2]) == []
    tensors = [manager.load_to_gpu(name, device) for name in names[:3]]
    for name, tensor in zip(names, tensors, strict=False):
        assert tensor.device.type == device.type
        assert torch.equal(tensor.cpu(), before[name])
    assert manager.gpu_resident == set(names[:3])
    assert manager.get_memory_stats()["gpu_memory"] == 3 * LAYER_BYTES
    assert manager.get_memory_stats()["offload_ratio"] == 0.5

    manager.offload_from_gpu(names[0], tensors[0] * 2)
    del tensors
    assert manager.gpu_resident == set(names[1:3])
    assert manager.get_memory_stats()["gpu_held"] == 2 * LAYER_BYTES
    assert torch.equal(manager.load_to_gpu(names[0], device).cpu(), before[names[0]] * 2)
    manager.close()
    assert torch.equal(values(model)[names[0]], before[names[0]] * 2)
    assert all(torch.equal(values(model)[name], before[name]) for name in names[1:])


def test_loading_twice_and_without_prefetch_gives_the_value(nvme: Any, device: torch.device) -> None:
    """The tutorial returns None the second time, and memory that nobody filled where nothing was prefetched."""
    model = layers()
    before = values(model)
    manager = nvme(model)
    for _ in range(2):
        assert torch.equal(manager.load_to_gpu("0.weight", device).cpu(), before["0.weight"])


def test_saving_what_was_not_loaded_is_kept(nvme: Any, device: torch.device) -> None:
    """The tutorial drops it without a word."""
    manager = nvme(layers())
    value = torch.arange(WIDTH * WIDTH, dtype=torch.float32).view(WIDTH, WIDTH)
    manager.offload_from_gpu("3.weight", value)
    value.zero_()  # the caller's own again
    assert manager.load_to_gpu("3.weight", device).sum().item() > 0


def test_every_dtype_shape_and_name(nvme: Any, device: torch.device) -> None:
    """One file for each name mixes up `a.b_c` and `a_b.c`; a table of five dtypes turns the others into float32."""
    model = Odd()
    before = values(model)
    manager = nvme(model)
    for name, value in before.items():
        assert torch.equal(manager.load_to_gpu(name).cpu(), value), name
    manager.close()
    for name, value in values(model).items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("pin", [True, False])
def test_host_memory_is_the_blocks_in_flight(nvme: Any, device: torch.device, pin: bool) -> None:
    """Not one page-locked buffer for each parameter, which is the whole model."""
    manager = nvme(layers(24), aio_queue_depth=2, pin_memory=pin)
    for name in manager.tiers.locations():
        manager.load_to_gpu(name)
        manager.release(name)
    stats = manager.get_memory_stats()
    assert stats["cpu_memory"] == 2 * 4096 < stats["nvme_memory"] // 40
    assert manager.tiers.ledger.peak_bytes(Tier.HOST) == 2 * 4096
    assert stats["gpu_peak"] == LAYER_BYTES


def test_as_many_blocks_are_read_at_once_as_the_queue_is_deep(
    nvme: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = layers(1).double()  # of 8 blocks
    before = values(model)
    manager = nvme(model, aio_queue_depth=8)
    manager.synchronize()
    read, all_read = DirectFile.read, threading.Barrier(8)

    def waits_for_the_others(*arguments: Any) -> None:
        all_read.wait(timeout=5)
        read(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "read", waits_for_the_others)
        assert torch.equal(manager.load_to_gpu("0.weight").cpu(), before["0.weight"])


def test_the_limit_of_the_gpu_holds(nvme: Any, device: torch.device) -> None:
    manager = nvme(layers(), gpu_memory_limit=2 * LAYER_BYTES)
    held = [manager.load_to_gpu(f"{index}.weight") for index in range(2)]
    with pytest.raises(headrace.BudgetError, match=r"'2.weight' needs 16 KiB .* beside 32 KiB .* limit is 32 KiB"):
        manager.load_to_gpu("2.weight")
    assert manager.prefetch(["2.weight"]) == ["2.weight"]
    held.clear()
    manager.load_to_gpu("2.weight")
    assert manager.get_memory_stats()["gpu_peak"] == 2 * LAYER_BYTES


def test_what_was_written_in_place_goes_back_when_it_makes_room(nvme: Any, device: torch.device) -> None:
    model = layers()
    before = values(model)
    manager = nvme(model, gpu_memory_limit=LAYER_BYTES)
    for name in before:
        manager.load_to_gpu(name).add_(1)
    assert manager.get_memory_stats()["gpu_peak"] == LAYER_BYTES
    manager.close()
    assert all(torch.equal(value, before[name] + 1) for name, value in values(model).items())


def test_prefetch_depth_loads_those_that_follow(nvme: Any, device: torch.device) -> None:
    manager = nvme(layers(), prefetch_depth=2)
    manager.load_to_gpu("4.weight")
    assert manager.gpu_resident == {"4.weight", "5.weight", "0.weight"}  # and the first again, for the next pass


def test_two_managers_share_a_path(nvme: Any, device: torch.device) -> None:
    """Of two models with equal names; the tutorial's write over each other's files."""
    first, second = layers(2), layers(2)
    second[0].weight.data.mul_(-1)
    before = values(first), values(second)
    managers = nvme(first), nvme(second)
    for manager, expected in zip(managers, before, strict=True):
        assert torch.equal(manager.load_to_gpu("0.weight").cpu(), expected["0.weight"])


def test_a_managers_file_has_no_name(nvme: Any, device: torch.device, tmp_path: Path) -> None:
    """So none is left there, however the process ends."""
    manager = nvme(layers(2))
    assert list((tmp_path / "nvme").iterdir()) == []
    manager.close()


def test_errors_say_what_to_do(nvme: Any, device: torch.device, tmp_path: Path) -> None:
    manager = nvme(layers())
    with pytest.raises(KeyError, match=r"no tensor '7.weight' among 6"):
        manager.load_to_gpu("7.weight")
    with pytest.raises(ValueError, match=r"shape \(2, 2\): give one like it"):
        manager.offload_from_gpu("0.weight", torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"torch.float32 of shape .* the value given is torch.float64"):
        manager.offload_from_gpu("0.weight", torch.ones(WIDTH, WIDTH, dtype=torch.float64))
    manager.close()
    with pytest.raises(headrace.StateError, match="make a new manager"):
        manager.load_to_gpu("0.weight")
    (tmp_path / "file").write_text("")
    with pytest.raises((ValueError, headrace.DiskError)):
        NVMeOffloadManager(layers(), NVMeConfig(nvme_path=str(tmp_path / "file")), device=device)


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        (NVMeConfig, {"block_size": 1000}, "block_size=1000.: give whole pages of the disk, such as 4096"),
        (NVMeConfig, {"block_size": 0}, "block_size=0.: give whole pages"),
        (NVMeConfig, {"prefetch_depth": -1}, "prefetch_depth=-1.: give 0 or more"),
        (NVMeConfig, {"aio_queue_depth": 0}, "aio_queue_depth=0.: give 1 or more"),
        (NVMeConfig, {"gpu_memory_limit": -1}, "gpu_memory_limit=-1.: give 0 or more"),
        (OffloadSystemConfig, {"prefetch_count": -1}, "prefetch_count=-1.: give 0 or more"),
        (OffloadSystemConfig, {"num_io_threads": 0}, "num_io_threads=0.: give 1 or more"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(config: Any, settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config(**settings)


def test_in_inference_mode_and_from_a_running_event_loop(nvme: Any, device: torch.device) -> None:
    """`asyncio.run` fails in a notebook, which runs a loop."""
    import asyncio

    model = layers()
    before = values(model)
    manager = nvme(model)

    async def cell() -> torch.Tensor:
        manager.prefetch(["1.weight"])
        return manager.load_to_gpu("1.weight")

    with torch.inference_mode():
        assert torch.equal(asyncio.run(cell()).cpu(), before["1.weight"])


# UnifiedOffloadManager ----------------------------------------------------------------------------------------------
def test_the_example_of_all_tiers(unified: Any, device: torch.device) -> None:
    """Three tiers filled in turn, each within its limit; each tensor prefetched, used, offloaded; nothing lost."""
    model = layers(12)
    before = values(model)
    gpu, cpu = 4 * LAYER_BYTES, 3 * LAYER_BYTES
    manager = unified(model, gpu, cpu, prefetch_count=1)
    summary = manager.get_memory_summary()
    assert summary["gpu"]["count"] == 2  # and room for one that is used and one ahead
    assert sum(tier["count"] for tier in summary.values()) == 12
    assert sum(tier["bytes"] for tier in summary.values()) == 12 * LAYER_BYTES
    assert summary["cpu"]["count"] >= 1
    assert summary["nvme"]["count"] >= 6
    for _ in range(3):
        for index, name in enumerate(before):
            manager.prefetch([f"{index + 1}.weight"] if index < 11 else [])
            tensor = manager.ensure_gpu(name)
            assert torch.equal(tensor.cpu(), before[name]), name
            manager.offload(name, tensor + 1)
            before[name] += 1
            del tensor
    summary = manager.get_memory_summary()
    assert summary["gpu"]["peak_bytes"] <= gpu
    assert summary["cpu"]["peak_bytes"] <= cpu
    assert manager.gpu_used <= gpu
    assert manager.cpu_used <= cpu
    assert summary["nvme"]["held_bytes"] == summary["nvme"]["count"] * LAYER_BYTES
    locations = manager.locations
    assert locations["0.weight"].tier is OffloadTier.GPU
    assert locations["11.weight"].tier is OffloadTier.NVME
    assert locations["11.weight"].offset > 0
    assert locations["11.weight"].size == LAYER_BYTES
    manager.close()
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def test_bytes_on_the_device_are_the_emulators_too(emulator: Any, tmp_path: Path) -> None:
    torch.accelerator.synchronize()
    gc.collect()
    held = torch.accelerator.memory_allocated()
    config = OffloadSystemConfig(4 * LAYER_BYTES, 64 * LAYER_BYTES, prefetch_count=1, nvme_path=str(tmp_path))
    with UnifiedOffloadManager(layers(12), config) as manager:
        for name in manager.tiers.locations():
            manager.ensure_gpu(name)
        assert torch.accelerator.memory_allocated() - held <= 4 * LAYER_BYTES + 1024
        assert manager.gpu_used == 4 * LAYER_BYTES


def test_a_model_on_the_accelerator_leaves_it(emulator: Any, tmp_path: Path) -> None:
    """The tutorial copies parameters to the CPU and leaves them on the GPU as well."""
    model = layers(8).to("emu")
    torch.accelerator.synchronize()
    held = torch.accelerator.memory_allocated()
    config = OffloadSystemConfig(3 * LAYER_BYTES, 3 * LAYER_BYTES, prefetch_count=1, nvme_path=str(tmp_path))
    manager = UnifiedOffloadManager(model, config)
    manager.synchronize()
    assert held - torch.accelerator.memory_allocated() >= 7 * LAYER_BYTES
    manager.close()
    assert {parameter.device.type for parameter in model.parameters()} == {"emu"}


def test_tensors_after_the_first_on_disk_keep_their_values(unified: Any, device: torch.device) -> None:
    """The tutorial's first tensor on disk empties all parameters: those that follow count as 0 bytes, on the GPU."""
    model = layers(6)
    before = values(model)
    manager = unified(model, LAYER_BYTES, LAYER_BYTES // 2, prefetch_count=0)
    assert manager.get_memory_summary()["nvme"]["count"] == 6
    assert all(torch.equal(manager.ensure_gpu(name).cpu(), value) for name, value in before.items())


def test_a_value_for_one_that_rests_on_the_gpu_is_taken(unified: Any, device: torch.device) -> None:
    """The tutorial returns without a word."""
    model = layers(2)
    manager = unified(model, 64 * LAYER_BYTES, 0)
    assert manager.get_memory_summary()["gpu"]["count"] == 2
    manager.offload("0.weight", torch.ones(WIDTH, WIDTH, device=device))
    assert manager.ensure_gpu("0.weight").sum().item() == WIDTH * WIDTH
    assert model[0].weight.sum().item() == WIDTH * WIDTH


def test_writes_to_a_parameter_on_the_cpu_reach_the_gpu(unified: Any, device: torch.device) -> None:
    model = layers(3)
    manager = unified(model, 3 * LAYER_BYTES, 64 * LAYER_BYTES, offload_parameters=True)
    assert torch.equal(manager.ensure_gpu("0.weight").cpu(), model[0].weight)
    with torch.no_grad():
        model[0].weight.fill_(7)
    assert torch.equal(manager.ensure_gpu("0.weight").cpu(), torch.full((WIDTH, WIDTH), 7.0))


@pytest.mark.parametrize("tier", list(OffloadTier))
def test_parameters_begin_in_the_tier_that_is_named(unified: Any, device: torch.device, tier: OffloadTier) -> None:
    settings = {"offload_parameters": True, "parameter_offload_tier": tier}
    manager = unified(layers(2), 1 << 20, 1 << 20, **settings)
    assert {location.tier for location in manager.locations.values()} == {tier}


@pytest.mark.parametrize("offloaded", [True, False])
def test_gradients_and_state_rest_as_their_flags_say(unified: Any, device: torch.device, offloaded: bool) -> None:
    manager = unified(layers(2), 1 << 20, 1 << 20, offload_gradients=offloaded, offload_optimizer_states=offloaded)
    manager.add("0.weight.grad", torch.full((3,), 2.0), "gradient")
    manager.add("0.weight.m", torch.full((3,), 4.0), "optimizer_state")
    expected = OffloadTier.CPU if offloaded else OffloadTier.GPU
    assert {manager.locations[name].tier for name in ("0.weight.grad", "0.weight.m")} == {expected}
    assert (manager.ensure_gpu("0.weight.m") / manager.ensure_gpu("0.weight.grad")).sum().item() == 6
    with pytest.raises(ValueError, match="is there already"):
        manager.add("0.weight.m", torch.zeros(3))


def test_limits_that_are_too_small_are_refused_before_anything_changes(unified: Any, device: torch.device) -> None:
    model = layers(2)
    before = values(model)
    with pytest.raises(headrace.BudgetError, match=r"'0.weight' needs 16 KiB on .*; the limit there is 8 KiB"):
        unified(model, LAYER_BYTES // 2, 1 << 20)
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


@pytest.mark.parametrize("threads", [1, 4])
def test_training_by_hand_equals_plain_training(unified: Any, device: torch.device, threads: int) -> None:
    """Each layer's weights come by name, autograd computes, SGD writes in place on the device; and they go back."""
    ours, plain = layers(4), layers(4)
    manager = unified(ours, 5 * LAYER_BYTES, 2 * LAYER_BYTES, num_io_threads=threads, offload_parameters=True)
    plain.to(device)
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        weights = {name: manager.ensure_gpu(name).requires_grad_() for name in values(plain)}
        with torch.no_grad():
            target = x + 1
        loss = nn.functional.mse_loss(torch.func.functional_call(ours, weights, x), target)
        loss.backward()
        with torch.no_grad():
            for name, weight in weights.items():
                manager.offload(name, weight.sub_(weight.grad, alpha=0.1))
        del weights, weight
        loss = loss.detach()  # its graph refers to the weights
        expected = nn.functional.mse_loss(plain(x), target)
        plain.zero_grad()
        expected.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        assert torch.equal(loss, expected)
    manager.close()
    assert all(torch.equal(value, values(plain)[name]) for name, value in values(ours).items())


# LayerPrefetcher ----------------------------------------------------------------------------------------------------
def test_layers_come_in_order_and_are_loaded_ahead(nvme: Any, device: torch.device) -> None:
    model = layers()
    before = values(model)
    manager = nvme(model, gpu_memory_limit=3 * LAYER_BYTES)
    prefetcher = LayerPrefetcher(list(before), prefetch_depth=2, manager=manager)
    order = [*before, *before, *reversed(before)]  # a second pass, and one the other way round
    for name in order:
        assert torch.equal(prefetcher.get_layer(name).cpu(), before[name])
    assert manager.get_memory_stats()["gpu_peak"] == 3 * LAYER_BYTES
    assert set(prefetcher.prefetched) == {"1.weight", "2.weight"}


def test_a_subclass_loads_by_itself_and_is_waited_for(device: torch.device) -> None:
    """The tutorial leaves `_load_layer` to whoever writes it, and returns what has not arrived."""
    loaded = []

    class Own(LayerPrefetcher):
        def _load_layer(self, name: str) -> torch.Tensor:
            loaded.append(name)
            if name == "bad":
                raise OSError("the drive is gone")
            return torch.full((2,), float(len(name)))

    prefetcher = Own(["a", "bb", "bad"], prefetch_depth=1)
    assert prefetcher.get_layer("a").tolist() == [1, 1]
    assert prefetcher.get_layer("bb").tolist() == [2, 2]
    with pytest.raises(OSError, match="the drive is gone"):
        prefetcher.get_layer("bad")
    assert loaded == ["a", "bb", "bad"]
    with pytest.raises(KeyError, match="none of the 3"):
        prefetcher.get_layer("c")
    with pytest.raises(headrace.StateError, match="manager="):
        LayerPrefetcher(["a"]).get_layer("a")
