"""Are weights on disk updated in their files: exactly, seen by all who look, checked, and whole after faults?"""

import contextlib
import copy
import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.errors import DiskError, StateError
from headrace.memory.disk import DiskStore, new_pages
from headrace.optim import disk_state, elements, in_files, update
from headrace.optim.in_files import Grains
from headrace.weights.rest import placement
from tests.disk.test_faults import spill_file
from tests.optim.test_disk_faults import fail_after
from tests.support.compare import assert_same
from tests.support.loops import loss_of
from tests.support.models import Decoder, large_decoder

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O

TOKENS = torch.arange(16).reshape(2, 8) % 32
BUDGETS: dict[str, Any] = {"device_memory": "160KiB", "host_memory": "256KiB"}
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Lion", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "max_grad_norm": 0.1}),
    ("AdamW", {"lr": 0.01, "state_dtype": torch.bfloat16}),
    ("AdamW", {"lr": 0.01, "master_form": "full"}),
]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Parameters that were updated in their files, bytes written directly, and hand-overs of what memory has."""
    counter: Counter[str] = Counter()
    write, hand_over = DiskStore._write_piece, DiskStore._hand_over

    def grains(members: Any) -> Grains:
        counter["parameters"] += len(members)
        return Grains(members)

    def note_write(self: DiskStore, extent: Any, begin: int, end: int, *rest: Any) -> None:
        counter["bytes"] += end - begin
        write(self, extent, begin, end, *rest)

    def note_hand_over(*arguments: Any) -> None:
        counter["hand-overs"] += 1
        hand_over(*arguments)

    monkeypatch.setattr(elements, "Grains", grains)
    monkeypatch.setattr(DiskStore, "_write_piece", note_write)
    monkeypatch.setattr(DiskStore, "_hand_over", note_hand_over)
    monkeypatch.setattr(disk_state, "STAGED_ELEMENTS", 1 << 12)
    return counter


def models(dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    plain = large_decoder().to(dtype)
    return plain, copy.deepcopy(plain)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, TOKENS).backward()
        optimizer.step()


def fetched(handle: headrace.Offloaded) -> list[Any]:
    return [block for block in handle._engine.passes.blocks if block.is_fetched]


@pytest.mark.core(name="AdamW", dtype=torch.bfloat16, tier="disk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "settings"), SETTINGS)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_steps_are_exact_and_seen(
    name: str, settings: dict[str, Any], tier: str, dtype: torch.dtype, tmp_path: Path, counted: Counter[str]
) -> None:
    """Weights, state and what passes compute; also what user code writes in between, and memory that it has kept."""
    plain, model = models(dtype)
    where = {} if tier == "host" else {"tier": "disk", "disk": tmp_path / "state"}
    with headrace.offload(model, device="cpu", disk=tmp_path / "spill", blocks=[model.layers], **BUDGETS) as handle:
        theirs = getattr(headrace.optim, name)(plain.parameters(), **settings)
        ours = getattr(headrace.optim, name)(model.parameters(), **settings, **where)
        train(plain, theirs)
        train(model, ours)  # blocks may move to disk in it, and leave what was kept before
        kept = [parameter.data for parameter in model.parameters()]
        for number in range(4):
            assert_same(kept, list(plain.parameters()))  # pages that show the weights of before
            train(plain, theirs)
            counted.clear()
            handle.reset_stats()
            train(model, ours)
            here = sum(len(block.params) for block in fetched(handle))
            assert counted["parameters"] == here > 10
            resting = sum(block.rest.extent.capacity_bytes for block in fetched(handle))
            assert counted["bytes"] >= resting
            assert handle.stats().spill_bytes >= sum(block.nbytes for block in fetched(handle))
            assert bool(counted["hand-overs"]) is (number in (0, 3))  # after `p.data`
            assert_same(kept, list(plain.parameters()))
            assert_same(list(model.parameters()), list(plain.parameters()))
            assert torch.equal(loss_of(model, TOKENS), loss_of(plain, TOKENS))
            if number == 2:
                for one in (plain, model):
                    for parameter in one.parameters():
                        parameter.data.mul_(0.5)
        for index, state in ours.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(value, theirs.state_dict()["state"][index][key])


def test_who_else_trains_a_part_of_a_block_keeps_it_in_memory(tmp_path: Path, counted: Counter[str]) -> None:
    """Two optimizers of one block would write the same bytes of the file."""
    plain, model = models(torch.float32)
    with headrace.offload(model, device="cpu", disk=tmp_path, blocks=[model.layers], **BUDGETS) as handle:
        for one in (plain, model):
            halves = [[p for p in one.parameters() if (p.dim() == 1) is flat] for flat in (False, True)]
            both = [headrace.optim.AdamW(half, lr=0.01) for half in halves]
            for _ in range(3):
                loss_of(one, TOKENS).backward()
                for optimizer in both:
                    optimizer.step()
                for optimizer in both:
                    optimizer.zero_grad()
        with_flat = {id(p) for block in fetched(handle) for p in (s.home for s in block.params) if p.dim() == 1}
        assert len(with_flat) > 6
        assert_same(list(model.parameters()), list(plain.parameters()))
        alone = [block for block in fetched(handle) if not any(s.home.dim() == 1 for s in block.params)]
        assert counted["parameters"] == 3 * sum(len(block.params) for block in alone)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_parameters_over_the_same_memory(tier: str, tmp_path: Path, counted: Counter[str]) -> None:
    """They are updated one after the other."""

    def over_one_memory() -> Decoder:
        model = large_decoder()
        for layer in model.layers:
            first = next(one for one in layer.parameters() if one.dim() == 2)
            layer.register_parameter("other", nn.Parameter(first.data))
            layer.register_forward_hook(lambda layer, _, output: output @ layer.other[:64, :64])
        return model

    plain, model = over_one_memory(), over_one_memory()
    where = {} if tier == "host" else {"tier": "disk", "disk": tmp_path / "state"}
    with headrace.offload(model, device="cpu", disk=tmp_path / "spill", blocks=[model.layers], **BUDGETS) as handle:
        theirs = headrace.optim.AdamW(plain.parameters(), lr=0.01)
        ours = headrace.optim.AdamW(model.parameters(), lr=0.01, **where)
        for _ in range(3):
            train(plain, theirs)
            train(model, ours)
        assert_same(list(model.parameters()), list(plain.parameters()))
        assert counted["parameters"] == 3 * sum(len(block.params) for block in fetched(handle)) > 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_a_step_writes_is_reported(tier: str, tmp_path: Path) -> None:
    _, model = models(torch.float32)
    where = {} if tier == "host" else {"tier": "disk", "disk": tmp_path / "state"}
    with headrace.offload(model, device="cpu", disk=tmp_path / "spill", blocks=[model.layers], **BUDGETS) as handle:
        optimizer = headrace.optim.AdamW(model.parameters(), **where)
        train(model, optimizer)
        loss_of(model, TOKENS).backward()
        handle.synchronize()
        handle.reset_stats()
        optimizer.step()
        assert handle.stats().spill_bytes == sum(block.nbytes for block in fetched(handle)) > 0


@pytest.mark.core(kind=["files", "fused"])
@pytest.mark.parametrize("kind", ["memory", "files", "fused", "foreach"])
def test_ctrl_c_in_a_step(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes compute with what the homes hold then, also where their copies were there before."""
    plain, model = models(torch.float32)
    where = {"device_memory": "2MiB"} if kind == "memory" else {"disk": tmp_path, **BUDGETS}
    with headrace.offload(model, device="cpu", blocks=[model.layers], **where) as handle:
        if kind in ("memory", "files"):
            optimizer: torch.optim.Optimizer = headrace.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{kind: True})
        train(model, optimizer, 2)
        loss_of(model, TOKENS).backward()
        with torch.no_grad():
            before = loss_of(model, TOKENS)
        place, name = {
            "memory": (update, "perform"),
            "files": (update, "perform"),
            "fused": (torch, "_fused_adamw_"),
            "foreach": (torch, "_foreach_addcdiv_"),
        }[kind]
        does = getattr(place, name)

        def struck(*arguments: Any, **named: Any) -> None:
            does(*arguments, **named)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(place, name, struck)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        with torch.no_grad():
            after = loss_of(model, TOKENS)
            plain.load_state_dict(model.state_dict())
            assert torch.equal(after, loss_of(plain, TOKENS))
        if kind == "files":
            with pytest.raises(
                StateError, match=r"\): 1 of \d+ parameters had been updated, wholly or in part; load the"
            ):
                optimizer.step()
        else:
            assert not torch.equal(after, before)
        handle.synchronize()


