"""Does a probe measure this machine, keep the result, and find what contradicts itself?"""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import headrace
from headrace import ahead, probing
from headrace.checkpoint import directory
from headrace.cli.main import main
from headrace.runtime.probe import disk_rates, link_rates, matmul_rates, memory_rate, update_rate
from tests.cost.conftest import LLAMA_8B


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Probing moves few bytes, and keeps its result here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(probing, "link_rates", lambda device: link_rates(device, copy_bytes=2**20))
    monkeypatch.setattr(probing, "memory_rate", lambda *device: memory_rate(*device, copy_bytes=2**20))
    monkeypatch.setattr(probing, "update_rate", lambda: update_rate(parameters=2**16))
    monkeypatch.setattr(probing, "matmul_rates", lambda device: matmul_rates(device, size=64))
    monkeypatch.setattr(probing, "disk_rates", lambda directory: disk_rates(directory, file_bytes=2**24))
    return tmp_path


def test_a_probe_is_kept_and_planned_with(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--device", "cpu", "--disk", str(small)]) == 0
    assert "onload, page-locked" in capsys.readouterr().out
    hardware = ahead.cached_probe()
    assert hardware.sources == {"all": "measured by headrace probe"}
    assert headrace.plan(LLAMA_8B, hardware="measured").hardware.name == hardware.name
    assert headrace.plan(LLAMA_8B).hardware.name == hardware.name
    assert [path.name for path in small.iterdir()] == ["headrace"]  # the file that was measured with is gone


def test_who_reads_while_it_is_written_finds_the_one_of_before(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = headrace.probe("cpu", disk=small).hardware
    read = []

    def slowly(path: Path, data: bytes) -> None:
        for end in (0, len(data) // 2, len(data)):
            path.write_bytes(data[:end])
            read.append(ahead.cached_probe())

    monkeypatch.setattr(directory, "write_whole", slowly)
    second = headrace.probe("cpu", disk=small).hardware
    assert read == [first] * 3
    assert ahead.cached_probe() == second != first
    assert len(list((small / "headrace").iterdir())) == 1


@pytest.mark.extended
@pytest.mark.emu("lazy", h2d_bytes_per_second=10e9, d2h_bytes_per_second=5e9, flops_per_second=1e12)
def test_the_device_is_measured_by_its_own_clock(emu_device: ModuleType) -> None:
    """Rates of the emulated accelerator are known, so what is measured must be them."""
    device = torch.device("emu", 1)
    rates = link_rates(device, copy_bytes=64 * 2**20)
    assert rates.onload == pytest.approx(10e9, rel=0.01)
    assert rates.offload == pytest.approx(5e9, rel=0.01)
    assert rates.both_share == pytest.approx(1.0, rel=0.02)  # two engines
    products = matmul_rates(device, size=512)
    assert products["float32"] == pytest.approx(1e12, rel=0.1)


@pytest.mark.emu("lazy", flops_per_second=1e12)
def test_plans_count_with_pageable_memory_where_nothing_can_be_locked(emu_device: ModuleType, small: Path) -> None:
    stats = emu_device.stats()
    emu_device.configure(pinned_memory=stats["reserved_pinned_bytes"] + stats["registered_bytes"])
    found = headrace.probe("emu", disk=small)
    assert not found.locked
    assert "onload, not locked" in found.to_text()
    assert any("could not be page-locked" in note for note in found.notes)
    assert found.hardware.onload_bytes_per_second == pytest.approx(found.pageable_bytes_per_second, rel=0.05)
    planned = headrace.plan(LLAMA_8B, hardware="measured").hardware
    assert planned.onload_bytes_per_second == found.hardware.onload_bytes_per_second


@pytest.mark.parametrize(
    ("disk", "update", "said"),
    [(5e9, 30e9, ""), (40e9, 30e9, "tmpfs"), (5e9, 5e9, "too few threads")],
)
def test_contradictions_are_noted(
    small: Path, monkeypatch: pytest.MonkeyPatch, disk: float, update: float, said: str
) -> None:
    drive = disk_rates(small, file_bytes=2**24)
    monkeypatch.setattr(probing, "disk_rates", lambda directory: replace(drive, read=disk, notes=()))
    monkeypatch.setattr(probing, "memory_rate", lambda: 40e9)
    monkeypatch.setattr(probing, "update_rate", lambda: update)
    noted = [note for note in headrace.probe("cpu", disk=small).notes if "host memory copies" in note]
    assert len(noted) == bool(said)
    assert all(said in note for note in noted)


def test_a_directory_that_is_missing_is_an_error(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--device", "cpu", "--disk", str(small / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": "x (cpu)"}', '{"name": 3, "devices": "two"}'])
def test_a_damaged_measurement_is_told_to_plans_and_left_out_of_reports(text: str, small: Path) -> None:
    headrace.probe("cpu", disk=small)
    (path,) = (small / "headrace").iterdir()
    assert ahead.probed_rates(torch.device("cpu"))
    path.write_text(text)
    with pytest.raises(ValueError, match="run headrace probe again"):
        ahead.cached_probe()
    assert ahead.probed_rates(torch.device("cpu")) == {}
