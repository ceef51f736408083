"""What does a checkpoint that is damaged, or a drive that fails, do? An error that names file and tensor, no more."""

import errno
import itertools
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.cli.main import main
from tests.checkpoint.faults import EVERY, Flushed, Nth, Watched, at_each_call, fails
from tests.checkpoint.runs import Net, Run, run
from tests.support.compare import assert_same


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Run, Path]]:
    """A run, and its checkpoint."""
    with run("host", tmp_path) as one:
        one.step(2)
        headrace.save(tmp_path / "step-2", one.model, one.optimizer, extra={"note": list(range(100))})
        yield one, tmp_path / "step-2"


FILES = ["model.safetensors", "optimizer.pt", "extra.pt", "headrace.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_anywhere_is_told(saved: tuple[Run, Path], name: str) -> None:
    one, path = saved
    wanted = one.values()
    one.step()
    sound = (path / name).read_bytes()
    chance = random.Random(name)
    for place in [0, len(sound) - 1, *(chance.randrange(len(sound)) for _ in range(40))]:
        data = bytearray(sound)
        data[place] ^= 1 << chance.randrange(8)
        (path / name).write_bytes(data)
        with pytest.raises(headrace.CheckpointError, match=name.replace(".", r"\.")):
            headrace.load(path, one.model, one.optimizer)
    (path / name).write_bytes(sound)
    headrace.load(path, one.model, one.optimizer)
    assert_same(one.values(), wanted)


def test_a_flipped_byte_of_a_tensor_is_told_with_its_name(saved: tuple[Run, Path]) -> None:
    one, path = saved
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(headrace.CheckpointError, match=r"model\.safetensors: bytes .*'[a-z_.0-9]+'.*checksum"):
        headrace.load(path, one.model, one.optimizer)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "missing", "longer"])
def test_a_file_that_is_not_whole_is_told_before_anything_changes(
    saved: tuple[Run, Path], name: str, damage: str
) -> None:
    one, path = saved
    one.step()
    wanted = one.values()
    if damage == "missing":
        (path / name).unlink()
    else:
        with (path / name).open("r+b") as file:
            file.truncate((path / name).stat().st_size + (1 if damage == "longer" else -1))
    with pytest.raises(headrace.CheckpointError, match=name.replace(".", r"\.")):
        headrace.load(path, one.model, one.optimizer)
    assert_same(one.values(), wanted)


class _Fault:
    """A system call that fails from its n-th on."""

    def __init__(self, call: Any, number: int, after: int) -> None:
        self.call, self.number, self.left = call, number, after

    def __call__(self, *arguments: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.number, os.strerror(self.number))
        return self.call(*arguments)


@pytest.mark.core(number=errno.ENOSPC)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(("call", "after"), [("posix_fallocate", 1), ("pwritev", 0), ("pwritev", 2), ("fsync", 1)])
@pytest.mark.parametrize("wait", [True, False])
def test_a_drive_that_fails_leaves_the_checkpoint_of_before(
    saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch, number: int, call: str, after: int, wait: bool
) -> None:
    one, path = saved
    wanted = one.values()
    one.step()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _Fault(getattr(os, call), number, after))
        with pytest.raises(headrace.DiskError) as raised:
            headrace.save(path, one.model, one.optimizer, wait=wait).wait()
        assert raised.value.errno == number
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["step-2"]
    one.step()  # nobody waits for what failed
    headrace.load(path, one.model, one.optimizer)
    assert_same(one.values(), wanted)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_model_that_was_loaded_in_part_is_used_by_nobody(tmp_path: Path, place: str) -> None:
    state = tmp_path / "step-0" / "optimizer.pt"
    with run(place, tmp_path) as one:
        one.step()
        headrace.save(tmp_path / "step-0", one.model, one.optimizer)
        begun = one.values()
        one.step()
        sound = state.read_bytes()
        middle = len(sound) // 2
        state.write_bytes(sound[:middle] + bytes([sound[middle] ^ 1]) + sound[middle + 1 :])
        with pytest.raises(headrace.CheckpointError, match="checksum"):
            headrace.load(tmp_path / "step-0", one.model, one.optimizer)
        state.write_bytes(sound)
        for use in (
            one.step,
            lambda: one.model.layers[0](torch.ones(1, 64)),
            lambda: headrace.save(tmp_path / "step-0", one.model),
        ):
            with pytest.raises(headrace.StateError, match=r"step-0 failed midway.*headrace\.load"):
                use()
        headrace.load(tmp_path / "step-0", one.model, one.optimizer)
        assert_same(one.values(), begun)
        one.step()


