"""Does state that rests on disk give the same bits, stay out of host memory, and survive checkpoints and faults?"""

import copy
import errno
import io
import os
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace.optim
from headrace.errors import DiskError
from headrace.memory.disk import Access, DirectFile, DiskStore
from headrace.memory.disk.log import DiskLog
from headrace.memory.ledger import Ledger
from headrace.optim import AdamW, disk_state, states
from tests.optim.references import MATRICES, RULES, copies, give_gradients, parameters, ties_up
from tests.optim.test_overlap import SETTINGS, batch, decoder, offloaded, train
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import loss_of

SHAPES = ((37, 13), (1,), (65536 + 5,), (3, 4, 5), (), (0,), (60, 1031))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters of several chunks, and more loads than the ring has slots."""
    monkeypatch.setattr(disk_state, "STAGED_ELEMENTS", 1 << 13)
    monkeypatch.setattr(states, "LEAST_BYTES", 1)


@pytest.mark.core(dtype=torch.bfloat16)
@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "adam", "sgd", "sgd_nesterov", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    own, kind, settings = RULES[name]
    ours = parameters(dtype, MATRICES if name == "muon" else [shape for shape in SHAPES if shape != (0,)])
    exact = copies(ours, torch.float32)
    common = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    optimizer = getattr(headrace.optim, own)(ours, tier="disk", disk=tmp_path, **common)
    reference = kind(exact, **settings)
    for step in range(6):
        give_gradients(ours, exact, step)
        if step == 3 and name != "lion":  # whose reference wants all
            ours[2].grad = None
            exact[2].grad = None
        if step == 4:  # somebody writes weights
            with torch.no_grad():
                ours[0].fill_(0.5)
                exact[0].fill_(0.5)
        optimizer.step()
        reference.step()
    assert_same(ours, exact if dtype == torch.float32 else [ties_up(weight) for weight in exact])


@pytest.mark.parametrize("form", ["split", "full"])
def test_state_is_shown_in_the_stock_format(form: str, tmp_path: Path) -> None:
    ours, theirs = parameters(torch.bfloat16, SHAPES), parameters(torch.bfloat16, SHAPES)
    optimizer = AdamW(ours, tier="disk", disk=tmp_path, master_form=form)
    reference = AdamW(theirs, master_form=form)
    for step in range(4):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        if step == 1:
            shown = optimizer.state_dict()["state"]
            for index, entries in reference.state_dict()["state"].items():
                assert shown[index].keys() == entries.keys()
                assert_same([shown[index][key] for key in entries], list(entries.values()))
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_whole_matrices(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """It is shown, changed, saved, loaded and copied as that in host memory; between steps it is not there."""
    ours, theirs = parameters(dtype, MATRICES), parameters(dtype, MATRICES)
    kind = getattr(headrace.optim, RULES[name][0])
    optimizer, reference = kind(ours, tier="disk", disk=tmp_path), kind(theirs)
    for step in range(7):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        assert all(
            not torch.is_tensor(value) or key == "step"
            for each in optimizer.entries.values()
            for key, value in each.items()
        )
        if step in (1, 2):
            for index, entries in reference.state_dict()["state"].items():
                shown = optimizer.state_dict()["state"][index]
                assert shown.keys() == entries.keys()
                assert_same([shown[key] for key in entries], list(entries.values()))
        if step == 2:
            for one, other in ((optimizer, ours), (reference, theirs)):
                for key, value in one.state[other[0]].items():
                    if key != "step" and key != "master_remainder":
                        one.state[other[0]][key] = torch.full_like(value, 0.25)
                        one.state[other[1]][key].mul_(0.5)
        if step == 4:
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            saved.seek(0)
            optimizer = kind(ours, tier="disk", disk=tmp_path)
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
        if step == 5:
            copied = copy.deepcopy(optimizer)
            assert str(copied.state_dict()) == str(optimizer.state_dict())
    assert_same(ours, theirs)


def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[list[DiskStore], DiskLog]:
    """The stores that optimizers open from now on, and what these move."""
    stores: list[DiskStore] = []
    log = DiskLog()

    def opens(directory: Path, ledger: Ledger, *, alone: bool) -> DiskStore:
        stores.append(DiskStore(directory, ledger, log=log, alone=alone))
        return stores[-1]

    monkeypatch.setattr(disk_state, "DiskStore", opens)
    return stores, log


def moved_bytes(log: DiskLog) -> tuple[int, int]:
    """Bytes that were read and written so far."""
    moves = log.since(0.0)
    read = sum(move.nbytes for move in moves if move.access is Access.READ)
    return read, sum(move.nbytes for move in moves) - read


def test_state_is_not_in_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores, log = opened(monkeypatch)
    ours = [nn.Parameter(torch.zeros(1 << 16)) for _ in range(16)]
    optimizer = AdamW(ours, tier="disk", disk=tmp_path)
    for weight in ours:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    (store,) = stores
    store.synchronize()
    state_bytes = 8 * 16 * (1 << 16)
    assert store.nbytes == state_bytes
    assert moved_bytes(log) == (0, state_bytes)  # zeros are not read
    held = disk_state.SLOTS * disk_state.MOST_BYTES_PER_ELEMENT * (1 << 13) + 16 * 4  # the ring; the counts of steps
    assert optimizer.held_bytes() == held
    optimizer.step()
    store.synchronize()
    assert moved_bytes(log) == (state_bytes, 2 * state_bytes)
    assert sum(one["exp_avg"].nbytes for one in optimizer.state_dict()["state"].values()) == state_bytes // 2
    assert optimizer.held_bytes() == held  # what was shown is memory over a file


@pytest.mark.core(dtype=torch.bfloat16, overlap=["none", "backward"])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_models(emu_device: ModuleType, overlap: str, dtype: torch.dtype, tmp_path: Path) -> None:
    trained = []
    for settings in ({}, {"tier": "disk", "disk": tmp_path, "overlap": overlap}):
        model = decoder(dtype)
        with offloaded(model) as handle:
            train(model, AdamW(model.parameters(), **settings, **SETTINGS), 8)
            assert handle.stats().onload_bytes > weight_bytes(model)
        trained.append(list(model.parameters()))
    assert_same(*trained)


@pytest.mark.emu("random:0")
def test_plain_parameters_on_the_device(emu_device: ModuleType, tmp_path: Path) -> None:
    here = parameters(torch.bfloat16, SHAPES)
    there = [nn.Parameter(weight.detach().to("emu")) for weight in here]
    optimizer, other = AdamW(here), AdamW(there, tier="disk", disk=tmp_path)
    for step in range(4):
        give_gradients(there, here, step)
        optimizer.step()
        other.step()
        if step == 1:
            other.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_same(there, here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to_disk", [True, False])
def test_resume_from_any_tier_to_any(dtype: torch.dtype, to_disk: bool, tmp_path: Path) -> None:
    ours, theirs = parameters(dtype, SHAPES), parameters(dtype, SHAPES)
    on_disk = {"tier": "disk", "disk": tmp_path}
    optimizer = AdamW(ours, **({} if to_disk else on_disk))
    reference = AdamW(theirs)
    for step in range(6):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        if step == 2:
            saved = io.BytesIO()
            torch.save(optimizer.state_dict(), saved)
            saved.seek(0)
            optimizer = AdamW(ours, **(on_disk if to_disk else {}))
            optimizer.load_state_dict(torch.load(saved, weights_only=True))
            if to_disk:
                assert all("exp_avg" not in entries for entries in optimizer.entries.values())
    assert_same(ours, theirs)


def test_copies_and_replaced_state(tmp_path: Path) -> None:
    """A copied optimizer has a file of its own; state that somebody puts there counts. No file has a name."""
    ours, theirs = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    optimizer: Any = AdamW(ours, tier="disk", disk=tmp_path)
    reference = AdamW(theirs)
    for step in range(5):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        if step == 1:
            for one, other in ((optimizer, ours), (reference, theirs)):
                one.state[other[0]]["exp_avg"] = torch.full(SHAPES[0], 0.25)
                one.state[other[2]]["exp_avg"].mul_(0.5)
        if step == 2:
            copied = copy.deepcopy(optimizer)
            assert list(tmp_path.iterdir()) == []
            assert_same(
                [entries["exp_avg"] for entries in copied.state.values()],
                [entries["exp_avg"] for entries in optimizer.state.values()],
            )
            del copied
    assert_same(ours, theirs)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    weight = nn.Parameter(torch.zeros(100))
    weight.grad = torch.ones(100)
    optimizer = AdamW([weight], tier="disk", disk=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_room)
        with pytest.raises(DiskError, match="exp_avg"):
            optimizer.step()
    assert not weight.any()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


def test_a_failed_read_is_told_and_frees_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = parameters(shapes=SHAPES)
    optimizer = AdamW(ours, tier="disk", disk=tmp_path)
    give_gradients(ours, copies(ours), 0)
    optimizer.step()

    def faulty(self: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        raise DiskError(errno.EIO, f"{what}: the drive is gone")

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "read", faulty)
        for _ in range(3):
            with pytest.raises(DiskError, match="the drive is gone"):
                optimizer.step()
    optimizer.step()


@pytest.mark.emu("random:0")
def test_two_optimizers_in_backward(emu_device: ModuleType, tmp_path: Path) -> None:
    """Each is told of blocks that are all the other's."""
    trained = []
    for settings in ({}, {"tier": "disk", "disk": tmp_path, "overlap": "backward"}):
        model = decoder(torch.float32)
        weights = list(model.parameters())
        with offloaded(model) as handle:
            optimizers = [AdamW(half, **settings, **SETTINGS) for half in (weights[:3], weights[3:])]
            for step in range(5):
                loss_of(model, batch(step)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert handle.stats().onload_bytes > weight_bytes(model)
        trained.append(list(model.parameters()))
    assert_same(*trained)


def test_settings_that_change_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With amsgrad there are more bytes for each element, so parts are of another size; the drive is slow to write."""

    def slowly(file: DirectFile, *arguments: Any) -> Any:
        time.sleep(0.01)
        return write(file, *arguments)

    write = DirectFile.write
    ours, theirs = parameters(torch.bfloat16, SHAPES), parameters(torch.bfloat16, SHAPES)
    optimizers = [AdamW(ours, tier="disk", disk=tmp_path), AdamW(theirs)]
    monkeypatch.setattr(DirectFile, "write", slowly)
    for step, amsgrad in enumerate((False, False, True, False, True)):
        give_gradients(ours, theirs, step)
        for optimizer in optimizers:
            optimizer.param_groups[0]["amsgrad"] = amsgrad
            optimizer.step()
        assert_same(ours, theirs)


def test_state_is_written_in_place_more_than_once(tmp_path: Path) -> None:
    ours, theirs = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    optimizers = [AdamW(ours, tier="disk", disk=tmp_path), AdamW(theirs)]
    for step in range(4):
        give_gradients(ours, theirs, step)
        for optimizer, weights in zip(optimizers, (ours, theirs), strict=True):
            optimizer.step()
            optimizer.state[weights[2]]["exp_avg"].mul_(0.5)
    assert_same(ours, theirs)


@pytest.mark.core(how="clear", name="adamw")
@pytest.mark.parametrize(
    "how", ["clear", "clear later", "another dict", "pop", "clear one's own", "delete one's master"]
)
@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_somebody_removes_is_gone(how: str, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As ReLoRA does, to begin an optimizer anew."""
    own, _, settings = RULES[name]
    settings = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    ours, theirs = parameters(dtype, MATRICES), parameters(dtype, MATRICES)
    optimizers = [
        getattr(headrace.optim, own)(ours, tier="disk", disk=tmp_path, **settings),
        getattr(headrace.optim, own)(theirs, **settings),
    ]
    states: list[Any] = [optimizer.state for optimizer in optimizers]
    for step in range(5):
        give_gradients(ours, theirs, step)
        for optimizer, state, weights in zip(optimizers, states, (ours, theirs), strict=True):
            if step == 2 and how == "clear later":
                state.clear()
            elif step == 2 and how == "clear":
                optimizer.state.clear()
            elif step == 2 and how == "another dict":
                optimizer.state = defaultdict(dict)
            elif step == 2 and how == "pop":
                optimizer.state.pop(weights[1])
            elif step == 2 and how == "clear one's own":
                optimizer.state[weights[1]].clear()
            elif step == 2:
                optimizer.state[weights[1]].pop("master_remainder", None)
            optimizer.step()
    assert_same(ours, theirs)
    shown = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in optimizers]
    assert_same(*([dict(sorted(entries.items())) for entries in state.values()] for state in shown))


