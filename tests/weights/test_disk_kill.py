"""What does a process that dies in the middle of training on disk leave behind? Nothing: the next one starts clean."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.models import large_decoder
from tests.support.nursery import Nursery

TRAINING = """
import sys, torch, headrace
from headrace.planning import search
from tests.support.loops import loss_of
from tests.support.models import Decoder
search.TRIALS = 20
path, disk, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
with torch.device("meta"):
    model = Decoder(layers=6, width=64, vocabulary=128)
handle = headrace.offload(
    model, device="cpu", device_memory="160KiB", host_memory="96KiB", disk=disk + "/weights", checkpoint=path
)
optimizer = headrace.optim.AdamW(model.parameters(), lr=1e-2, tier="disk", disk=disk + "/state", overlap="forward")
tokens = torch.arange(16).view(2, 8)
for step in range(steps):
    loss = loss_of(model, (tokens + step) % 128)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
assert handle.stats().spill_bytes > 0
"""


@pytest.mark.core(how="SIGKILL")
@pytest.mark.parametrize(("how", "lines"), [("SIGKILL", 3), ("SIGTERM", 2), ("SIGINT", 1)])
def test_a_training_that_is_killed_leaves_nothing(how: str, lines: int, nursery: Nursery, tmp_path: Path) -> None:
    checkpoint, disk = tmp_path / "model.safetensors", tmp_path / "disk"
    save_file({name: tensor.contiguous() for name, tensor in large_decoder().state_dict().items()}, checkpoint)
    before = checkpoint.read_bytes()
    process = nursery.start(TRAINING, checkpoint, disk, 1_000_000)
    seen = [process.read_line() for _ in range(lines)]
    torch.ones(int.from_bytes(os.urandom(2), "little")).cumsum(0).sum().item()  # at any moment of a step
    process.send(getattr(signal, how))
    process.read_rest()
    assert process.wait() == -getattr(signal, how), process.errors
    assert checkpoint.read_bytes() == before
    left = [path for path in disk.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 100  # a lock's number at most: its lock has gone with its owner
    process = nursery.start(TRAINING, checkpoint, disk, lines)
    assert process.read_rest() == "".join(seen)
    assert process.wait() == 0, process.errors
    assert checkpoint.read_bytes() == before
    assert [path for path in disk.rglob("*") if path.is_file()] == []
