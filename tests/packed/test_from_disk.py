"""Do frozen weights that come from disk again and again come packed, with the bits of the plain run?"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace.errors import DiskError
from headrace.memory.disk import DiskStore, Extent
from headrace.memory.disk.file import DirectFile
from headrace.weights.rest import fetching
from tests.packed import models
from tests.packed.models import adapted_layer
from tests.support.compare import assert_same, assert_same_models, assert_same_weights, on_cpu
from tests.support.models import linears

WIDTH = 1024
LAYERS = 8
PASSES = 9  # until everything that comes often enough is packed, whatever was guessed
LAYER_BYTES = 2 * WIDTH * WIDTH + 2 * WIDTH
BUDGETS = {"device_memory": 5 * LAYER_BYTES // 2, "host_memory": 3 * LAYER_BYTES}

frozen, inputs = partial(models.frozen, WIDTH, LAYERS), partial(models.inputs, WIDTH)


@pytest.fixture(autouse=True)
def _always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of this machine decide nothing."""
    monkeypatch.setattr(fetching, "TIMES_AS_FAST", 0)


def passes(
    model: nn.Module, handle: headrace.Offloaded, want: torch.Tensor, count: int = PASSES, last: int = 1
) -> headrace.Stats:
    """The stats of the last of so many forwards, or of the last few, all of which are right."""
    assert want.isfinite().sum() >= 0.9 * want.numel()
    for index in range(count):
        if index <= count - last:
            handle.reset_stats()
        with torch.no_grad():
            assert_same(on_cpu(model(inputs(want.dtype))), want)
        handle.synchronize()
    return handle.stats()


def test_three_quarters_of_the_bytes_are_read(compute_device: torch.device, tmp_path: Path) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    for packed in (False, True):
        with headrace.offload(model, device=compute_device, disk=tmp_path, packed=packed, **BUDGETS) as handle:
            # Of several: what stays takes turns, and what is read ahead of one pass is read in the one before.
            stats = passes(model, handle, want, PASSES + 4, last=4)
            without = stats.fetch_bytes - stats.packed_bytes + stats.unpacked_bytes  # that would be read
            assert without >= 4 * 0.99 * LAYER_BYTES * (LAYERS - 3)
            if packed:
                assert stats.fetch_bytes < 0.9 * without
                assert stats.unpacked_bytes > 4 * 0.9 * LAYER_BYTES * (LAYERS - 3)
                assert 0.74 < stats.packed_bytes / stats.unpacked_bytes < 0.8
                assert "packed on disk" in handle.report().to_text()
            else:
                assert stats.packed_bytes == stats.unpacked_bytes == stats.spill_bytes == 0
            assert stats.device_peak_bytes <= BUDGETS["device_memory"]
            assert stats.host_peak_bytes <= BUDGETS["host_memory"]
            assert all(layer.weight.shape == (WIDTH, WIDTH) for layer in model)
            assert_same_weights(model, frozen())


@pytest.mark.extended
def test_packing_is_written_once(tmp_path: Path) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS) as handle:
        handle.synchronize()
        handle.reset_stats()
        assert passes(model, handle, want, 2).spill_bytes == 0  # as often as that it may never come again
        before = handle.stats().disk_bytes
        written = 0
        for _ in range(2 * PASSES):
            written += passes(model, handle, want, 1).spill_bytes
        assert 0.6 * LAYER_BYTES * (LAYERS - 3) < written < 0.8 * LAYER_BYTES * LAYERS
        assert handle.stats().disk_bytes - before == written
        assert passes(model, handle, want, 3).spill_bytes == 0


def test_weights_of_a_checkpoint(compute_device: torch.device, tmp_path: Path) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = linears(LAYERS, WIDTH, dtype=torch.bfloat16)
    other.requires_grad_(False)
    settings = {"checkpoint": tmp_path / "model.safetensors", "disk": tmp_path / "spill", **BUDGETS}
    with headrace.offload(other, device=compute_device, **settings) as handle:
        stats = passes(other, handle, want)
        assert stats.unpacked_bytes > 0.9 * LAYER_BYTES * (LAYERS - 3)
        assert stats.packed_bytes < 0.8 * stats.unpacked_bytes


