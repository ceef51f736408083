"""Does headrace ask accelerators other than CUDA only for what their runtimes have? Their answers are made up here.

What they have was read in their sources: see docs/design/accelerators.md.
"""

import datetime
import gc
from types import ModuleType, SimpleNamespace

import pytest
import torch

from headrace.memory import locking
from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger
from headrace.runtime import device as device_module
from headrace.runtime.device import free_and_total_bytes, free_device_bytes, is_capturing, new_stream, pci_address
from headrace.runtime.lanes import StreamLanes
from headrace.runtime.ranks import timeout_seconds

GIB = 1 << 30
NBYTES = 1 << 20
XPU = torch.device("xpu", 0)


@pytest.fixture
def xpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module of an XPU with 16 GiB, of which 3 are reserved and 1 is used, and whose driver tells no free bytes."""

    def untold(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("The device doesn't support querying the available free memory")

    module = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=16 * GIB, device_id=1),
        is_current_stream_capturing=lambda: True,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", untold)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: GIB)
    monkeypatch.setattr(device_module, "is_accelerator", lambda device: True)
    return module


@pytest.mark.usefixtures("xpu")
def test_an_xpu_that_does_not_tell_its_free_memory_has_what_this_process_leaves() -> None:
    assert free_and_total_bytes(XPU) == (13 * GIB, 16 * GIB)
    assert free_device_bytes(XPU) == 15 * GIB
    with pytest.raises(RuntimeError, match="free memory"):  # elsewhere, it is a fault of the device
        free_device_bytes(torch.device("cuda", 0))


@pytest.mark.usefixtures("xpu")
def test_an_xpu_tells_that_it_captures_and_not_where_it_is() -> None:
    assert is_capturing(XPU)
    assert pci_address(XPU) is None


def test_the_first_stream_of_a_pool_may_be_the_current_one(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on XPU: copies on it would never run beside kernels."""
    device = torch.device("emu", 1)
    compute = torch.accelerator.current_stream(device)
    second, third = torch.Stream(device=device), torch.Stream(device=device)
    pool = [compute, second, third]
    monkeypatch.setattr(torch, "Stream", lambda device: (pool.append(pool.pop(0)), pool[-1])[1])
    lanes = StreamLanes(device)
    assert list(lanes._streams.values()) == [second, third]
    lanes.close()
    pool[:] = [compute]
    assert new_stream(device) == compute  # there is no other


@pytest.mark.emu("lazy")
def test_memory_of_the_allocator_is_not_given_away_while_a_copy_to_it_is_under_way(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator of XPU and NPU records no event for a part of a block."""
    monkeypatch.setattr(locking, "can_register_host_memory", lambda device: False)
    device = torch.device("emu", 1)
    there = torch.ones(NBYTES - 4096, dtype=torch.uint8, device=device)
    arena = Arena(NBYTES, device, Ledger(), "weights")
    target = arena.tensor(4096, NBYTES - 4096)
    address = target.data_ptr() - 4096
    target.copy_(there, non_blocking=True)
    copied = torch.accelerator.current_stream(device).record_event()
    assert not copied.query()
    del arena, target
    gc.collect()
    assert copied.query()
    assert torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True).data_ptr() == address


@pytest.mark.parametrize("config", ["cuda:nccl", "xpu:xccl", "cpu:gloo,xpu:xccl"])
def test_a_process_group_without_the_cpu_has_a_timeout_too(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SimpleNamespace(_timeout=datetime.timedelta(seconds=90))
    backends = {entry.split(":")[0]: SimpleNamespace(options=options) for entry in config.split(",")}
    group = SimpleNamespace(_get_backend=lambda device: backends[device.type])
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: config.rpartition(":")[2])
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: config)
    assert timeout_seconds(group) == 90