def test_an_older_checkpoint_that_cannot_be_looked_at_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is whole by then, so its save has not failed."""
    model, stat = torch.nn.Linear(2, 2), os.stat
    headrace.save(tmp_path / "step-1", model)

    def fails_there(path: Any, **how: Any) -> os.stat_result:
        if str(path) == str(tmp_path / "step-1" / "headrace.json"):
            fails()
        return stat(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fails_there)
        with pytest.warns(RuntimeWarning, match="older checkpoints beside .* stay"):
            headrace.save(tmp_path / "step-2", model, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_save_that_fails_last_of_all_changes_nothing(tmp_path: Path, exchanges: bool) -> None:
    """The directory beside it is flushed when the two have changed places already."""
    watched, flushes = Watched(tmp_path / "one"), Nth(10**6, fails, of="fsync")
    with at_each_call(flushes, exchanges=exchanges):
        headrace.save(watched.path, watched.model)
    watched, last = Watched(tmp_path / "other"), Nth(len(flushes.calls) - 1, fails, of="fsync")
    with at_each_call(last, exchanges=exchanges), pytest.raises(headrace.DiskError, match="Input/output"):
        headrace.save(watched.path, watched.model)
    assert last.happened
    assert [path.name for path in watched.path.parent.iterdir()] == ["step-2"]
    assert watched.holds(watched.directory) == 0


@pytest.mark.extended
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.filterwarnings("ignore:(the )?older checkpoint", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_whichever_call_fails_there_is_what_was_there_or_what_is_saved(
    tmp_path: Path, exchanges: bool, on: bool
) -> None:
    for number in itertools.count(step=EVERY):
        watched = Watched(tmp_path / str(number))
        calls, failed = Nth(number, fails, on=on), False
        with at_each_call(calls, exchanges=exchanges):
            try:
                headrace.save(watched.path, watched.model, keep=1)
            except Exception:
                failed = True
        if not on:
            assert watched.holds(watched.directory) == (not failed), calls.calls[number : number + 1]
        watched.holds(watched.directory)
        headrace.save(watched.path, watched.model)
        assert watched.holds(watched.directory) == 1
        assert [path.name for path in watched.path.parent.iterdir()] == ["step-2"]
        if not calls.happened:
            break
    assert number > 50


@pytest.mark.extended
@pytest.mark.parametrize("exchanges", [True, False])
def test_whenever_the_power_is_lost_there_is_what_was_there_or_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    watched, flushed = Watched(tmp_path / "now"), Flushed(tmp_path / "now")
    left: list[Path] = []

    def power_is_lost(_: str) -> None:
        for removed in (frozenset[int](), flushed.gone()):
            left.append(tmp_path / str(len(left)))
            flushed.restore(left[-1], removed=removed)

    monkeypatch.setattr(os, "fsync", flushed.fsync)
    with at_each_call(power_is_lost, exchanges=exchanges):
        headrace.save(watched.path, watched.model)
    flushed.close()
    held = [watched.holds(directory) for directory in left]
    assert held == sorted(held)
    assert set(held) == {0, 1}


def test_what_cannot_be_written_to_is_told(saved: tuple[Run, Path], tmp_path: Path) -> None:
    one, _ = saved
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(headrace.DiskError, match="cannot be made"):
        headrace.save(tmp_path / "file" / "step-1", one.model)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(headrace.DiskError, match="is no checkpoint of headrace, so it is not replaced"):
        headrace.save(tmp_path / "mine", one.model)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_bad_input_is_told(saved: tuple[Run, Path], tmp_path: Path) -> None:
    one, _ = saved
    with pytest.raises(headrace.CheckpointError, match="extra holds what cannot be read back safely"):
        headrace.save(tmp_path / "x", one.model, extra={"function": Net})
    with pytest.raises(ValueError, match="keep=2 wants a name that ends in a number"):
        headrace.save(tmp_path / "last", one.model, keep=2)
    with pytest.raises(ValueError, match="keep=0; give at least 1"):
        headrace.save(tmp_path / "step-3", one.model, keep=0)
    with pytest.raises(TypeError, match="optimizer is a dict"):
        headrace.save(tmp_path / "step-3", one.model, {"lr": 1})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a NoneType; give"):
        headrace.load(tmp_path / "step-2", None, one.optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a NoneType; give"):
        headrace.save(tmp_path / "step-3", None, one.optimizer)  # type: ignore[arg-type]
    with pytest.raises(headrace.CheckpointError, match="nowhere"):
        headrace.load(tmp_path / "nowhere", one.model)
    with torch.device("meta"):
        absent = Net(torch.float32)
    with pytest.raises(headrace.CheckpointError, match=r"'.*' cannot be saved: it is on meta"):
        headrace.save(tmp_path / "step-3", absent)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-2"]


def test_another_model_is_refused_before_anything_changes(saved: tuple[Run, Path]) -> None:
    _, path = saved
    for model, what in (
        (torch.nn.Linear(3, 3), "which the model does not have"),
        (_wider(), "has the shape"),
        (_deeper(), r"lacks 'layers\.4"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(headrace.CheckpointError, match=what):
            headrace.load(path, model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    one = Net(torch.float32)
    with pytest.raises(headrace.CheckpointError, match="parameters in its groups"):
        headrace.load(path, one, torch.optim.AdamW([one.table.weight]))


@pytest.mark.parametrize("package", [torch.optim, headrace.optim])
@pytest.mark.parametrize("name", ["SGD", "Adafactor"])
def test_the_state_of_another_kind_of_optimizer_is_refused(saved: tuple[Run, Path], package: Any, name: str) -> None:
    _, path = saved
    model = Net(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = getattr(package, name)(model.parameters(), lr=0.5)
    with pytest.raises(headrace.CheckpointError, match=f"which {name} has: another kind of optimizer was saved"):
        headrace.load(path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state


class _GrownSGD(torch.optim.SGD):
    """It has an option that it had not when it was saved."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.setdefault("extra", 0.5)
        for group in self.param_groups:
            group.setdefault("extra", 0.5)


