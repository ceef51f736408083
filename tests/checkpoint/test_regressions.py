"""What went wrong once with checkpoints, and does so no more?"""

import errno
import os
import random
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import headrace
import headrace.optim
from headrace.checkpoint import directory, files, writing
from headrace.runtime.system import host_name
from tests.checkpoint.runs import run
from tests.support.compare import assert_same, assert_same_weights
from tests.support.models import seeded
from tests.support.nursery import Nursery


def small(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.emu("lazy", "random:0")
def test_a_device_that_is_not_the_current_one_has_computed_what_is_saved(
    emu_device: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model over several devices, one is the current one, whose work `save` waits for."""
    model = nn.Linear(128, 128, bias=False).to("emu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 128, device="emu")).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
        optimizer.step()
        headrace.save(tmp_path / "step-1", model, optimizer)
    again = nn.Linear(128, 128, bias=False)
    headrace.load(tmp_path / "step-1", again)
    assert_same(again.state_dict(), model.state_dict())


def test_a_load_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    train(model, optimizer)
    headrace.save(tmp_path / "step-1", model, optimizer)
    train(model, optimizer)
    wanted = [p.detach().clone() for p in model.parameters()]
    fill, reading = writing.Piece.fill, threading.Event()

    def slow(piece: Any, memory: torch.Tensor) -> None:
        reading.wait(0.2)
        fill(piece, memory)

    monkeypatch.setattr(writing.Piece, "fill", slow)
    headrace.save(tmp_path / "step-2", model, optimizer, wait=False)
    headrace.load(tmp_path / "step-1", model, optimizer)
    again, _ = small(1)
    headrace.load(tmp_path / "step-2", again)
    assert_same([p.detach() for p in again.parameters()], wanted)


def test_every_part_of_a_model_that_is_offloaded_for_itself_is_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    headrace.save(tmp_path / "source", source)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    handles = [headrace.offload(part, device="cpu", device_memory="1MiB") for part in model]
    inputs = torch.randn(2, 8)
    with torch.no_grad():
        model(inputs)
        headrace.load(tmp_path / "source", model)
        assert torch.equal(model(inputs), source(inputs))
    for handle in handles:
        handle.remove()


class _Pair(nn.Module):
    """Two parameters of several pages each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + (x @ self.bias).sum(0))


@pytest.mark.parametrize("visited", [False, True])
@pytest.mark.parametrize("written", [("weight",), ("bias",), ("weight", "bias"), ()])
def test_what_is_read_in_place_and_loaded_again_is_as_in_the_file(
    tmp_path: Path, written: tuple[str, ...], visited: bool
) -> None:
    """Of a block, only what was written to is loaded; the rest has to stay."""
    source = seeded(lambda: nn.Sequential(*(_Pair() for _ in range(6))))
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*(_Pair() for _ in range(6)))
    budgets: dict[str, Any] = {"device_memory": "96KiB", "host_memory": "64KiB", "disk": tmp_path / "spill"}
    inputs = torch.randn(2, 64)
    with (
        headrace.offload(model, device="cpu", checkpoint=tmp_path / "model.safetensors", **budgets) as handle,
        torch.no_grad(),
    ):
        if visited:
            model(inputs)
        for pair in model:
            for name in written:
                getattr(pair, name)[24:40].add_(1)  # whole pages in the middle, none of its neighbour
        headrace.load(tmp_path / "model.safetensors", model)
        assert_same_weights(model, source)
        assert torch.equal(model(inputs), source(inputs))
        stats = handle.stats()
        assert stats.fetch_bytes > 0
        assert (stats.spill_bytes > 0) == bool(written)


def test_a_checkpoint_outlives_the_optimizer_that_is_being_saved(tmp_path: Path) -> None:
    with run("disk", tmp_path / "tiers") as one:
        one.step()
        wanted = one.values()
        saving = headrace.save(tmp_path / "step-1", one.model, one.optimizer, wait=False)
        model, one.optimizer = one.model, None
        saving.wait()
    assert model is not None
    with run("host", tmp_path / "other", seed=1) as other:
        headrace.load(tmp_path / "step-1", other.model, other.optimizer)
        assert_same(other.values(), wanted)


def test_what_failed_beside_training_is_told_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "pwritev", fails)
        saving = headrace.save(tmp_path / "step-1", model, optimizer, wait=False)
        saving.ended()
    with pytest.raises(headrace.DiskError):
        headrace.save(tmp_path / "step-2", model, optimizer)
    headrace.save(tmp_path / "step-2", model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]