def test_a_checkpoint_without_a_directory_is_read_as_it_is(tmp_path: Path) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = linears(LAYERS, WIDTH, dtype=torch.bfloat16)
    other.requires_grad_(False)
    with headrace.offload(other, device="cpu", checkpoint=tmp_path / "model.safetensors", **BUDGETS) as handle:
        assert passes(other, handle, want).packed_bytes == 0


@pytest.mark.core(write="through data")
@pytest.mark.parametrize("write", ["in place", "through data", "another tensor"])
def test_what_is_written_to_homes_is_what_computes(
    compute_device: torch.device, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, int]] = []  # the space that was taken on disk: for what, and its bytes
    allocate = DiskStore.allocate

    def noted(store: DiskStore, name: str, *how: Any) -> Extent:
        extent = allocate(store, name, *how)
        taken.append((name, extent.capacity_bytes))
        return extent

    monkeypatch.setattr(DiskStore, "allocate", noted)
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with headrace.offload(model, device=compute_device, disk=tmp_path, **BUDGETS) as handle:
        assert passes(model, handle, want).packed_bytes > 0
        other = frozen()
        for ours, plain in zip(model, other, strict=True):
            new = torch.full_like(plain.weight, 0.01)
            with torch.no_grad():
                if write == "in place":
                    ours.weight.copy_(new)
                elif write == "through data":
                    ours.weight.data.copy_(new)
                else:
                    ours.weight.data = new.clone()
                plain.weight.copy_(new)
        with torch.no_grad():
            want = other(inputs())
        assert passes(model, handle, want, 1).packed_bytes == 0
        on_disk, before = handle.stats().disk_bytes, len(taken)
        stats = passes(model, handle, want)
        if write != "another tensor":  # that one is the user's own, copied beside what was read
            assert stats.packed_bytes > 0
        # Each packed copy goes where the old one was: it takes space once, less than the block. So only a block that
        # had none takes some now; which blocks stay on the device, and come too seldom, threads decide.
        copies: Counter[str] = Counter()
        for name, nbytes in taken:
            copies[name] += nbytes * name.endswith("(packed)")
        assert 0 < max(copies.values()) < LAYER_BYTES
        assert all(copies[name] for name, _ in taken[before:])
        assert handle.stats().disk_bytes == on_disk + sum(nbytes for _, nbytes in taken[before:])


class Drifting(nn.Linear):
    """The model itself writes its weights, as codebooks do."""

    drifts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.drifts:
            self.weight.mul_(0.5)
        return y


@pytest.mark.extended
def test_what_the_model_writes_is_what_computes(compute_device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, plain = (
        nn.Sequential(*(Drifting(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))) for _ in range(2)
    )
    plain.load_state_dict(frozen().state_dict())
    model.load_state_dict(plain.state_dict())
    model.requires_grad_(False)
    with headrace.offload(model, device=compute_device, disk=tmp_path, **BUDGETS) as handle:
        with torch.no_grad():
            want = plain(inputs())
        assert passes(model, handle, want).packed_bytes > 0
        for layer in (*model, *plain):
            layer.drifts = True
        with torch.no_grad():
            assert_same(on_cpu(model(inputs())), want)
            plain(inputs())
            for layer in (*model, *plain):
                layer.drifts = False
            want = plain(inputs())
        assert passes(model, handle, want, 1).packed_bytes == 0
        assert passes(model, handle, want).packed_bytes > 0
        assert_same_weights(model, plain)


@pytest.mark.extended
def test_adapters_on_frozen_weights(compute_device: torch.device, tmp_path: Path) -> None:
    """Frozen layers come packed in forward and backward; what is trained never is."""
    torch.manual_seed(0)
    model = nn.Sequential(*(adapted_layer(WIDTH) for _ in range(LAYERS)))
    plain = nn.Sequential(*(adapted_layer(WIDTH) for _ in range(LAYERS)))
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, WIDTH, dtype=torch.bfloat16)
    bases = [layer.base for layer in model]
    settings = {"device_memory": 3 * LAYER_BYTES, "host_memory": 4 * LAYER_BYTES, "blocks": bases}
    with headrace.offload(model, device=compute_device, disk=tmp_path, **settings) as handle:
        one = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        other = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
        for _ in range(5):
            handle.reset_stats()
            for net, optimizer in ((model, one), (plain, other)):
                net(x).float().square().sum().backward()
                optimizer.step()
            assert_same_models(model, plain, some_missing=True)
            one.zero_grad()
            other.zero_grad()
        assert handle.stats().packed_bytes > 0


