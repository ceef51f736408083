"""What becomes of a step whose drive fails, or whose process is killed, in the middle of it?"""

import contextlib
import copy
import errno
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
import headrace.optim
from headrace.errors import DiskError, StateError
from headrace.memory.disk import DirectFile, Mapping
from headrace.optim import AdamW, disk_state, states
from tests.disk.test_faults import spill_file
from tests.optim.references import copies, give_gradients, parameters
from tests.optim.test_disk import opened
from tests.support.compare import assert_same
from tests.support.models import linears
from tests.support.nursery import Nursery

SHAPES = ((64, 64), (130, 70), (64, 64), (37, 13), (96, 64))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "STAGED_ELEMENTS", 1 << 12)
    monkeypatch.setattr(disk_state, "SLOTS", 3)
    monkeypatch.setattr(states, "LEAST_BYTES", 1)


def fail_after(monkeypatch: pytest.MonkeyPatch, kind: str, pieces: int, number: int) -> None:
    """The drive takes or gives so many pieces, and then none."""
    working = getattr(DirectFile, kind)
    left = [pieces]

    def faulty(self: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise DiskError(number, f"{what}: {os.strerror(number)}")
        working(self, address, nbytes, offset, what)

    monkeypatch.setattr(DirectFile, kind, faulty)


def test_a_second_ctrl_c_leaves_all_memory_to_later_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the first one's step gives back what it has taken."""
    ours, theirs = parameters(torch.float32, SHAPES), parameters(torch.float32, SHAPES)
    optimizer, reference = AdamW(ours, tier="disk", disk=tmp_path), AdamW(theirs)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for step in range(2):
        give_gradients(ours, theirs, step)
        with monkeypatch.context() as patch:
            patch.setattr(disk_state._All, "synchronize", interrupted)
            patch.setattr(disk_state.StagingRing, "release", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_ctrl_c_as_memory_is_taken_leaves_all_of_it_to_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as there are slots, it comes when one is taken and not noted yet. The step after that would wait."""
    ours, theirs = parameters(torch.float32, SHAPES), parameters(torch.float32, SHAPES)
    optimizer, reference = AdamW(ours, tier="disk", disk=tmp_path), AdamW(theirs)
    acquire = disk_state.StagingRing.acquire

    def interrupted(ring: disk_state.StagingRing) -> None:
        acquire(ring)
        raise KeyboardInterrupt

    for step in range(disk_state.SLOTS):
        give_gradients(ours, theirs, step)
        with monkeypatch.context() as patch:
            patch.setattr(disk_state.StagingRing, "acquire", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@pytest.mark.core(name="AdamW")
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Adafactor", "Muon"])
@pytest.mark.parametrize(("kind", "number"), [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)])
@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_no_step_goes_on_from_a_broken_one(
    name: str, kind: str, number: int, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has changed, or an error says so until weights and state are loaded; then all is as it would be."""
    ours, theirs = parameters(torch.bfloat16, SHAPES), parameters(torch.bfloat16, SHAPES)
    stores, _ = opened(monkeypatch)
    optimizer = getattr(headrace.optim, name)(ours, tier="disk", disk=tmp_path)
    reference = getattr(headrace.optim, name)(theirs)
    for step in range(2):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
    saved, weights = copy.deepcopy(reference.state_dict()), copies(theirs)
    stores[0].synchronize()
    give_gradients(ours, theirs, 2)
    with monkeypatch.context() as patch:
        fail_after(patch, kind, pieces, number)
        # A failed write behind may only be seen when its bytes are wanted again.
        failures = [attempt(optimizer) for _ in range(3)]
    assert failures[-1] is not None
    changed = not all(torch.equal(one, other) for one, other in zip(ours, weights, strict=True))
    if isinstance(failures[0], DiskError):
        assert not changed
        optimizer.step()  # the drive is back
    else:
        assert changed
        told = attempt(optimizer)
        assert told is not None
        if isinstance(failures[0], StateError):
            assert "of 5 parameters" in str(told)
            assert "load the weights and the optimizer's state" in str(told)
        restore(optimizer, ours, weights, saved)
        optimizer.step()
    reference.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_shown_state_that_a_drive_did_not_take_back(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has changed; the next step brings it there, or says that pages of it were lost meanwhile."""
    ours, theirs = parameters(torch.bfloat16, SHAPES), parameters(torch.bfloat16, SHAPES)
    optimizer = getattr(headrace.optim, name)(ours, tier="disk", disk=tmp_path)
    reference = getattr(headrace.optim, name)(theirs)
    for step in range(4):
        give_gradients(ours, theirs, step)
        if step in (1, 2):
            weights = copies(ours)
            for one in (optimizer, reference):
                state = one.state[one.param_groups[0]["params"][0]].values()
                next(value for value in state if value.is_floating_point() and value.dim()).mul_(0.5)
            with monkeypatch.context() as patch:
                patch.setattr(Mapping, "flush", refuse)
                for _ in range(2):
                    with pytest.raises(DiskError, match="did not reach the disk"):
                        optimizer.step()
            assert_same(ours, weights)
        optimizer.step()
        reference.step()
        assert_same(ours, theirs)
    shown = optimizer.state[ours[0]]
    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "flush", refuse)
        with pytest.raises(DiskError, match="did not reach the disk"):
            optimizer.step()
    for value in (value for value in shown.values() if value.dim()):
        value.view(-1).view(torch.uint8)[0] ^= 1  # as if the kernel had dropped its pages
    weights = copies(ours)
    with pytest.raises(DiskError, match="are not those that were written"):
        optimizer.step()
    assert_same(ours, weights)


def refuse(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def restore(optimizer: Any, weights: list[nn.Parameter], saved_weights: list[torch.Tensor], saved: Any) -> None:
    """Weights and state are as they were saved."""
    with torch.no_grad():
        for one, other in zip(weights, saved_weights, strict=True):
            one.copy_(other)
    optimizer.load_state_dict(saved)


def attempt(optimizer: Any) -> Exception | None:
    try:
        optimizer.step()
    except (DiskError, StateError) as error:
        return error
    return None


@pytest.mark.core(overlap="forward")
@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "pieces"), [("read", 3), ("write", 0), ("write", 20)])
def test_updates_beside_passes(
    overlap: str, kind: str, pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits is told that the drive failed; when weights and state are loaded, all is as it would be."""
    ours, theirs = (linears(6, 64).bfloat16() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())

    def train(model: nn.Module, optimizer: AdamW, steps: range) -> None:
        for step in steps:
            inputs = torch.linspace(-1, 1 + step, 256).view(4, 64).bfloat16()
            model(inputs).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    with headrace.offload(ours, device="cpu", device_memory="30KiB", blocks=list(ours)):
        optimizer = AdamW(ours.parameters(), overlap=overlap, tier="disk", disk=tmp_path)
        reference = AdamW(theirs.parameters())
        train(ours, optimizer, range(4))
        train(theirs, reference, range(4))
        with monkeypatch.context() as patch:
            fail_after(patch, kind, pieces, errno.EIO)
            with pytest.raises((DiskError, StateError)):
                train(ours, optimizer, range(4, 10))
        with contextlib.suppress(DiskError, StateError):  # what had failed, and nobody was told of
            optimizer.synchronize()
        ours.load_state_dict(theirs.state_dict())
        optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
        optimizer.zero_grad()
        train(ours, optimizer, range(4, 8))
        train(theirs, reference, range(4, 8))
    assert_same(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("last", [False, True])
def test_a_byte_of_state_that_changed_on_disk_is_named(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on from it: at the first parameter nothing has changed, at the last the others have."""
    ours, theirs = parameters(torch.bfloat16, SHAPES), parameters(torch.bfloat16, SHAPES)
    stores, _ = opened(monkeypatch)
    optimizer, reference = AdamW(ours, tier="disk", disk=tmp_path), AdamW(theirs)
    for step in range(2):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
    saved, weights, (store,) = copy.deepcopy(reference.state_dict()), copies(theirs), stores
    store.synchronize()
    at = store.nbytes - 4091 if last else 5  # the last page is full
    with open(spill_file(tmp_path), "r+b") as file:
        byte = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
    give_gradients(ours, theirs, 2)
    failure = attempt(optimizer)
    assert failure is not None
    damage = failure if isinstance(failure, DiskError) else failure.__cause__
    assert isinstance(damage, DiskError)
    assert damage.errno == errno.EBADMSG
    where = rf"'\w+ of a parameter': (\d+) bytes at offset (\d+) of the spill file in {tmp_path}.*"
    found = re.search(where + "are not those that were written", str(damage))
    assert found is not None
    nbytes, offset = map(int, found.groups())
    assert offset <= at < offset + nbytes
    assert all(map(torch.equal, ours, weights)) != last
    assert attempt(optimizer) is not None
    restore(optimizer, ours, weights, saved)
    optimizer.step()
    reference.step()
    assert_same(ours, theirs)


KILLED = """
import sys, torch
from headrace.optim import AdamW, disk_state
disk_state.STAGED_ELEMENTS = 1 << 14
weights = [torch.nn.Parameter(torch.zeros(1 << 18)) for _ in range(4)]
optimizer = AdamW(weights, tier="disk", disk=sys.argv[1])
for weight in weights:
    weight.grad = torch.ones_like(weight)
while True:
    optimizer.step()
    print("stepped", flush=True)
"""


@pytest.mark.extended
def test_a_killed_process_leaves_nothing_that_harms_the_next(nursery: Nursery, tmp_path: Path) -> None:
    for delay in (0.0, 0.02):
        process = nursery.start(KILLED, tmp_path)
        assert process.read_line() == "stepped\n", process.errors
        time.sleep(delay)  # somewhere in a step
        process.send(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    ours, theirs = [nn.Parameter(torch.ones(1 << 15))], [nn.Parameter(torch.ones(1 << 15))]
    optimizer, reference = AdamW(ours, tier="disk", disk=tmp_path), AdamW(theirs)
    for step in range(3):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)
    left = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert left < 4096, [str(path) for path in tmp_path.rglob("*")]  # files have no names: the system frees them
