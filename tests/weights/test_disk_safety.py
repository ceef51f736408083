"""Does a model on disk find room, notice damage, and go on after faults, whatever user code did before?"""

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace.config import parse_bytes
from headrace.errors import BudgetError, DiskError
from headrace.memory.disk import Checkpoint
from headrace.memory.disk.mapping import Mapping
from headrace.memory.ledger import Ledger
from tests.disk.test_faults import spill_file
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder, large_decoder
from tests.weights.test_disk_tier import offload, train

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O


@pytest.mark.core(rank=2)
@pytest.mark.parametrize("host_memory", ["64KiB", "256KiB", "492KiB"])
@pytest.mark.parametrize("rank", [2, 64])
def test_adapters_that_come_later_find_room(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, host_memory: str, rank: int
):
    """With nothing but the ring in host memory, with a third of the blocks, and with all of them (no disk is open)."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.down = nn.Parameter(torch.randn(rank, base.in_features) / 8)
            self.up = nn.Parameter(torch.zeros(base.out_features, rank))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.base_layer(hidden) + hidden @ self.down.t() @ self.up.t()

    def adapt(model: Decoder) -> None:
        torch.manual_seed(1)
        for layer in model.layers:
            layer.up = Adapted(layer.up)  # type: ignore[arg-type, assignment]

    def train_adapters(model: Decoder) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
        losses = []
        for _ in range(3):
            for _ in range(2):
                losses.append(loss_of(model, tokens))
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach().cpu() for loss in losses] + [p.detach().cpu().clone() for p in model.parameters()]

    plain = large_decoder().requires_grad_(False)
    adapt(plain)
    plain.to(compute_device)
    tokens = tokens.to(compute_device)
    expected = train_adapters(plain)
    model = large_decoder().requires_grad_(False)
    with headrace.offload(
        model, device=compute_device, device_memory=weight_bytes(model), host_memory=host_memory, disk=tmp_path
    ) as handle:
        loss_of(model, tokens)
        adapt(model)
        assert_same(train_adapters(model), expected)
        stats = handle.stats()
        assert stats.host_peak_bytes <= parse_bytes(host_memory, name="host_memory")
        assert stats.disk_bytes > 0
        assert stats.fetch_bytes > 0


def test_no_room_for_adapters_names_what_to_raise(tokens: torch.Tensor, tmp_path: Path):
    """Every parameter's memory is in a user's hands: no block can move."""
    model = large_decoder().requires_grad_(False)
    nbytes = 483328  # of all blocks, in whole pages
    with headrace.offload(
        model, device="cpu", device_memory=2 * weight_bytes(model), host_memory=nbytes, disk=tmp_path
    ):
        loss_of(model, tokens)
        held = [p.data for p in model.parameters()]
        model.register_parameter("scale", nn.Parameter(torch.ones(5000)))
        with pytest.raises(BudgetError, match=r"host_memory=.* is full, .*\(none that somebody refers to.*raise"):
            loss_of(model, tokens)
        del held
        model.requires_grad_(False)
        assert loss_of(model, tokens).isfinite()


def test_a_model_goes_on_when_the_disk_has_room_again(tokens: torch.Tensor, tmp_path: Path, monkeypatch):
    """Weights that an optimizer wrote do not reach the disk, and the pass says so; later the next but one is right."""

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    plain = train(large_decoder(), tokens, count=3)
    model = large_decoder()
    with offload(model, torch.device("cpu"), tmp_path) as handle:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            with monkeypatch.context() as patch:
                patch.setattr(Mapping, "flush", refuse)
                if step:
                    for _ in range(2):
                        with pytest.raises(DiskError, match="through memory did not reach the disk: No space left"):
                            loss_of(model, (tokens + step) % 128)
            with contextlib.suppress(DiskError):  # of what was fetched ahead while the disk was full
                loss_of(model, (tokens + step) % 128)
            losses.append(loss_of(model, (tokens + step) % 128))
            losses[-1].backward()
            optimizer.step()
        assert_same([loss.detach() for loss in losses], plain.outputs)
        assert_same(dict(model.named_parameters()), plain.parameters)
        assert handle.stats().fetch_bytes > 0


def test_a_weight_that_changed_on_disk_is_named(tokens: torch.Tensor, tmp_path: Path):
    def run(passes: int) -> None:
        for _ in range(passes):
            loss_of(model, tokens)

    model = large_decoder().requires_grad_(False)
    with offload(model, torch.device("cpu"), tmp_path) as handle:
        run(1)
        handle.synchronize()
        block = next(block for block in reversed(handle.settled_blocks("a look")) if block.is_fetched)
        extent = block.rest.extent  # type: ignore[attr-defined]
        with open(spill_file(tmp_path), "r+b") as file:
            at = extent.offset + extent.nbytes // 2
            os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at)[0] ^ 1]), at)
        with pytest.raises(DiskError, match=rf"'{block.name}': .* are not those that were written"):
            run(3)  # it may have been on its way already


def test_what_a_module_writes_to_its_weights_reaches_the_disk(compute_device: torch.device, tokens, tmp_path: Path):
    """A copy to the home leaves no trace in its version, and has to reach the file all the same."""

    class Clamped(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(0.9)
            return super().forward(hidden)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Clamped(64, 64) for _ in range(12)))

    hidden = torch.ones(2, 64)
    plain, model = make().to(compute_device), make()
    with (
        headrace.offload(
            model, device=compute_device, device_memory="64KiB", host_memory="64KiB", disk=tmp_path
        ) as handle,
        torch.no_grad(),
    ):
        for _ in range(4):
            assert torch.equal(model(hidden).cpu(), plain(hidden.to(compute_device)).cpu())
        assert handle.stats().fetch_bytes > 0


@pytest.mark.parametrize("host_memory", ["64KiB", "16MiB"])
def test_writes_to_memory_of_a_checkpoint_before_offload_are_kept(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, host_memory: str
):
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in large_decoder().state_dict().items()}, path)
    before = path.read_bytes()

    def write(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("layers.2.up.weight").zero_()
            model.get_parameter("head.weight").data.mul_(2)  # which leaves no trace in the version
            model.get_parameter("layers.5.down.weight").data[3, 4] = 7.0

    plain = large_decoder().requires_grad_(False).to(compute_device)
    write(plain)
    checkpoint = Checkpoint(path, Ledger())
    with torch.device("meta"):
        model = Decoder(layers=6, width=64, vocabulary=128)
    model.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.records}, assign=True)
    model.requires_grad_(False)
    write(model)
    with headrace.offload(
        model,
        device=compute_device,
        device_memory=weight_bytes(plain) // 3,
        host_memory=host_memory,
        disk=tmp_path / "disk",
        checkpoint=checkpoint,
    ) as handle:
        for _ in range(2):
            assert torch.equal(loss_of(model, tokens), loss_of(plain, tokens.to(compute_device)))
        if host_memory == "64KiB":
            assert handle.stats().fetch_bytes > weight_bytes(plain)
            assert 0 < handle.stats().disk_bytes < weight_bytes(plain)  # what was not written to stays there
    assert path.read_bytes() == before


@pytest.mark.core(tier="disk")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_activations_that_find_no_room_beside_weights_stay(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, tier: str
):
    """Weights and gradients leave them more than their share of host memory, but less than they take."""

    def batch() -> torch.Tensor:
        return tokens.repeat(64, 4)

    plain = train(large_decoder().to(compute_device), batch().to(compute_device))
    model = large_decoder()
    host_bytes = 3 * weight_bytes(model)
    with headrace.offload(
        model,
        device=compute_device,
        device_memory=weight_bytes(model) // 3,
        host_memory=host_bytes,
        disk=tmp_path,
        activations={"min_bytes": 4096, "tier": tier},
    ) as handle:
        assert_same(train(model, batch()), plain)
        stats = handle.stats()
        assert handle.activations is not None
        assert handle.activations.stats().offload_bytes > 0
        assert 2 * weight_bytes(model) < stats.host_peak_bytes <= host_bytes
        assert stats.fetch_bytes == 0  # no weights are on disk
