"""Are arenas as large as they say, page-locked, refused in time, and given back when their tensors die?"""

import mmap
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import BudgetError
from headrace.memory import locking
from headrace.memory.arena import ALIGNMENT_BYTES, Arena, aligned
from headrace.memory.ledger import Ledger, Tier

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return True
    return False


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_alignment(nbytes: int, rounded: int) -> None:
    assert aligned(nbytes) == rounded


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 3_000_000])
def test_the_size_is_exact_to_the_page(nbytes: int, compute_device: torch.device, ledger: Ledger) -> None:
    """Not a power of two: 3 MB would become 4 MiB with PyTorch's allocator."""
    arena = Arena(nbytes, compute_device, ledger, "weights")
    assert arena.nbytes == max(PAGE, -(-nbytes // PAGE) * PAGE)
    assert ledger.by_purpose() == {(Tier.HOST, "weights"): arena.nbytes}
    assert len(arena.tensor(0, nbytes)) == nbytes


def test_tensors_have_storages_of_their_own(compute_device: torch.device, ledger: Ledger) -> None:
    arena = Arena(256, compute_device, ledger, "weights")
    first, second, again = arena.tensor(0, 64), arena.tensor(64, 100), arena.tensor(0, 64)
    assert first.untyped_storage().nbytes() == 64
    assert second.untyped_storage().nbytes() == 100
    assert second.data_ptr() == first.data_ptr() + 64
    assert first.data_ptr() % ALIGNMENT_BYTES == 0
    first.fill_(1)
    second.fill_(2)
    assert again.tolist() == [1] * 64  # the same bytes
    assert arena.tensor(0, 0).shape == (0,)


def test_memory_beyond_the_end_is_not_handed_out(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="greater than actual buffer length"):
        Arena(PAGE, CPU, ledger, "weights").tensor(PAGE - 1, 2)


def test_it_lives_as_long_as_any_of_its_tensors(compute_device: torch.device, ledger: Ledger) -> None:
    arena = Arena(2 * PAGE, compute_device, ledger, "weights")
    first, second = arena.tensor(0, PAGE), arena.tensor(PAGE, 10)
    view = second.view(2, 5)[1]
    del arena, first, second
    assert ledger.held_bytes(Tier.HOST) == 2 * PAGE
    view.fill_(3)
    assert view.tolist() == [3] * 5
    del view
    assert ledger.held_bytes(Tier.HOST) == 0
    assert ledger.peak_bytes(Tier.HOST, "weights") == 2 * PAGE


@pytest.mark.parametrize("already_bytes", [0, 3 * PAGE])
def test_over_the_budget_nothing_is_allocated(already_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(host_budget_bytes=already_bytes + PAGE)
    ledger.add(Tier.HOST, "weights", already_bytes)
    Arena(PAGE, CPU, ledger, "gradients")

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("memory was mapped")

    monkeypatch.setattr(locking, "map_pages", forbidden)
    with pytest.raises(BudgetError, match=r"gradients need 8 KiB of host memory .* raise it") as caught:
        Arena(PAGE + 1, CPU, ledger, "gradients")
    assert caught.value.tier == "host"
    assert pickle.loads(pickle.dumps(caught.value)).tier == "host"
    assert ledger.held_bytes(Tier.HOST) == already_bytes


def test_what_cannot_be_mapped_is_not_booked(ledger: Ledger) -> None:
    with pytest.raises((OSError, OverflowError, ValueError)):
        Arena(1 << 62, CPU, ledger, "weights")
    assert ledger.by_purpose() == {}


def test_on_the_cpu_nothing_is_locked(ledger: Ledger) -> None:
    assert not Arena(PAGE, CPU, ledger, "weights").pinned


@pytest.mark.emu("lazy")
def test_it_is_page_locked_for_an_accelerator(emu_device: Any, ledger: Ledger) -> None:
    torch.empty(1).pin_memory()  # is_pinned() asks the device only after it was used
    arena = Arena(PAGE, torch.device("emu", 1), ledger, "weights")
    tensor = arena.tensor(0, 100)
    assert arena.pinned
    assert tensor.is_pinned()
    there = torch.empty(100, dtype=torch.uint8, device="emu")
    emu_device.reset_stats()
    there.copy_(tensor, non_blocking=True)
    assert emu_device.stats()["host_syncs"] == 0  # a copy from pageable memory makes the host wait
    torch.accelerator.synchronize()


@pytest.mark.emu("lazy")
def test_it_is_unlocked_before_it_is_unmapped(emu_device: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    register, seen = locking.register_host_memory, []

    def watched(device: torch.device, address: int, nbytes: int) -> Any:
        unregister = register(device, address, nbytes)

        def undo() -> None:
            seen.append((address, is_mapped(address)))
            unregister()

        return undo

    monkeypatch.setattr(locking, "register_host_memory", watched)
    arena = Arena(16 * PAGE, torch.device("emu", 1), ledger, "weights")
    address = arena.tensor(0, 1).data_ptr()
    tensor = arena.tensor(PAGE, 1)
    del arena
    assert seen == []
    del tensor
    assert seen == [(address, True)]