@pytest.mark.extended
def test_weights_that_are_trained_are_not_packed(tmp_path: Path) -> None:
    model = frozen().requires_grad_(True)
    with torch.no_grad():
        want = model(inputs())
    with headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS) as handle:
        assert passes(model, handle, want).packed_bytes == 0
        model.requires_grad_(False)
        assert passes(model, handle, want).packed_bytes > 0


def test_other_dtypes_are_not_packed(tmp_path: Path) -> None:
    model = frozen(torch.float16)
    with torch.no_grad():
        want = model(inputs(torch.float16))
    with headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS) as handle:
        assert passes(model, handle, want).packed_bytes == 0


def test_what_does_not_pay_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Half of all exponents, each as often."""
    from headrace.weights.rest import packing

    tried = []
    pack = packing.pack_into
    monkeypatch.setattr(packing, "pack_into", lambda chunk, into: tried.append(len(chunk)) or pack(chunk, into))
    model = frozen()
    for layer in model:
        layer.weight.data = torch.randint(0, 2**14, (WIDTH, WIDTH), dtype=torch.int16).view(torch.bfloat16)
    with torch.no_grad():
        want = model(inputs())
    with headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS) as handle:
        assert passes(model, handle, want).packed_bytes == 0
        assert LAYER_BYTES < sum(tried) <= LAYERS * LAYER_BYTES


def test_not_packed_where_the_drive_is_faster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetching, "TIMES_AS_FAST", float("inf"))
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS) as handle:
        stats = passes(model, handle, want)
        assert stats.packed_bytes == stats.spill_bytes == 0


@pytest.mark.extended
def test_a_limited_pace_holds_for_what_was_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Copies are what is held back: so weights are unpacked before that, where else they go straight to the target."""
    unpacked: list[int] = []
    unpack = fetching.unpack_in_place
    monkeypatch.setattr(fetching, "unpack_in_place", lambda *chunk: unpacked.append(1) or unpack(*chunk))
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS) as handle:
        assert passes(model, handle, want).packed_bytes > 0
        assert not unpacked
        handle.limit_copies("1GB")
        assert passes(model, handle, want, 2).packed_bytes > 0
        assert unpacked


def test_a_disk_without_room_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    with headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS) as handle:

        def full(self: DiskStore, nbytes: int) -> None:
            raise DiskError(28, "no room")

        monkeypatch.setattr(DiskStore, "check_free", full)
        before = handle.stats().disk_bytes
        stats = passes(model, handle, want)
        assert stats.packed_bytes == stats.spill_bytes == 0
        assert handle.stats().disk_bytes == before


def test_what_could_not_be_written_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = frozen()
    with torch.no_grad():
        want = model(inputs())
    handle = headrace.offload(model, device="cpu", disk=tmp_path, **BUDGETS)
    handle.synchronize()

    def fails(self: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        raise DiskError(5, f"{what}: the drive failed")

    monkeypatch.setattr(DirectFile, "write", fails)
    for _ in range(PASSES):
        with torch.no_grad():
            assert_same(on_cpu(model(inputs())), want)
    assert handle.stats().packed_bytes == 0
    with pytest.raises(DiskError, match="packed"):
        handle.synchronize()
    handle.remove()


def test_a_setting_that_makes_no_sense() -> None:
    with pytest.raises(TypeError, match="packed='yes' is neither True nor False, nor"):
        headrace.offload(frozen(), packed="yes")  # type: ignore[arg-type]