def test_torch_saves_as_ever_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    train(model, optimizer)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.torch, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            headrace.save(tmp_path / "step-1", model, optimizer)
    torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["x"], torch.ones(3))


@pytest.mark.parametrize("name", ["SGD", "LBFGS"])
def test_every_byte_of_an_optimizers_file_is_checked(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 8)).pow(2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    headrace.save(tmp_path / "step-1", model, optimizer)
    wanted = optimizer.state_dict()
    path = tmp_path / "step-1" / "optimizer.pt"
    sound = path.read_bytes()
    headrace.load(tmp_path / "step-1", model, optimizer)
    assert repr(optimizer.state_dict()) == repr(wanted)
    chance = random.Random(name)
    for place in chance.sample(range(len(sound)), 60):
        data = bytearray(sound)
        data[place] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        with pytest.raises(headrace.CheckpointError):
            headrace.load(tmp_path / "step-1", model, optimizer)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    model, optimizer = small()
    optimizer.param_groups[0]["lr"] = np.float64(0.1)
    with pytest.raises(headrace.CheckpointError, match=r"optimizer\.pt would hold what cannot be read back safely"):
        headrace.save(tmp_path / "step-1", model, optimizer)
    assert list(tmp_path.iterdir()) == []


class _WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = torch.zeros(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.scale.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.scale = state


def test_what_modules_keep_besides_may_be_a_tensor(tmp_path: Path) -> None:
    model = nn.Sequential(_WithState())
    model[0].scale = torch.tensor([7.0, 8.0])
    headrace.save(tmp_path / "one", model)
    again = nn.Sequential(_WithState())
    headrace.load(tmp_path / "one", again)
    assert torch.equal(again[0].scale, model[0].scale)
    plain = nn.Sequential(nn.Module())
    plain[0].weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(headrace.CheckpointError, match=r"which no module of the model takes \(set_extra_state\)"):
        headrace.load(tmp_path / "one", plain)


def test_a_state_dict_of_copies_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    headrace.save(tmp_path / "one", model)
    model._register_state_dict_hook(lambda _, state, *__: {name: value.clone() for name, value in state.items()})
    with pytest.raises(headrace.CheckpointError, match="none of its parameters and buffers"):
        headrace.load(tmp_path / "one", model)


class _Tied(nn.Module):
    _keys_to_ignore_on_save = ("first.weight",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(1024, 2048, bias=False) for _ in range(2))
        self.second.weight = self.first.weight


def test_a_name_that_is_left_out_leaves_out_no_other(tmp_path: Path) -> None:
    model, again = _Tied(), _Tied()
    headrace.save(tmp_path / "one", model)
    headrace.load(tmp_path / "one", again)
    assert_same_weights(model, again)


def test_of_two_tensors_for_the_same_memory_the_last_one_is_loaded(tmp_path: Path) -> None:
    """As load_state_dict does it; not pieces of both."""
    apart = nn.ModuleDict({name: nn.Linear(1024, 2048, bias=False) for name in ("first", "second")})
    headrace.save(tmp_path / "one", apart)
    tied = _Tied()
    headrace.load(tmp_path / "one", tied)
    assert torch.equal(tied.first.weight, apart["second"].weight)


@pytest.mark.parametrize("offloaded", [False, True])
def test_loaded_weights_count_as_written(tmp_path: Path, offloaded: bool) -> None:
    """Also for an optimizer that loads nothing: what it keeps of the weights before is void."""
    trained = []
    for load in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16)
        handle = headrace.offload(model, device="cpu", device_memory="64KiB") if offloaded else None
        optimizer = headrace.optim.AdamW(model.parameters(), lr=1e-3)
        headrace.save(tmp_path / "one", model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for step in range(4):
            model(torch.ones(8, 64, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                headrace.load(tmp_path / "one", model) if load else model.load_state_dict(before)
        trained.append([*model.state_dict().values(), *optimizer.state_dict()["state"][0].values()])
        trained[-1] = [value.clone() for value in trained[-1]]
        if handle is not None:
            handle.remove()
    assert_same(*trained)


def test_weights_that_a_backward_needs_are_not_loaded_without_a_word(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    headrace.save(tmp_path / "one", model)
    loss = model(torch.ones(2, 2, requires_grad=True)).sum()
    headrace.load(tmp_path / "one", model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_of_ranks_that_has_its_state_elsewhere(tmp_path: Path) -> None:
    """`state` of PyTorch's ZeRO-1 is empty: its state_dict() is what there is."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        headrace.save(tmp_path / "one", model, optimizer)
        saved = torch.load(tmp_path / "one" / "optimizer.pt")["state"]
        assert torch.equal(saved[0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    finally:
        torch.distributed.destroy_process_group()


def test_conjugated_tensors(tmp_path: Path) -> None:
    model, again = nn.Module(), nn.Module()
    values = torch.randn(64, 64, dtype=torch.complex64)
    model.register_buffer("buffer", values.conj())
    again.register_buffer("buffer", torch.zeros_like(values))
    headrace.save(tmp_path / "one", model)
    headrace.load(tmp_path / "one", again)
    assert torch.equal(again.buffer, values.conj().resolve_conj())


def test_state_that_is_not_of_parameters_and_empty_state(tmp_path: Path) -> None:
    model, optimizer = small()
    train(model, optimizer)
    optimizer.state["global"] = {"seen": 3, "nothing": torch.empty(0)}  # type: ignore[index]
    headrace.save(tmp_path / "one", model, optimizer)
    other, another = small(1)
    headrace.load(tmp_path / "one", other, another)
    assert another.state["global"]["seen"] == 3  # type: ignore[index]


def test_files_beside_those_of_a_checkpoint_stay(tmp_path: Path) -> None:
    model, optimizer = small()
    headrace.save(tmp_path / "last", model, optimizer)
    (tmp_path / "last" / "tokenizer.json").write_text("mine")
    headrace.save(tmp_path / "last", model)
    assert (tmp_path / "last" / "tokenizer.json").read_text() == "mine"
    assert not (tmp_path / "last" / "optimizer.pt").exists()
    (tmp_path / "link").symlink_to(tmp_path / "last")
    headrace.save(tmp_path / "link", model, optimizer)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "last" / "optimizer.pt").exists()


@pytest.mark.extended
def test_a_process_that_is_forked_meanwhile_ends(tmp_path: Path, nursery: Nursery) -> None:
    child = nursery.start(
        """
import multiprocessing, sys, torch, headrace
from headrace.checkpoint import writing
import threading
goes_on = threading.Event()
write = writing.DirectFile.write
writing.DirectFile.write = lambda *arguments: (goes_on.wait(), write(*arguments))
model = torch.nn.Linear(256, 256)
saving = headrace.save(sys.argv[1] + "/step-1", model, wait=False)
process = multiprocessing.get_context("fork").Process(target=print, args=("forked",))
process.start()
process.join(30)
print(process.exitcode, flush=True)
process.kill()
goes_on.set()
saving.wait()
""",
        tmp_path,
    )
    assert child.wait() == 0, child.errors
    assert child.read_rest().splitlines()[-1] == "0"


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_where_no_thread_can_be_started_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    model, optimizer = small()
    train(model, optimizer)
    start, begun, failed = threading.Thread.start, [], threading.Event()

    def fails(thread: threading.Thread) -> None:
        if thread.name.startswith("headrace-save"):
            begun.append(thread)
            if len(begun) > threads:
                failed.set()
                raise RuntimeError("can't start new thread")
            if len(begun) > 1:  # a writer: the next one is needed, as this one is busy until then
                run = thread.run
                thread.run = lambda: (failed.wait(10), run())  # type: ignore[method-assign]
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            headrace.save(tmp_path / "step-1", model, optimizer, wait=False).wait()
    train(model, optimizer)
    assert list(tmp_path.iterdir()) == []
    headrace.save(tmp_path / "step-1", model, optimizer)


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_crash_between_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int) -> None:
    """Where the filesystem cannot exchange directories, and the process ends after so many of three renames."""
    model, optimizer = small()
    headrace.save(tmp_path / "step-1", model)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer)
    rename, left = os.rename, [renames]

    def crashes(source: Any, target: Any) -> None:
        if not left[0]:
            raise InterruptedError  # an OSError, which ends the save
        left[0] -= 1
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "libc", lambda: None)  # which has no such call
        patch.setattr(os, "rename", crashes)
        patch.setattr(directory.NewDirectory, "discard", lambda _: None)  # nothing is cleaned up
        with pytest.raises(headrace.DiskError):
            headrace.save(tmp_path / "step-1", model)
    found = headrace.checkpoint.newest(tmp_path)
    assert found == tmp_path / "step-1"
    again, _ = small(1)
    headrace.load(found, again)
    wanted = before if renames < 2 else [p.detach() for p in model.parameters()]
    assert_same([p.detach() for p in again.parameters()], wanted)
    headrace.save(tmp_path / "step-1", model)
    with monkeypatch.context() as patch:
        patch.setattr(directory, "libc", lambda: None)  # which has no such call
        headrace.save(tmp_path / "step-1", model, optimizer)
    left_over = [path.name for path in tmp_path.iterdir() if "before" in path.name]
    assert left_over == []


def test_looking_for_the_newest_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    model, _ = small()
    headrace.save(tmp_path / "step-1", model)
    left, elsewhere = (tmp_path / f".headrace-saving-step-0-abc@{host}" for host in (host_name(), "another-host"))
    for directory_of_killed in (left, elsewhere):
        directory_of_killed.mkdir()
        (directory_of_killed / "model.safetensors").write_bytes(b"half")
    under_way = directory.NewDirectory(tmp_path / "step-3")
    assert headrace.checkpoint.newest(tmp_path) == tmp_path / "step-1"
    assert not left.exists()
    assert under_way.path.exists(), "somebody still writes that"
    under_way.discard()
    assert elsewhere.exists(), "whether another host still writes that, its locks do not tell here"
    assert sorted(tmp_path.iterdir()) == [elsewhere, tmp_path / "step-1"]


def test_another_process_takes_a_new_checkpoint_for_a_stale_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks, makes, found = directory.lock_directory, os.mkdir, []

    def lock(path: Path) -> int | None:
        if not found and path.name.startswith(".headrace-saving"):  # it has locked it first
            found.append(path)
            raise BlockingIOError(errno.EAGAIN, "locked")
        return locks(path)

    def make(path: Path, mode: int = 0o777) -> None:
        if found == [path]:  # it removes it just now
            found.append(path)
            path.rmdir()
            raise FileExistsError(errno.EEXIST, "is there", os.fspath(path))
        makes(path, mode)

    monkeypatch.setattr(directory, "lock_directory", lock)
    monkeypatch.setattr(os, "mkdir", make)
    model, optimizer = small()
    headrace.save(tmp_path / "step-1", model, optimizer)
    assert len(found) == 2
    assert headrace.checkpoint.newest(tmp_path) == tmp_path / "step-1"


def test_names_that_lead_out_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    from headrace.checkpoint.manifest import FileRecord, Manifest

    (tmp_path / "evil").mkdir()
    manifest = Manifest(files={"../secret": FileRecord(0, [])}, weights={})
    (tmp_path / "evil" / "headrace.json").write_bytes(manifest.to_json())
    with pytest.raises(headrace.CheckpointError, match="leads out of the checkpoint"):
        headrace.load(tmp_path / "evil", nn.Linear(2, 2))


def test_an_older_one_that_cannot_go_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = small()
    headrace.save(tmp_path / "step-1", model)
    rename = os.rename

    def fails(source: Any, target: Any) -> None:
        if Path(source).name == "step-1":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        headrace.save(tmp_path / "step-2", model, keep=1)
    assert any("step-1 stays" in str(warning.message) for warning in told)
    assert (tmp_path / "step-2").is_dir()


def with_hooks(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, list[str]]:
    """Its state_dict has momentum under another name and halved, and a note; it loads such."""
    calls: list[str] = []

    def after(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        entries = {n: {"half": entry["momentum_buffer"] / 2} for n, entry in state["state"].items()}
        return {"state": entries, "param_groups": state["param_groups"], "note": torch.ones(3)}

    def before(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        calls.append(f"note {state['note'].sum().item()}")
        entries = {n: {"momentum_buffer": entry["half"] * 2} for n, entry in state["state"].items()}
        return {"state": entries, "param_groups": state["param_groups"]}

    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saved"))
    optimizer.register_state_dict_post_hook(after)
    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    return optimizer, calls


@pytest.mark.parametrize("kind", ["torch", "host", "disk"])
def test_hooks_of_an_optimizers_state_dict_are_called(tmp_path: Path, kind: str) -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        own = {"tier": "disk", "disk": tmp_path / f"state-{seed}"} if kind == "disk" else {}
        chosen: Any = torch.optim.SGD if kind == "torch" else headrace.optim.SGD
        return model, chosen(model.parameters(), lr=0.1, momentum=0.9, **own)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made(0)
    step(model, optimizer)
    wanted = [optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    _, calls = with_hooks(optimizer)
    saving = headrace.save(tmp_path / "one", model, optimizer, wait=False)
    step(model, optimizer)
    saving.wait()
    assert calls == ["saved"]
    found = torch.load(tmp_path / "one" / "optimizer.pt", weights_only=True)
    assert list(found["state"][0]) == ["half"]
    other, another = made(1)
    _, calls = with_hooks(another)
    headrace.load(tmp_path / "one", other, another)
    assert calls == ["note 3.0", "loaded"]
    assert_same([another.state[p]["momentum_buffer"] for p in other.parameters()], wanted)
    step(other, another)
    assert_same([p.detach() for p in other.parameters()], [p.detach() for p in model.parameters()])
    narrow = other.to(torch.bfloat16)
    if kind != "torch":
        optimizer, _ = with_hooks(headrace.optim.SGD(narrow.parameters(), lr=0.1, momentum=0.9))
        with pytest.raises(headrace.CheckpointError, match="has hooks for load_state_dict"):
            headrace.load(tmp_path / "one", narrow, optimizer)


def test_conjugated_views_in_files_of_torch(tmp_path: Path) -> None:
    """Their bytes have other signs than their values."""
    model, again = (torch.nn.Linear(4, 4, dtype=torch.complex64) for _ in range(2))
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, again))
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter).conj()
    tree = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save({**tree, "pytorch-lightning_version": "2.0"}, tmp_path / "last.ckpt")
    headrace.load(tmp_path / "last.ckpt", again, other)
    for one, loaded in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(other.state[loaded]["momentum_buffer"], optimizer.state[one]["momentum_buffer"])
    torch.save({"weight": model.weight.detach().conj()}, tmp_path / "pytorch_model.bin")
    with torch.device("meta"):
        absent = torch.nn.Linear(4, 4, bias=False, dtype=torch.complex64)
    with pytest.raises(headrace.CheckpointError, match=r"'weight' is not contiguous .*, or a conjugated"):
        headrace.offload(absent, device="cpu", device_memory="1MiB", checkpoint=tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_of_a_distributed_checkpoint_may_be_named_like_state(tmp_path: Path) -> None:
    def model_with_state(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Module()
        model.state = nn.ModuleList([nn.Linear(4, 4)])
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = model_with_state(0)
    model.state[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp", thread_count=2), no_dist=True)
    other, others = model_with_state(1)
    headrace.load(tmp_path / "dcp", other, others)
    assert_same_weights(other, model)
    assert_same(others.state_dict()["state"], optimizer.state_dict()["state"])


def test_another_directory_that_may_not_be_read_keeps_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = small()
    (tmp_path / "other-9").mkdir()
    stat = os.stat

    def forbids(path: Any, **how: Any) -> os.stat_result:
        if Path(path).parent.name == "other-9":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", forbids)
    for number in (1, 2, 3):
        headrace.save(tmp_path / f"step-{number}", model, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other-9", "step-3"]


class _Meters(dict[str, int]):
    """A dict that says itself what of it is saved."""

    def state_dict(self) -> dict[str, int]:
        return {"inner": 5}


class _Unpicklable:
    def __reduce__(self) -> str:
        raise TypeError


def test_a_dict_with_a_state_dict_is_saved_as_that(tmp_path: Path) -> None:
    model, _ = small()
    headrace.save(tmp_path / "step-1", model, extra={"meters": _Meters(x=1)})
    assert headrace.load(tmp_path / "step-1", model) == {"meters": {"inner": 5}}


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"a": _Unpicklable()}, "extra.a is a _Unpicklable"), ({"s": torch.Size([2]), "b": {"c": object()}}, "extra.b.c")],
)
def test_what_of_extra_cannot_be_saved_is_named(tmp_path: Path, extra: Any, named: str) -> None:
    model, _ = small()
    with pytest.raises(headrace.CheckpointError, match=named):
        headrace.save(tmp_path / "step-1", model, extra=extra)


def test_ctrl_c_as_a_save_begins_leaves_it_to_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes and publishes: nothing of what it writes is removed from under it."""
    model, _ = small()

    class Interrupted(list[Any]):
        def __setitem__(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writing, "last_saving", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            headrace.save(tmp_path / "step-1", model)
    deadline = threading.Event()
    while not (tmp_path / "step-1").exists() and not deadline.wait(0.01):
        pass
    other, _ = small(1)
    headrace.load(tmp_path / "step-1", other)
    assert_same_weights(other, model)


def test_at_exit_a_checkpoint_is_whole_before_models_are_let_go_of(tmp_path: Path) -> None:
    """Whatever was imported first."""
    program = f"""
import headrace.saving
import headrace, torch
from headrace.checkpoint.writing import Saving

def said(kind, name):
    own = getattr(kind, name)
    setattr(kind, name, lambda self: (print(name), own(self)))

model = torch.nn.Linear(8, 8)
handle = headrace.offload(model, device="cpu")
said(Saving, "settle")
said(type(handle), "let_go")
headrace.save({str(tmp_path / "step-1")!r}, model, wait=False)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["settle", "let_go"]
    headrace.load(tmp_path / "step-1", nn.Linear(8, 8))