@pytest.mark.parametrize("how", ["loads", "entries", "tensors"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_may_exchange_their_state(how: str, name: str, tmp_path: Path) -> None:
    own, _, settings = RULES[name]
    settings = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    shapes = ((150, 130), (150, 130))
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizers = [
        getattr(headrace.optim, own)(ours, tier="disk", disk=tmp_path, **settings),
        getattr(headrace.optim, own)(theirs, **settings),
    ]
    for step in range(4):
        give_gradients(ours, theirs, step)
        for optimizer, (first, second) in zip(optimizers, (ours, theirs), strict=True):
            if step == 2 and how == "loads":
                whole = optimizer.state_dict()
                whole["state"][0], whole["state"][1] = whole["state"][1], whole["state"][0]
                optimizer.load_state_dict(whole)
            elif step == 2 and how == "entries":
                optimizer.state[first], optimizer.state[second] = optimizer.state[second], optimizer.state[first]
            elif step == 2:
                state = optimizer.state
                for key in list(state[first]):
                    state[first][key], state[second][key] = state[second][key], state[first][key]
            optimizer.step()
    assert_same(ours, theirs)


def test_state_of_changing_dtypes_takes_disk_once_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that goes from `float()` to `double()` and back: extents are not given back."""
    taken: list[int] = []
    allocate = DiskStore.allocate
    monkeypatch.setattr(DiskStore, "allocate", lambda *given: (taken.append(given[2]), allocate(*given))[1])
    state = disk_state.DiskState(tmp_path)
    for number in range(3):
        for dtype in (torch.float32, torch.float64):
            value = torch.full((20_000,), number, dtype=dtype)
            state.keep("weight", 20_000, {"exp_avg": value})
            assert torch.equal(state.fetch("weight", 20_000)["exp_avg"], value)
    assert taken == [80_000, 160_000]


def test_a_slot_is_not_used_again_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters without state pass through slots, too: these may still be on their way to disk."""
    state, drive = disk_state.DiskState(tmp_path), threading.Event()
    write = DirectFile.write

    def late(*given: Any) -> None:
        drive.wait()
        write(*given)

    monkeypatch.setattr(DirectFile, "write", late)
    first, second = torch.full((4096,), 1.0), torch.full((4096,), 2.0)
    state.keep("first", 4096, {"moment": first})
    for _ in range(2 * disk_state.SLOTS - 1):  # the next slot is the first one, which was in use once more
        assert state.fetch("nothing", 4096) == {}
    keeping = threading.Thread(target=state.keep, args=("second", 4096, {"moment": second}))
    keeping.start()
    keeping.join(timeout=0.5)  # with a slot that is taken for free, it has ended
    drive.set()
    keeping.join()
    assert torch.equal(state.fetch("first", 4096)["moment"], first)
    assert torch.equal(state.fetch("second", 4096)["moment"], second)
