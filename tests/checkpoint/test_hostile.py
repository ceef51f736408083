"""What can a checkpoint of somebody who means harm do? Fail: nothing in it runs, and no byte from elsewhere is read."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint import FileSystemWriter

import headrace
from headrace.checkpoint.manifest import MANIFEST
from headrace.memory.disk.directory import StoreDirectory
from headrace.memory.disk.saved_file import GRAIN_BYTES, SavedFile
from headrace.memory.disk.torch_files import open_torch_file
from headrace.runtime.system import host_name
from tests.checkpoint.runs import Net, Run, run
from tests.support.compare import assert_same

WRITTEN = "it ran"


class Bomb:
    """Unpickled without care it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.write_text, (self.file, WRITTEN)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Is there when something ran."""
    file = tmp_path / "trace"
    pickle.loads(pickle.dumps(Bomb(file)))  # the bomb works
    assert file.read_text() == WRITTEN
    file.unlink()
    return file


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Run, Path]]:
    """A run, and its checkpoint."""
    with run("host", tmp_path) as one:
        one.step(2)
        headrace.save(tmp_path / "saved" / "step-2", one.model, one.optimizer)
        yield one, tmp_path / "saved" / "step-2"


def rewrite(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The manifest, changed, with all checksums and sizes as they ought to be: they are no secret."""
    content = json.loads((directory / MANIFEST).read_bytes())
    del content["checksum"]
    for name in content["files"]:
        data = (directory / name).read_bytes()
        pieces = [data[begin : begin + GRAIN_BYTES] for begin in range(0, len(data), GRAIN_BYTES)]
        sums = [xxhash.xxh3_64_hexdigest(piece) for piece in pieces]
        content["files"][name] = {"nbytes": len(data), "xxh3_64": sums}
    change(content)
    content["checksum"] = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    (directory / MANIFEST).write_text(json.dumps(content))


def refused(one: Run, path: Path, match: str, *, weights_may_be_loaded: bool = False) -> None:
    """Loading fails as it ought to, and changes nothing."""
    one.step()
    before = one.values()
    with pytest.raises(headrace.CheckpointError, match=match):
        headrace.load(path, one.model, one.optimizer)
    if not weights_may_be_loaded:
        assert_same(one.values(), before)


def test_a_manifest_that_was_not_changed_loads(saved: tuple[Run, Path]) -> None:
    """So what the tests below change is what is refused."""
    one, path = saved
    wanted = one.values()
    one.step()
    rewrite(path, lambda content: None)
    headrace.load(path, one.model, one.optimizer)
    assert_same(one.values(), wanted)


@pytest.mark.parametrize("name", ["extra.pt", "optimizer.pt"])
def test_pickles_that_run_code_are_refused(saved: tuple[Run, Path], trace: Path, name: str) -> None:
    one, path = saved
    torch.save({"module_state": {}, "random": None, "extra": Bomb(trace)}, path / name)
    rewrite(path, lambda content: None)
    refused(one, path, rf"{name} cannot be read safely")
    assert not trace.exists()


@pytest.mark.parametrize(
    "name", ["model.ckpt", "pytorch_model.bin", "optimizer.pt", "scheduler.pt", "adapter_model.bin"]
)
def test_files_of_other_programs_that_run_code_are_refused(tmp_path: Path, trace: Path, name: str) -> None:
    with run("host", tmp_path / "disk") as one:
        place = tmp_path / "theirs"
        place.mkdir()
        if not name.startswith("adapter"):  # which are looked for where there is nothing else
            torch.save(one.model.state_dict(), place / "pytorch_model.bin")
        torch.save({"state_dict": {"weight": Bomb(trace)}}, place / name)
        refused(one, place / name if name.endswith("ckpt") else place, "cannot be read safely")
    assert not trace.exists()


def test_an_index_of_pickled_shards_runs_nothing_and_stays_inside(tmp_path: Path, trace: Path) -> None:
    place = tmp_path / "theirs"
    place.mkdir()
    torch.save({"weight": Bomb(trace)}, place / "shard.bin")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "elsewhere.bin")
    index = place / "pytorch_model.bin.index.json"
    for name, match in (("shard.bin", "cannot be read safely"), ("../elsewhere.bin", "leads out of it")):
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(headrace.CheckpointError, match=match):
            headrace.load(place, Net(torch.float32))
    os.mkfifo(place / "pipe.bin")  # who opens it for reading waits for ever
    index.write_text(json.dumps({"weight_map": {"weight": "pipe.bin"}}))
    with pytest.raises(headrace.CheckpointError, match=r"lacks 'pipe\.bin'"):
        headrace.load(place, Net(torch.float32))
    assert not trace.exists()


