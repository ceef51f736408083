"""Is 3 steps, saved and loaded, and 3 more, the same as 6? From each tier into each other, to the last bit."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace
from headrace.memory.disk import Extent
from headrace.memory.disk.checksums import Checksums
from headrace.weights.rest.rests import DiskRest
from tests.checkpoint.runs import Net, Run, run
from tests.support.compare import assert_same

PLACES = ("device", "host", "disk")
KINDS = {
    "fp32": {"dtype": torch.float32},
    "bf16": {"dtype": torch.bfloat16},
    "8bit": {"dtype": torch.float32, "state_dtype": "8bit"},
}


def assert_on_disk(place: str, one: Run) -> None:
    if place == "disk" and one.handle is not None:
        stats = one.handle.stats()
        assert stats.fetch_bytes > 0
        assert stats.disk_bytes > 0
        assert one.optimizer.state_on_disk


OVERLAPS = ("none", "forward", "backward")
PAIRS = [  # each optimizer, kind and overlap with each of the others
    (optimizer, kind, OVERLAPS[(number + place) % 3])
    for number, optimizer in enumerate(["AdamW", "Lion", "Adafactor", "Muon"])
    for place, kind in enumerate(KINDS)
]


@pytest.mark.core(optimizer="AdamW", kind="bf16", overlap="forward")
@pytest.mark.parametrize(("optimizer", "kind", "overlap"), PAIRS)
def test_a_run_goes_on_wherever_it_was(tmp_path: Path, optimizer: str, kind: str, overlap: str) -> None:
    if kind == "8bit" and optimizer in ("Adafactor", "Muon"):
        pytest.skip("these keep float32 state, and refuse another")
    settings: dict[str, Any] = {**KINDS[kind], "overlap": overlap}
    with run("device", tmp_path / "plain", optimizer, **settings) as whole:
        whole.step(6)
        wanted = whole.values()
    for place in PLACES:
        with run(place, tmp_path / place, optimizer, **settings) as first:
            first.step(3)
            headrace.save(tmp_path / f"from-{place}-3", first.model, first.optimizer, extra={"place": place})
            first.step(3)  # saving changed nothing
            assert_same(first.values(), wanted)
            assert_on_disk(place, first)
    for place, other in [(place, other) for place in PLACES for other in PLACES]:
        with run(other, tmp_path / f"{place}-{other}", optimizer, seed=1, **settings) as second:
            second.step()
            extra = headrace.load(tmp_path / f"from-{place}-3", second.model, second.optimizer)
            assert extra == {"place": place}
            second.step(3)
            assert_same(second.values(), wanted)
            assert_on_disk(other, second)


@pytest.mark.core(place="disk")
@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon"])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_plain_pytorch_and_headrace_go_on_from_each_other(tmp_path: Path, name: str, place: str) -> None:
    def plain() -> Run:
        torch.manual_seed(5)
        model = Net(torch.float32)
        parameters = [p for p in model.parameters() if p.dim() == 2 or name != "Muon"]
        fused = {"fused": True} if name == "AdamW" else {}
        return Run(model, getattr(torch.optim, name)(parameters, lr=1e-2, **fused))

    whole = plain()
    whole.step(3)
    headrace.save(tmp_path / "plain-3", whole.model, whole.optimizer)
    whole.step(3)
    with run(place, tmp_path, name, seed=1) as ours:
        headrace.load(tmp_path / "plain-3", ours.model, ours.optimizer)
        ours.step(1)
        headrace.save(tmp_path / "ours-4", ours.model, ours.optimizer)
        ours.step(2)
        assert_same(ours.values(), whole.values())
    back = plain()
    headrace.load(tmp_path / "ours-4", back.model, back.optimizer)
    back.step(2)
    assert_same(back.values(), whole.values())


@pytest.mark.parametrize("place", ["host", "disk"])
def test_precision_changes_without_losing_a_bit(tmp_path: Path, place: str) -> None:
    """A float32 run goes on in bfloat16 with exact masters, and back."""
    with run("host", tmp_path / "wide") as wide:
        wide.step(2)
        headrace.save(tmp_path / "wide-2", wide.model, wide.optimizer)
        wanted = wide.values()
    with run(place, tmp_path / "narrow", dtype=torch.bfloat16, seed=1) as narrow:
        headrace.load(tmp_path / "wide-2", narrow.model, narrow.optimizer)
        assert all(p.dtype == torch.bfloat16 for p in narrow.model.parameters())
        headrace.save(tmp_path / "narrow-2", narrow.model, narrow.optimizer)
    with run(place, tmp_path / "half", dtype=torch.float16, seed=3) as half:  # from the masters, too
        headrace.load(tmp_path / "narrow-2", half.model, half.optimizer)
        headrace.save(tmp_path / "half-2", half.model, half.optimizer)
    with run(place, tmp_path / "again", seed=2) as again:
        again.step()
        headrace.load(tmp_path / "half-2", again.model, again.optimizer)
        names = list(again.model.state_dict())
        rounded = {names.index("norm.running_mean"), names.index("norm.running_var")}  # buffers have no masters
        for index, (one, other) in enumerate(zip(again.values(), wanted, strict=True)):
            assert torch.equal(one, other) or index in rounded, index


def test_without_an_optimizer_weights_come_alone(tmp_path: Path) -> None:
    with run("host", tmp_path) as first:
        first.step(2)
        headrace.save(tmp_path / "both-2", first.model, first.optimizer)
        wanted = {name: value.clone() for name, value in first.model.state_dict().items()}
    model = Net(torch.float32)
    before = torch.get_rng_state()
    headrace.load(tmp_path / "both-2", model)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.table.weight


def test_inside_of_a_pass_is_refused(tmp_path: Path) -> None:
    with run("host", tmp_path) as one:
        one.step()

        def save(*_args: Any) -> None:
            with pytest.raises(headrace.StateError, match=r"headrace\.save was called within a forward or backward"):
                headrace.save(tmp_path / "inside", one.model)
            with pytest.raises(headrace.StateError, match=r"headrace\.load was called within a forward or backward"):
                headrace.load(tmp_path / "inside", one.model)

        with contextlib.closing(_Hook(one.model.layers[1].register_forward_hook(save))):
            one.step()
    assert not (tmp_path / "inside").exists()


class _Hook:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


@pytest.mark.extended
@pytest.mark.parametrize("place", PLACES)
def test_on_the_accelerator(tmp_path: Path, compute_device: torch.device, place: str) -> None:
    with run(place, tmp_path / "whole", device=compute_device) as whole:
        whole.step(3)
        headrace.save(tmp_path / "half-3", whole.model, whole.optimizer)
        whole.step(3)
        wanted = whole.values()
    for other in PLACES:
        with run(other, tmp_path / other, device=compute_device, seed=1) as second:
            second.step()
            headrace.load(tmp_path / "half-3", second.model, second.optimizer)
            second.step(3)
            assert_same(second.values(), wanted)


def test_more_files_are_parts_of_the_checkpoint(tmp_path: Path) -> None:
    """They are checked with it, and none takes the place of one of its own or leads out of it."""
    model = torch.nn.Linear(4, 4)
    headrace.save(tmp_path / "step-1", model, files={"vocabulary.txt": b"a b c"})
    assert (tmp_path / "step-1" / "vocabulary.txt").read_bytes() == b"a b c"
    headrace.load(tmp_path / "step-1", model)
    for name in ("model.safetensors", "headrace.json", "../a", "..", "a/b", ""):
        with pytest.raises(ValueError, match=f"files has '{name}'; give names without folders"):
            headrace.save(tmp_path / "step-1", model, files={name: b""})
    (tmp_path / "step-1" / "vocabulary.txt").write_bytes(b"a b")
    with pytest.raises(headrace.CheckpointError, match="has 3 bytes, and 5 were written"):
        headrace.load(tmp_path / "step-1", model)


def test_what_is_loaded_into_files_is_not_read_again_for_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward fetches blocks at once, and checks what it reads."""
    with run("disk", tmp_path / "tiers") as one:
        one.step()
        headrace.save(tmp_path / "step-1", one.model, one.optimizer)
        saved = one.values()
        one.step()
        assert one.handle is not None
        rests = [block.rest for block in one.handle._blocks() if isinstance(block.rest, DiskRest)]
        assert rests
        handed_over: list[object] = []
        note_all = Checksums.note_all

        def notes(checksums: Checksums, extent: Extent, address: int, within: object = None) -> None:
            if within is None or within:
                handed_over.append(extent.name)
            note_all(checksums, extent, address, within)

        monkeypatch.setattr(Checksums, "note_all", notes)
        headrace.load(tmp_path / "step-1", one.model, one.optimizer)
        assert_same(one.values(), saved)
        with torch.no_grad():
            one.model(torch.arange(8))
        assert not {rest.extent.name for rest in rests} & set(handed_over)
        for rest in rests:
            assert None not in rest.store._checksums._known[rest.extent]
        one.step()
        headrace.load(tmp_path / "step-1", one.model, one.optimizer)
        assert_same(one.values(), saved)
