"""When the system page-locks no more: does everything go on, exactly, with one warning and right figures?"""

import contextlib
import gc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn

import headrace
from headrace.memory import locking
from headrace.memory.arena import Arena
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime import device as device_module
from headrace.runtime import page_locks
from headrace.runtime.probe import link_rates
from tests.support.compare import assert_same
from tests.support.loops import random_batches, steps
from tests.support.models import linears, seeded

MIB = 1 << 20
WIDTH, LAYERS = 256, 6


def emu0() -> torch.device:
    return torch.device("emu", 1)  # known once the emulator is built


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_told", set())


def limit_locks(emu: ModuleType, nbytes: int) -> None:
    """So much more can be page-locked from now on."""
    gc.collect()  # what an earlier run left in reference cycles would make room later
    stats = emu.stats()
    emu.configure(pinned_memory=stats["reserved_pinned_bytes"] + stats["registered_bytes"] + nbytes)


def model() -> nn.Sequential:
    return seeded(linears, LAYERS, WIDTH, nn.GELU)


def train(trained: nn.Module, device: torch.device, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return steps(trained, optimizer, random_batches(3, 8, WIDTH, device=device))


def plain_run(device: torch.device) -> tuple[list[torch.Tensor], nn.Module]:
    """On the host beside a copy on the device: the optimizer of the offloaded run steps on the host."""
    plain = model()
    handle = headrace.offload(plain, device=device)
    losses = train(plain, device, headrace.optim.AdamW(plain.parameters(), lr=1e-2))
    handle.remove()
    return losses, plain


@pytest.mark.emu("lazy", "random:3")
@pytest.mark.parametrize("locked_bytes", [0, 600 << 10, MIB], ids=["nothing", "weights", "more"])
@pytest.mark.parametrize(
    "settings", [{}, {"activations": {"min_bytes": 0, "all_leave": True}}], ids=["", "activations"]
)
def test_a_run_goes_on_exactly_with_one_warning(
    emu_device: ModuleType, locked_bytes: int, settings: dict[str, Any]
) -> None:
    expected, plain = plain_run(emu0())
    limit_locks(emu_device, locked_bytes)
    trained = model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with headrace.offload(trained, device=emu0(), device_memory="600KiB", **settings) as handle:
            losses = train(trained, emu0(), headrace.optim.AdamW(trained.parameters(), lr=1e-2))
            stats, printed = handle.stats(), str(handle.report())
    assert_same(losses, expected)
    assert_same(trained.parameters(), plain.parameters())
    assert [each.category for each in caught] == [RuntimeWarning]
    assert 0 < stats.host_locked_bytes <= locked_bytes or locked_bytes == stats.host_locked_bytes == 0
    assert stats.host_refused_bytes > 0
    assert stats.host_locked_bytes + stats.host_refused_bytes == stats.host_bytes
    assert re.search(r"page-locked +\S+ \S*B, \S+ \S*B refused: compute waits for their copies", printed)


@pytest.mark.emu("lazy")
def test_blocks_on_disk_go_on_exactly(emu_device: ModuleType, tmp_path: Path) -> None:
    expected, plain = plain_run(emu0())
    limit_locks(emu_device, 300 << 10)
    trained = model()
    with pytest.warns(RuntimeWarning, match="could not be page-locked") as caught:
        handle = headrace.offload(trained, device=emu0(), device_memory="600KiB", host_memory="2MiB", disk=tmp_path)
    losses = train(trained, emu0(), headrace.optim.AdamW(trained.parameters(), lr=1e-2))
    assert handle.stats().disk_bytes > 0
    assert handle.stats().host_refused_bytes > 0
    assert_same(trained.parameters(), plain.parameters())
    handle.remove()
    assert len(caught) == 1
    assert_same(losses, expected)


@pytest.mark.emu("lazy")
@pytest.mark.parametrize("locked_bytes", [0, 64 << 20])
def test_activations_alone_go_on_exactly(emu_device: ModuleType, locked_bytes: int) -> None:
    plain, trained = model().to(emu0()), model().to(emu0())
    expected = train(plain, emu0(), torch.optim.SGD(plain.parameters(), lr=1e-2))
    limit_locks(emu_device, locked_bytes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with headrace.offload_activations(trained, min_bytes=0, all_leave=True) as handle:
            losses = train(trained, emu0(), torch.optim.SGD(trained.parameters(), lr=1e-2))
            stats = handle.stats()
    assert_same(losses, expected)
    assert stats.host_bytes > 0
    assert stats.host_locked_bytes == (stats.host_bytes if locked_bytes else 0)
    assert ["(activations)" in str(each.message) for each in caught] == ([] if locked_bytes else [True])


@pytest.mark.emu("lazy")
def test_locked_and_refused_are_counted_as_they_come_and_go(emu_device: ModuleType) -> None:
    limit_locks(emu_device, 3 * MIB)
    ledger = Ledger()
    held = Arena(2 * MIB, emu0(), ledger, "weights")
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        refused = Arena(2 * MIB, emu0(), ledger, "weights")
    smaller = Arena(MIB, emu0(), ledger, "gradients")  # there is room for it, and nothing is said
    assert (held.pinned, refused.pinned, smaller.pinned) == (True, False, True)
    assert ledger.locked() == {"host_locked_bytes": 3 * MIB, "host_refused_bytes": 2 * MIB}
    tensor = refused.tensor(0, 4).fill_(9)
    assert tensor.to("emu").cpu().tolist() == [9] * 4
    assert ledger.held_bytes(Tier.HOST) == 5 * MIB
    del held, refused, tensor, smaller
    assert ledger.locked() == {"host_locked_bytes": 0, "host_refused_bytes": 0}
    assert ledger.by_purpose() == {}


def message(emu: ModuleType) -> str:
    """Of a refusal of 2 MiB, where 1 MiB is locked."""
    limit_locks(emu, MIB)
    ledger = Ledger()
    held = Arena(MIB, emu0(), ledger, "weights")
    assert ledger.locked()["host_locked_bytes"] == MIB
    with pytest.warns(RuntimeWarning, match="could not be page-locked") as caught:
        Arena(2 * MIB, emu0(), Ledger(), "gradients")
    del held
    return str(caught[0].message)


def test_what_cuda_still_has_locked_from_before_is_unlocked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may prevent the call that unlocks memory, which is then unmapped all the same."""
    calls = []

    def note(name: str) -> Callable[..., int]:
        return lambda address, *_: calls.append((name, address)) or 0

    runtime = SimpleNamespace(cudaHostRegister=note("lock"), cudaHostUnregister=note("unlock"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(cudart=lambda: runtime))
    monkeypatch.setattr(device_module, "_locked", set())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    device = torch.device("cuda", 0)
    device_module.register_host_memory(device, 4096, 4096)
    unlock = device_module.register_host_memory(device, 4096, 8192)
    assert unlock is not None
    unlock()
    device_module.register_host_memory(device, 4096, 4096)
    assert calls == [(name, 4096) for name in ("lock", "unlock", "lock", "unlock", "lock")]


@pytest.mark.parametrize("missed", ["add", "discard"])
def test_ctrl_c_beside_a_lock_or_an_unlock_leaves_memory_lockable(monkeypatch: pytest.MonkeyPatch, missed: str) -> None:
    """Before or after either is done, and no error is left behind, which the next kernel would raise."""
    locked: set[int] = set()
    errors: list[int] = []

    def refuse(refused: bool, code: int) -> int:
        errors.extend([code] * refused)
        return code * refused

    def lock(address: int, *_: int) -> int:
        result = refuse(address in locked, 712)
        locked.add(address)
        if missed == "add" and interrupting:
            raise KeyboardInterrupt
        return result

    def unlock(address: int) -> int:
        result = refuse(address not in locked, 713)
        locked.discard(address)
        if missed == "discard" and interrupting:
            raise KeyboardInterrupt
        return result

    runtime = SimpleNamespace(cudaHostRegister=lock, cudaHostUnregister=unlock)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(cudart=lambda: runtime))
    monkeypatch.setattr(device_module, "_locked", set())
    monkeypatch.setattr(device_module, "_clear_last_error", lambda device: errors.clear())
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    device = torch.device("cuda", 0)
    interrupting = True
    with pytest.raises(KeyboardInterrupt):
        device_module.register_host_memory(device, 4096, 4096)()  # type: ignore[misc]
    interrupting = False
    assert device_module.register_host_memory(device, 4096, 8192) is not None
    assert not errors


@pytest.mark.emu("lazy", h2d_bytes_per_second=10e9, copy_latency_seconds=0.0, launch_seconds=0.0)
def test_the_warning_has_the_numbers(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "_ledgers", WeakSet())
    monkeypatch.setattr(page_locks, "memlock_bytes", lambda: None)
    said = message(emu_device)
    assert "emu:1: 2 MiB of host memory (gradients) could not be page-locked, beside 1 MiB that are" in said
    assert "(they reach 8.0 GB/s here)" in said
    assert "The driver names no limit" in said
    assert "ulimit" not in said


@pytest.mark.emu("lazy", h2d_bytes_per_second=10e9, copy_latency_seconds=0.0, launch_seconds=0.0)
def test_what_is_locked_is_compared_where_there_is_room_to_measure(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_locks(emu_device, 10 * MIB)
    with pytest.warns(RuntimeWarning, match=r"reach 8.0 GB/s here, page-locked ones 10.0 GB/s"):
        Arena(20 * MIB, emu0(), Ledger(), "weights")


@pytest.mark.emu("lazy")
def test_the_warning_names_the_limit_where_it_can_be_read(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locks, "memlock_bytes", lambda: 65536)
    assert "ulimit -l allows 65,536 bytes" in message(emu_device)
    monkeypatch.setattr(locking, "_told", set())
    monkeypatch.setattr(page_locks.platform, "release", lambda: "6.18.33.2-microsoft-standard-WSL2")
    monkeypatch.setattr(page_locks, "total_host_bytes", lambda: 32 * 10**9)
    said = message(emu_device)
    assert "This is WSL" in said
    assert "(16.0 GB here)" in said
    assert "ulimit" not in said


@pytest.mark.emu("lazy", device_memory=4 * MIB)
def test_a_full_device_keeps_the_warning_from_measuring_alone(emu_device: ModuleType) -> None:
    said = message(emu_device)
    assert "waits for its copies. " in said


@pytest.mark.emu("lazy")
def test_a_device_that_cannot_register_falls_back_too(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory comes from PyTorch's allocator, which raises where it may lock no more.

    So much is asked for that no block which earlier tests left in its cache is enough.
    """
    monkeypatch.setattr(locking, "can_register_host_memory", lambda device: False)
    monkeypatch.setattr(page_locks, "can_register_host_memory", lambda device: False)
    limit_locks(emu_device, MIB)
    ledger = Ledger()
    with pytest.warns(RuntimeWarning, match="64 MiB of host memory"):
        refused = Arena(64 * MIB, emu0(), ledger, "weights")
    assert not refused.pinned
    assert refused.tensor(0, 4).fill_(9).to("emu").cpu().tolist() == [9] * 4
    assert ledger.locked() == {"host_locked_bytes": 0, "host_refused_bytes": 64 * MIB}


def test_what_cuda_refuses_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next kernel would raise it: one is run for that."""
    launched = []

    def launch(*size: int, device: torch.device) -> None:
        launched.append(device)
        raise torch.AcceleratorError("CUDA error: out of memory")

    runtime = SimpleNamespace(cudaHostRegister=lambda address, nbytes, flags: 2, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(cudart=lambda: runtime))
    monkeypatch.setattr(torch, "ones", launch)
    device = torch.device("cuda", 0)
    assert device_module.register_host_memory(device, 4096, 4096) is None
    assert launched == [device]


@pytest.mark.emu("lazy", h2d_bytes_per_second=10e9, d2h_bytes_per_second=5e9)
def test_a_probe_measures_pageable_memory_then_and_says_so(emu_device: ModuleType) -> None:
    """Plans count with what it finds."""
    limit_locks(emu_device, MIB)
    rates = link_rates(emu0(), copy_bytes=16 * MIB)
    assert not rates.locked
    assert rates.onload == pytest.approx(rates.pageable_onload)
    assert any("could not be page-locked" in note for note in rates.notes)
    emu_device.configure(pinned_memory=1 << 30)
    assert link_rates(emu0(), copy_bytes=16 * MIB).locked