def test_what_a_step_wrote_is_checked(tmp_path: Path, counted: Counter[str]) -> None:
    """A byte that changes on disk after it is found by the next pass, as it is before."""
    _, model = models(torch.float32)
    with headrace.offload(model, device="cpu", disk=tmp_path, blocks=[model.layers], **BUDGETS) as handle:
        optimizer = headrace.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 2)
        assert counted["parameters"] > 0
        handle._fetching.withdraw_all()  # type: ignore[union-attr]
        away = [block.rest.extent for block in fetched(handle) if block.buffer is None]
        assert away
        with open(spill_file(tmp_path), "r+b") as file:
            for extent in away:
                at = extent.offset + extent.nbytes // 2
                byte = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
        with pytest.raises(DiskError, match="are not those that were written"):
            loss_of(model, TOKENS)


@pytest.mark.core(tier="disk", kind="write", pieces=3)
@pytest.mark.parametrize(
    ("tier", "kind", "pieces"),
    [
        *((tier, kind, pieces) for tier in ("host", "disk") for kind in ("read", "write") for pieces in (0, 3, 20)),
        ("disk", "read", 148),  # the state of what rests in memory, after all that was updated in files
    ],
)
def test_a_drive_that_fails_in_a_step(
    kind: str, pieces: int, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has changed, or an error says so until weights and state are loaded; then all is as it would be."""
    plain, model = models(torch.float32)
    where = {} if tier == "host" else {"tier": "disk", "disk": tmp_path / "state"}
    with headrace.offload(model, device="cpu", disk=tmp_path / "spill", blocks=[model.layers], **BUDGETS) as handle:
        theirs = headrace.optim.AdamW(plain.parameters(), lr=0.01)
        ours = headrace.optim.AdamW(model.parameters(), lr=0.01, **where)
        train(plain, theirs, 2)
        train(model, ours, 2)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        state = copy.deepcopy(ours.state_dict())
        ours.zero_grad()
        loss_of(model, TOKENS).backward()
        handle.synchronize()
        with monkeypatch.context() as patch:
            fail_after(patch, kind, pieces, errno.EIO)
            with pytest.raises((DiskError, StateError)) as raised:
                ours.step()
        if isinstance(raised.value, DiskError):
            assert_same(list(model.parameters()), list(plain.parameters()))
            ours.step()  # the drive is back
            train(plain, theirs)
        else:
            with contextlib.suppress(DiskError):
                handle.synchronize()
            model.load_state_dict(saved)
            ours.load_state_dict(state)
        train(plain, theirs, 2)
        train(model, ours, 2)
        assert_same(list(model.parameters()), list(plain.parameters()))
        assert torch.equal(loss_of(model, TOKENS), loss_of(plain, TOKENS))


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes of the memory that steps in files make for themselves."""
    counter: Counter[str] = Counter()
    new_pages = in_files.new_pages

    def note_pages(nbytes: int) -> torch.Tensor:
        counter["made"] += nbytes
        return new_pages(nbytes)

    monkeypatch.setattr(in_files, "new_pages", note_pages)
    return counter


def test_a_step_without_state_holds_a_few_grains(tmp_path: Path, counted: Counter[str], pages: Counter[str]) -> None:
    """Nothing of such a step passes through the ring of state, whose size would bound what weights take."""
    plain, model = models(torch.float32)
    with headrace.offload(model, device="cpu", disk=tmp_path / "spill", blocks=[model.layers], **BUDGETS) as handle:
        theirs = headrace.optim.SGD(plain.parameters(), lr=0.1)
        ours = headrace.optim.SGD(model.parameters(), lr=0.1, tier="disk", disk=tmp_path / "state")
        for _ in range(2):  # blocks may move to disk in the first
            train(plain, theirs)
            counted.clear()
            pages.clear()
            train(model, ours)
        assert_same(list(model.parameters()), list(plain.parameters()))
        assert counted["bytes"] >= sum(block.rest.extent.capacity_bytes for block in fetched(handle))
        assert 0 < pages["made"] < counted["bytes"] / 3


class Sums(nn.Module):
    """Adds the sums of many small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((16,), 0.5) for _ in range(512))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return given + torch.stack([weight.square().sum() for weight in self.weights]).sum()


def test_small_parameters_take_no_page_each(tmp_path: Path, pages: Counter[str]) -> None:
    """Where gradients rest on disk, a page has those of many, and each used to get a copy of the whole page."""
    plain = nn.Sequential(*[Sums() for _ in range(8)])
    model = copy.deepcopy(plain)
    budgets: dict[str, Any] = {"device_memory": "160KiB", "host_memory": "160KiB"}
    with headrace.offload(model, device="cpu", disk=tmp_path, blocks=list(model), **budgets) as handle:
        both = [(one, headrace.optim.SGD(one.parameters(), lr=0.1)) for one in (plain, model)]
        for _ in range(3):
            pages.clear()
            for one, optimizer in both:
                optimizer.zero_grad()
                one(torch.zeros(())).backward()
                optimizer.step()
        assert_same(list(model.parameters()), list(plain.parameters()))
        assert any(in_files.origin_of(one.grad) for block in fetched(handle) for one in (s.home for s in block.params))
        assert 0 < pages["made"] <= 7 * max(block.nbytes for block in fetched(handle))


def test_an_update_takes_no_more_memory_where_blocks_come_in_larger_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(placement, "_LARGEST_CHUNK_BYTES", 1 << 18)
    taken: list[int] = []

    def noted(nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return new_pages(nbytes)

    monkeypatch.setattr(in_files, "new_pages", noted)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(12)))
    budgets = {"device_memory": "4MiB", "host_memory": "9MiB"}
    with headrace.offload(model, device="cpu", disk=tmp_path, **budgets) as handle:
        optimizer = headrace.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        (chunk_bytes,) = {block.rest.pieces(1 << 18)[0].nbytes for block in fetched(handle)}
    assert chunk_bytes == 1 << 18
    assert set(taken) == {1 << 16}