@pytest.fixture
def distributed(tmp_path: Path) -> Iterator[tuple[Run, Path]]:
    """A run, and its checkpoint by torch.distributed.checkpoint."""
    with run("host", tmp_path / "disk") as one:
        one.step(2)
        state = {"model": one.model.state_dict(), "optim": one.optimizer.state_dict()}
        writer = FileSystemWriter(tmp_path / "dcp", thread_count=2)
        dcp.save(state, storage_writer=writer, no_dist=True)
        yield one, tmp_path / "dcp"


@pytest.mark.filterwarnings("ignore")
def test_metadata_of_a_distributed_checkpoint_only_describes(distributed: tuple[Run, Path], trace: Path) -> None:
    one, path = distributed
    file = path / ".metadata"
    sound = file.read_bytes()
    metadata = pickle.loads(sound)
    metadata.planner_data = Bomb(trace)
    for content in (
        pickle.dumps(Bomb(trace)),
        pickle.dumps(metadata),
        b"cos\nsystem\n(S'true'\ntR.",
        b"",
        pickle.dumps(3),
    ):
        file.write_bytes(content)
        refused(one, path, r"\.metadata (cannot be read safely|is no description)")
    assert not trace.exists()
    metadata = pickle.loads(sound)
    next(iter(metadata.storage_data.values())).relative_path = "../elsewhere"
    file.write_bytes(pickle.dumps(metadata))
    refused(one, path, "leads out of the checkpoint")
    metadata = pickle.loads(sound)
    key = next(name for name, one in metadata.state_dict_metadata.items() if name.endswith("exp_avg"))
    metadata.state_dict_metadata[key].size = torch.Size([2**40])
    file.write_bytes(pickle.dumps(metadata))
    refused(one, path, f"{key!r} is of {2**42} bytes, it says")


@pytest.mark.filterwarnings("ignore")
def test_values_of_a_distributed_checkpoint_are_plain(tmp_path: Path, trace: Path) -> None:
    with run("host", tmp_path / "disk") as one:
        one.step()
        state = {"model": one.model.state_dict(), "optim": one.optimizer.state_dict()}
        state["optim"]["param_groups"][0]["betas"] = Bomb(trace)
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "dcp", thread_count=2), no_dist=True)
        refused(one, tmp_path / "dcp", "could not be read", weights_may_be_loaded=True)
    assert not trace.exists()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "file above": (lambda c: c["files"].update({"../x": {"nbytes": 0, "xxh3_64": []}}), "leads out of the checkpoint"),
    "absolute file": (lambda c: c["files"].update({"/etc/passwd": {"nbytes": 0, "xxh3_64": []}}), "leads out"),
    "optimizer above": (lambda c: c.update(optimizers=["../../x.pt"]), "does not describe a checkpoint"),
    "weights above": (lambda c: c["weights"].update(a=["../x", "a"]), "does not describe a checkpoint"),
    "shared is a list": (lambda c: c.update(shared=[1]), "does not describe a checkpoint"),
    "shared with nothing": (lambda c: c.update(shared={"a": 1}), "does not describe a checkpoint"),
    "huge file": (lambda c: c["files"]["extra.pt"].update(nbytes=2**62), "checksums for the"),
    "half a byte": (lambda c: c["files"]["extra.pt"].update(nbytes=0.5), "does not describe a checkpoint"),
    "negative": (lambda c: c["files"]["extra.pt"].update(nbytes=-1), "does not describe a checkpoint"),
    "no files": (lambda c: c.update(files={}), "does not describe a checkpoint"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_manifests_that_lie_are_refused(saved: tuple[Run, Path], name: str) -> None:
    one, path = saved
    change, match = CHANGES[name]
    rewrite(path, change)
    refused(one, path, match)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "extra.pt"])
def test_links_that_lead_out_are_refused(saved: tuple[Run, Path], name: str, tmp_path: Path) -> None:
    one, path = saved
    (path / name).rename(tmp_path / "elsewhere")
    (path / name).symlink_to(tmp_path / "elsewhere")
    refused(one, path, "leads out of the checkpoint")


