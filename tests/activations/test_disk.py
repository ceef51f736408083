"""Are activations that rest on disk exact, with little host memory, and does a fault of the disk show?"""

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.activations.stash import Stash
from headrace.memory.disk import DirectFile, DiskStore, disk_pages
from tests.activations.models import ROWS, SAVED_BYTES, Stack, results, rows, step
from tests.activations.test_orders import ORDERS, Script
from tests.disk.test_faults import spill_file
from tests.matrix.models import CASES, Case
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.instances import instances
from tests.support.loops import train
from tests.support.offloaded import budget_bytes

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O

HOST_BYTES = 5 * SAVED_BYTES  # of 12 and more


@pytest.mark.core(with_weights=True, checkpointing=["none", "non-reentrant"])
@pytest.mark.parametrize(
    ("case", "checkpointing", "with_weights"),
    [
        (CASES[0], "none", False),
        (CASES[0], "none", True),
        (CASES[0], "reentrant", True),
        (CASES[0], "non-reentrant", True),
        (CASES[2], "non-reentrant", False),
        (CASES[3], "none", False),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_kind(case: Case, checkpointing: str, with_weights: bool, compute_device: torch.device, tmp_path: Path) -> None:
    batches = case.on(compute_device)

    plain = train(case.build(checkpointing).to(compute_device), batches, case.forward)
    model = case.build(checkpointing)
    settings: dict[str, Any] = {"min_bytes": 0, "device_memory": 0, "tier": "disk"}
    if with_weights:
        handle = headrace.offload(
            model,
            device=compute_device,
            device_memory=budget_bytes(model, case.share),
            disk=tmp_path,
            activations=settings,
        )
        activations = handle.activations
    else:
        model.to(compute_device)
        activations = handle = headrace.offload_activations(model, **settings, host_memory="256KiB", disk=tmp_path)
    with handle:
        assert_same(train(model, batches, case.forward), plain)
        assert activations is not None
        stats = activations.stats()
        assert stats.spill_bytes > 0
        if not with_weights:
            assert stats.host_peak_bytes <= 2**18


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_short_host_memory_is_shared_with_weights(tier: str, compute_device: torch.device, tmp_path: Path) -> None:
    """Nothing is said of how much of it is for whom."""
    expected = step(Stack(12).to(compute_device), rows(compute_device))
    model = Stack(12)
    with headrace.offload(
        model,
        device=compute_device,
        device_memory=weight_bytes(model) // 3,
        host_memory="1536KiB",  # weights and gradients take 1.6 MB
        disk=tmp_path,
        activations={"min_bytes": 0, "device_memory": 0, "tier": tier},
    ) as handle:
        for _ in range(3):
            assert_same(step(model, rows(compute_device)), expected)
        assert handle.activations is not None
        assert handle.activations.stats().offload_bytes > 0
        assert handle.stats().host_peak_bytes <= 1536 << 10


@pytest.mark.extended
@pytest.mark.parametrize("order", ORDERS[1:5], ids=lambda order: order.__name__)
def test_orders(order: Script, compute_device: torch.device, tmp_path: Path) -> None:
    plain, model = Stack(12).to(compute_device), Stack(12).to(compute_device)
    with headrace.offload_activations(
        model, min_bytes=0, device_memory=0, tier="disk", disk=tmp_path, host_memory=HOST_BYTES
    ) as handle:
        for index in range(3):
            plain.zero_grad()
            model.zero_grad()
            assert_same(order(model, compute_device, index), order(plain, compute_device, index))
        stats = handle.stats()
    assert stats.spill_bytes > 0
    assert stats.fetch_bytes > 0
    assert stats.host_peak_bytes <= HOST_BYTES


def test_disk_is_used_again(compute_device: torch.device, tmp_path: Path) -> None:
    model = Stack(12).to(compute_device)
    with headrace.offload_activations(
        model, min_bytes=0, device_memory=0, tier="disk", disk=tmp_path, host_memory=HOST_BYTES
    ) as handle:
        for _ in range(2):
            step(model, rows(compute_device))
        taken = os.stat(spill_file(tmp_path)).st_size
        for _ in range(3):
            step(model, rows(compute_device))
        assert handle.stats().spill_bytes > 0
        assert 0 < os.stat(spill_file(tmp_path)).st_size == taken <= 13 * SAVED_BYTES


def test_the_file_is_as_large_as_the_longest_forward_needs(compute_device: torch.device, tmp_path: Path) -> None:
    """Lengths that grow, and then others in any order."""
    plain, model = Stack(5).to(compute_device), Stack(5).to(compute_device)
    lengths = [*range(33, 93, 2), *random.Random(0).sample(range(32, 96), 30)]
    with headrace.offload_activations(
        model, min_bytes=0, device_memory=0, tier="disk", disk=tmp_path, host_memory=HOST_BYTES
    ) as handle:
        for count in lengths:
            x = rows(compute_device, count, count)
            assert_same(step(model, x), step(plain, x))
        longest_bytes = 6 * disk_pages(max(lengths) * SAVED_BYTES // ROWS)
        assert handle.stats().spill_bytes > 10 * longest_bytes
        assert os.stat(spill_file(tmp_path)).st_size <= 1.25 * longest_bytes


def test_a_fault_of_the_disk_is_raised(compute_device: torch.device, tmp_path: Path, monkeypatch: Any) -> None:
    def broken(self: DirectFile, *_: Any) -> None:
        raise headrace.DiskError(5, "the drive is gone")

    model = Stack(12).to(compute_device)
    expected = step(model, rows(compute_device))
    settings: dict[str, Any] = {"min_bytes": 0, "device_memory": 0, "tier": "disk", "host_memory": HOST_BYTES}
    with headrace.offload_activations(model, **settings, disk=tmp_path / "broken"):
        with monkeypatch.context() as patch:
            patch.setattr(DirectFile, "read", broken)
            with pytest.raises(headrace.DiskError, match="the drive is gone"):
                step(model, rows(compute_device))
        assert_same(step(model, rows(compute_device)), expected)


def test_after_a_full_disk_all_is_as_before(compute_device: torch.device, tmp_path: Path, monkeypatch: Any) -> None:
    """Each step on a full disk raises; the first one after it is right, and nothing is held for those that failed."""

    def full(self: DirectFile, *_: Any) -> None:
        raise headrace.DiskError(errno.ENOSPC, "no space is left")

    model = Stack(12).to(compute_device)
    expected = step(model, rows(compute_device))
    settings: dict[str, Any] = {"min_bytes": 0, "device_memory": 0, "tier": "disk", "host_memory": HOST_BYTES}
    with headrace.offload_activations(model, **settings, disk=tmp_path) as handle:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(DirectFile, "write", full)
                for _ in range(2):
                    with pytest.raises(headrace.DiskError, match="no space is left"):
                        step(model, rows(compute_device))
            for _ in range(2):
                assert_same(step(model, rows(compute_device)), expected)
            assert handle.stats().host_held_bytes == 0
        assert handle.stats().spill_bytes > 0
        handle.reset_stats()  # peaks begin with what is held now
        assert handle.stats().device_peak_bytes == 0


def test_what_the_disk_did_not_take_is_used_from_the_host(
    compute_device: torch.device, tmp_path: Path, monkeypatch: Any
) -> None:
    may_write = threading.Event()

    def full(self: DirectFile, *_: Any) -> None:
        may_write.wait()
        raise headrace.DiskError(errno.ENOSPC, "no space is left")

    model, x = Stack(2).to(compute_device), rows(compute_device)
    expected = step(model, x)
    model.zero_grad()
    stores, stashes = instances(monkeypatch, DiskStore), instances(monkeypatch, Stash)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True, tier="disk", disk=tmp_path) as handle:
        monkeypatch.setattr(DirectFile, "write", full)
        try:
            loss = model(x).square().sum()
        finally:
            may_write.set()
        with pytest.raises(headrace.DiskError, match="no space is left"):
            stores[0].synchronize()
        stashes[0].between_moves(lambda: None)  # what a destructor raises is lost, so it does not hear of it
        with pytest.raises(headrace.DiskError, match="no space is left"):
            handle.stats()
        monkeypatch.undo()
        loss.backward()
        assert_same(results(model, loss), expected)


class DropsOne(nn.Module):
    """One value that is saved is dropped within the forward, between two that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        assert y.exp().mean().item() > 0
        return torch.tanh(y)


def test_what_nobody_needs_is_not_asked_of_the_disk(
    compute_device: torch.device, tmp_path: Path, monkeypatch: Any
) -> None:
    """Its write is under way still when backward begins, so that it is known of."""
    model = DropsOne().to(compute_device)
    expected = step(model, rows(compute_device))
    may_write = threading.Event()
    write = DirectFile.write

    def late(self: DirectFile, *args: Any) -> None:
        may_write.wait()
        write(self, *args)

    monkeypatch.setattr(DirectFile, "write", late)
    with headrace.offload_activations(model, min_bytes=0, all_leave=True, tier="disk", disk=tmp_path) as handle:
        try:
            assert_same(step(model, rows(compute_device)), expected)
        finally:
            may_write.set()
        for _ in range(2):
            assert_same(step(model, rows(compute_device)), expected)
        assert handle.stats().spill_bytes > 0
        assert handle.stats().host_held_bytes == 0


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    model = Stack(2)
    for settings, text in (
        ({"tier": "disk"}, "give a directory"),
        ({"disk": tmp_path}, 'tier="disk"'),
        ({"tier": "tape"}, "neither"),
    ):
        with pytest.raises(ValueError, match=text):
            headrace.offload_activations(model, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need a directory"):
        headrace.offload(model, device="cpu", activations={"tier": "disk"})
    assert type(model) is Stack


def test_one_item_must_fit_into_host_memory(compute_device: torch.device, tmp_path: Path) -> None:
    model = Stack().to(compute_device)
    with (
        headrace.offload_activations(model, min_bytes=0, tier="disk", disk=tmp_path, host_memory="16KiB"),
        pytest.raises(headrace.BudgetError, match="activations need"),
    ):
        step(model, rows(compute_device))


def test_weights_and_activations_share_a_directory(compute_device: torch.device, tmp_path: Path) -> None:
    expected = step(Stack(12).to(compute_device), rows(compute_device))
    model = Stack(12)
    with headrace.offload(
        model,
        device=compute_device,
        device_memory=weight_bytes(model) // 3,
        host_memory="768KiB",
        disk=tmp_path,
        activations={"min_bytes": 0, "device_memory": 0, "tier": "disk", "host_memory": "128KiB"},
    ) as handle:
        for _ in range(4):
            assert_same(step(model, rows(compute_device)), expected)
        assert handle.activations is not None
        assert handle.activations.stats().spill_bytes > 0
        assert handle.stats().fetch_bytes > 0
        assert handle.stats().host_peak_bytes <= 768 << 10
