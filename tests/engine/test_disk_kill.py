"""What does a process that dies in the middle of training on disk leave behind? Nothing: the next one starts clean."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.test_disk_tier import build

TRAINING = """
import sys, torch, millrace
from tests.engine.models import Decoder, loss_of, weight_bytes
path, disk, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
with torch.device("meta"):
    model = Decoder(layers=6, width=64, vocabulary=128)
handle = millrace.offload(
    model, device="cpu", device_memory="160KiB", host_memory="96KiB", disk=disk + "/weights", checkpoint=path
)
optimizer = millrace.optim.AdamW(model.parameters(), lr=1e-2, tier="disk", disk=disk + "/state", overlap="forward")
tokens = torch.arange(16).view(2, 8)
for step in range(steps):
    loss = loss_of(model, (tokens + step) % 128)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), flush=True)
assert handle.stats().spill_bytes > 0
"""


def start(checkpoint: Path, disk: Path, steps: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "ignore", "-c", TRAINING, str(checkpoint), str(disk), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("how", "lines"), [("SIGKILL", 3), ("SIGTERM", 2), ("SIGINT", 1)])
def test_a_training_that_is_killed_leaves_nothing(how: str, lines: int, tmp_path: Path) -> None:
    checkpoint, disk = tmp_path / "model.safetensors", tmp_path / "disk"
    save_file({name: tensor.contiguous() for name, tensor in build().state_dict().items()}, checkpoint)
    before = checkpoint.read_bytes()
    with start(checkpoint, disk, 1_000_000) as process:
        assert process.stdout is not None
        seen = [process.stdout.readline() for _ in range(lines)]
        torch.ones(int.from_bytes(os.urandom(2), "little")).cumsum(0).sum().item()  # at any moment of a step
        process.send_signal(getattr(signal, how))
        output, errors = process.communicate(timeout=60)
    assert process.returncode == -getattr(signal, how), errors
    assert checkpoint.read_bytes() == before
    left = [path for path in disk.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in left) < 100  # a lock's number at most: its lock has gone with its owner
    with start(checkpoint, disk, lines) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.splitlines() == [line.strip() for line in seen]
    assert checkpoint.read_bytes() == before
    assert [path for path in disk.rglob("*") if path.is_file()] == []