@pytest.mark.parametrize("name", ["headrace.json", "extra.pt"])
def test_what_is_no_file_is_not_opened(saved: tuple[Run, Path], name: str) -> None:
    """Who opens a pipe for reading waits for ever."""
    one, path = saved
    rewrite(path, lambda content: content["files"]["extra.pt"].update(nbytes=0, xxh3_64=[]))
    (path / name).unlink()
    os.mkfifo(path / name)
    refused(one, path, "is no file")


def test_a_manifest_without_end_is_not_read(saved: tuple[Run, Path]) -> None:
    one, path = saved
    os.truncate(path / MANIFEST, 2**40)  # a hole: it takes no room on the drive
    refused(one, path, "has more than")


def test_compressed_records_are_not_unpacked(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(4)}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as sound, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for record in sound.namelist():
            bomb.writestr(record, sound.read(record), compress_type=zipfile.ZIP_DEFLATED)
    with pytest.raises(headrace.CheckpointError, match="is compressed"):
        open_torch_file(SavedFile(tmp_path / "bomb.pt"))


def test_trees_without_end_are_refused(tmp_path: Path) -> None:
    tree: list[Any] = []
    tree.append(tree)
    torch.save({"weight": torch.zeros(4), "tree": tree}, tmp_path / "endless.pt")
    with pytest.raises(headrace.CheckpointError, match="recursion"):
        open_torch_file(SavedFile(tmp_path / "endless.pt"))


def state_of(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    """Changes the optimizer's state in a checkpoint."""
    tree = torch.load(path / "optimizer.pt", weights_only=True)
    change(tree)
    torch.save(tree, path / "optimizer.pt")
    rewrite(path, lambda content: None)


STATES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no groups": (lambda tree: tree.pop("param_groups"), "no state_dict of an optimizer"),
    "groups of nothing": (lambda tree: tree.update(param_groups=[1]), "no state_dict of an optimizer"),
    "state of nothing": (lambda tree: tree.update(state=[]), "no state_dict of an optimizer"),
    "another shape": (lambda tree: tree["state"][0].update(exp_avg=torch.zeros(3)), "has the shape"),
    "more than its bytes": (
        lambda tree: tree["state"][0].update(other=torch.zeros(1).expand(2**40)),
        f"is of {2**42} bytes, and .* has 4 of it",
    ),
    "8 bits of another shape": (
        lambda tree: tree["state"][0].update(exp_avg_8bit=torch.zeros(1, 132, dtype=torch.uint8)),
        "has the shape",
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states_that_lie_are_refused(saved: tuple[Run, Path], name: str) -> None:
    one, path = saved
    change, match = STATES[name]
    state_of(change, path)
    refused(one, path, match)


def test_random_states_that_would_read_foreign_memory_are_refused(saved: tuple[Run, Path]) -> None:
    one, path = saved
    rest = torch.load(path / "extra.pt", weights_only=True)
    rest["random"]["numpy"][2] = 10**6
    torch.save(rest, path / "extra.pt")
    rewrite(path, lambda content: None)
    before = np.random.get_state(legacy=True)[2]
    refused(one, path, "outside of its 624 numbers", weights_may_be_loaded=True)
    assert np.random.get_state(legacy=True)[2] == before


def test_directories_that_saves_and_spills_find_are_left_alone(tmp_path: Path) -> None:
    """Links with the names of temporary files do not lead a save, or a spill, to delete or write elsewhere."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    place = tmp_path / "runs"
    place.mkdir()
    for name in (f".headrace-saving-x@{host_name()}", ".headrace-before-x"):
        (place / name).symlink_to(precious)
    model = Net(torch.float32)
    headrace.save(place / "step-1", model)
    assert headrace.checkpoint.newest(place) == place / "step-1"
    disk = tmp_path / "disk"
    (disk / ".headrace-file-directory").mkdir(parents=True)
    (disk / ".headrace-file-link").symlink_to(precious / "file")
    StoreDirectory(disk).close()
    os.link(precious / "file", disk / ".headrace-lock")
    with pytest.raises(headrace.DiskError, match="is no file of headrace"):
        StoreDirectory(disk)
    assert (precious / "file").read_text() == "mine"