def test_an_optimizer_that_gives_an_option_its_default_is_loaded(tmp_path: Path) -> None:
    model = Net(torch.float32)
    headrace.save(tmp_path / "old", model, torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer = _GrownSGD(model.parameters(), lr=0.1)
    optimizer.defaults["extra"] = optimizer.param_groups[0]["extra"] = 0.25
    headrace.load(tmp_path / "old", model, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["extra"]) == (0.5, 0.5)


def _wider() -> Net:
    model = Net(torch.float32)
    model.layers[2] = torch.nn.Linear(65, 64)
    return model


def _deeper() -> Net:
    model = Net(torch.float32)
    model.layers.append(torch.nn.Linear(64, 64))
    return model


@pytest.mark.parametrize("name", FILES)
def test_the_doctor_reads_all_of_it(saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str], name: str) -> None:
    _, path = saved
    assert main(["doctor", "--checkpoint", str(path)]) == 0
    assert "is whole: 3 files" in capsys.readouterr().out
    shutil.copytree(path, path.parent / "step-11")
    shutil.copytree(path, path.parent / "step-9")
    assert main(["doctor", "--checkpoint", str(path.parent)]) == 0
    assert f"{path.parent / 'step-11'} is whole" in capsys.readouterr().out
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 4
    (path / name).write_bytes(data)
    assert main(["doctor", "--checkpoint", str(path)]) == 2
    assert name in capsys.readouterr().err


def test_it_says_what_has_become_of_it(saved: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    one, path = saved
    written = headrace.save(path, one.model)
    assert repr(written).startswith(f"<{path}: ")
    assert repr(written).endswith(f", written in {written.seconds:.1f} s>")
    monkeypatch.setattr(os, "pwritev", _Fault(os.pwritev, errno.ENOSPC, 0))
    failed = headrace.save(path, one.model, wait=False)
    failed.ended()
    assert "failed: " in repr(failed)
    assert os.strerror(errno.ENOSPC) in repr(failed)
    with pytest.raises(headrace.DiskError):
        failed.wait()
