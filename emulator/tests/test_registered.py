"""The caller's own memory as pinned memory: does it behave as memory from the pinned allocator does?"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

MIB = 1 << 20


class Slab:
    """Page-aligned memory of its own, as an engine would allocate it."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.ptr = self.tensor.data_ptr()
        torch.emu.host_register(self.ptr, nbytes)

    def unregister(self) -> None:
        torch.emu.host_unregister(self.ptr)


@pytest.fixture
def slab(emu_device: ModuleType) -> Iterator[Slab]:
    slab = Slab(MIB)
    yield slab
    torch.accelerator.synchronize()
    slab.unregister()


def test_tensors_over_it_are_pinned(slab: Slab) -> None:
    assert slab.tensor.is_pinned()
    assert slab.tensor[4096:8192].view(torch.float32).is_pinned()
    assert not torch.empty(8).is_pinned()


def test_it_is_pageable_again_afterwards(emu_device: ModuleType) -> None:
    slab = Slab(MIB)
    assert emu_device.stats()["registered_bytes"] == MIB
    slab.unregister()
    assert emu_device.stats()["registered_bytes"] == 0
    assert not slab.tensor.is_pinned()


def test_copies_are_asynchronous_both_ways(emu_device: ModuleType, slab: Slab) -> None:
    source, target = slab.tensor[: MIB // 2], slab.tensor[MIB // 2 :]
    source.copy_(torch.arange(MIB // 2) % 251)
    on_device = torch.empty(MIB // 2, dtype=torch.uint8, device="emu")
    before = emu_device.stats()["host_syncs"]
    on_device.copy_(source, non_blocking=True)
    target.copy_(on_device, non_blocking=True)
    assert emu_device.stats()["host_syncs"] == before
    torch.accelerator.synchronize()
    assert torch.equal(source, target)


def test_races_on_it_are_found(emu_device: ModuleType, slab: Slab) -> None:
    on_device = torch.ones(4096, dtype=torch.uint8, device="emu")
    slab.tensor[:4096].copy_(on_device, non_blocking=True)
    emu_device.host_access(slab.tensor[:16], write=False, what="read the gradient")
    (report,) = emu_device.take_reports()
    expected = "read-after-write: read the gradient on the host is not ordered after copy D2H on stream 0"
    assert expected in report
    assert report.endswith("registered bytes [0x0, 0x10)")
    torch.accelerator.synchronize()
    emu_device.host_access(slab.tensor[:16], write=False, what="read the gradient")
    assert emu_device.take_reports() == []


def test_the_guard_works_on_it(emu_device: ModuleType, slab: Slab) -> None:
    emu_device.configure(guard_pinned=True, scheduler="lazy")  # lazy: in flight until waited for
    on_device = torch.empty(MIB // 2, dtype=torch.uint8, device="emu")
    torch.accelerator.synchronize()
    with open("/dev/zero", "rb", buffering=0) as zeros:
        whole = memoryview((ctypes.c_char * MIB).from_address(slab.ptr)).cast("B")
        # Two copies in flight from pages that they share: each body opens them for itself only.
        on_device.copy_(slab.tensor[: MIB // 2], non_blocking=True)
        on_device.copy_(slab.tensor[2048 : MIB // 2 + 2048], non_blocking=True)
        with pytest.raises(OSError, match="Bad address"):
            os.readv(zeros.fileno(), [whole[: MIB // 2]])
        assert os.readv(zeros.fileno(), [whole[MIB // 2 + 4096 :]]) > 0
        torch.accelerator.synchronize()
        slab.tensor[: MIB // 2].copy_(on_device, non_blocking=True)
        with pytest.raises(OSError, match="Bad address"):
            os.readv(zeros.fileno(), [whole[:4096]])
        torch.accelerator.synchronize()
        assert os.readv(zeros.fileno(), [whole]) == MIB


def test_unregistering_under_a_copy_is_reported(emu_device: ModuleType) -> None:
    slab = Slab(MIB)
    on_device = torch.empty(MIB, dtype=torch.uint8, device="emu")
    copies = torch.Stream("emu")
    copies.wait_stream(torch.accelerator.current_stream())
    with copies:
        on_device.copy_(slab.tensor, non_blocking=True)
    slab.unregister()
    (report,) = emu_device.take_reports()
    assert "write-after-read: host_unregister on the host is not ordered after copy H2D on stream 1" in report
    torch.accelerator.synchronize()


def test_refusals(emu_device: ModuleType, slab: Slab) -> None:
    register, unregister = torch.emu.host_register, torch.emu.host_unregister
    with pytest.raises(ValueError, match="must be a multiple of the page size, 4096"):
        register(slab.ptr + 64, 4096)
    with pytest.raises(ValueError, match="no bytes"):
        register(slab.ptr, 0)
    for begin, nbytes in ((slab.ptr, 4096), (slab.ptr + 4096, 4096), (slab.ptr - 4096, 8192)):
        with pytest.raises(RuntimeError, match="overlaps memory that is registered already"):
            register(begin, nbytes)
    with pytest.raises(RuntimeError, match="pinned memory already"):
        register(torch.empty(4096, pin_memory=True).data_ptr(), 4096)
    with pytest.raises(RuntimeError, match="where no registered memory begins"):
        unregister(slab.ptr + 4096)
    stats = emu_device.stats()
    emu_device.configure(pinned_memory=stats["reserved_pinned_bytes"] + stats["registered_bytes"])
    with pytest.raises(RuntimeError, match=r"exceeds the ceiling of \d+ bytes on pinned memory"):
        Slab(4096)
