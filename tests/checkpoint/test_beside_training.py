"""Does training go on while a checkpoint is written, and does the checkpoint hold what was there when it was begun?"""

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import headrace
from headrace.checkpoint import writing
from tests.checkpoint.runs import run
from tests.support.compare import assert_same


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The drive takes nothing before this is set."""
    goes_on = threading.Event()
    write = writing.DirectFile.write

    def waits(*arguments: Any) -> None:
        goes_on.wait()
        write(*arguments)

    monkeypatch.setattr(writing.DirectFile, "write", waits)
    return goes_on


@pytest.mark.core(overlap="forward")
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_step_changes_nothing_that_is_being_saved(tmp_path: Path, place: str, overlap: str) -> None:
    with run(place, tmp_path / "tiers", overlap=overlap) as one:
        one.step(2)
        begun = one.values()
        saving = headrace.save(tmp_path / "step-2", one.model, one.optimizer, wait=False)
        one.step(3)
        saving.wait()
        after = one.values()
        headrace.load(tmp_path / "step-2", one.model, one.optimizer)
        assert_same(one.values(), begun)
        one.step(3)
        assert_same(one.values(), after)


def test_training_does_not_wait_for_the_drive(tmp_path: Path, held_up: threading.Event) -> None:
    with run("host", tmp_path) as one:
        one.step()
        begun = one.values()
        saving = headrace.save(tmp_path / "step-1", one.model, one.optimizer, wait=False)
        one.step(2)
        assert not saving.done
        assert not (tmp_path / "step-1").exists()
        held_up.set()
        saving.wait()
        headrace.load(tmp_path / "step-1", one.model, one.optimizer)
        assert_same(one.values(), begun)
        assert one.handle is not None
        assert one.handle.stats().saved_bytes == saving.nbytes > 0
        assert "checkpoints" in one.handle.report().to_text()


def test_optimizers_of_pytorch_wait_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
        begun = [p.detach().clone() for p in model.parameters()]
        saving = headrace.save(tmp_path / f"step-{number}", model, optimizer, wait=False, host_memory="24MiB")
        optimizer.step()
        assert not torch.equal(begun[0], model[0].weight)
        saving.wait()
        again = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        headrace.load(tmp_path / f"step-{number}", again)
        assert_same([p.detach() for p in again.parameters()], begun)


def test_a_write_that_nobody_held_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, goes_on = threading.Event(), threading.Event()
    fill = writing.Piece.fill

    def waits(piece: Any, memory: torch.Tensor) -> None:
        reading.set()
        goes_on.wait()
        fill(piece, memory)

    monkeypatch.setattr(writing.Piece, "fill", waits)
    model = torch.nn.Linear(256, 256)
    saving = headrace.save(tmp_path / "step-1", model, wait=False)
    reading.wait()
    with torch.no_grad():
        model.weight.mul_(2)
    goes_on.set()
    with pytest.raises(headrace.StateError, match="'weight' was written to while it was being saved"):
        saving.wait()
    assert list(tmp_path.iterdir()) == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "other-1").mkdir()
    for number in (1, 2, 3, 10, 11):
        headrace.save(tmp_path / f"step-{number}", model, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-1", "step-10", "step-11", "step-x"]
    assert headrace.checkpoint.newest(tmp_path) == tmp_path / "step-11"


def test_a_checkpoint_may_end_within_a_step(tmp_path: Path, held_up: threading.Event) -> None:
    """Threads that write it leave the hooks alone that the step is going through."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 64)).sum().backward()
    saving = headrace.save(tmp_path / "step-1", model, optimizer, wait=False)

    def ends(*_: Any) -> None:
        held_up.set()
        saving.wait()

    optimizer.register_step_pre_hook(ends)
    hook = register_optimizer_step_pre_hook(ends)
    try:
        optimizer.step()
    finally:
        hook.remove()
    assert saving.done


def test_what_is_counted_of_a_checkpoint_outlives_it(tmp_path: Path) -> None:
    with run("host", tmp_path / "tiers") as one:
        first = headrace.save(tmp_path / "step-1", one.model)
        nbytes, gone = first.nbytes, weakref.ref(first)
        del first
        for number in (2, 3):
            headrace.save(tmp_path / f"step-{number}", one.model)
        gc.collect()
        assert gone() is None
        assert one.handle is not None
        assert one.handle.stats().saved_bytes == 3 * nbytes


@pytest.mark.extended
def test_what_it_passed_through_is_given_back(tmp_path: Path) -> None:
    """Memory, threads, descriptors: saved forty times, nothing is more than after the first."""
    with run("host", tmp_path / "tiers") as one:
        one.step()

        def held() -> tuple[int, int, int]:
            gc.collect()
            mapped = sum(m.rss for m in psutil.Process().memory_maps(grouped=False) if m.path == "[anon]")
            return mapped, threading.active_count(), len(os.listdir("/proc/self/fd"))

        for number in range(3):
            headrace.save(tmp_path / f"step-{number}", one.model, one.optimizer, wait=False, keep=1).wait()
        before = held()
        for number in range(3, 43):
            headrace.save(tmp_path / f"step-{number}", one.model, one.optimizer, wait=False, keep=1).wait()
        after = held()
        assert after[1:] == before[1:]
        assert after[0] - before[0] < 8 << 20
