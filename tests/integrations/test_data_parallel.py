"""Do trainers that wrap models for data parallel training by themselves refuse offloaded ones, in every process?"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import pytest
import torch

import headrace
from tests.integrations.test_lightning import Learner, fit
from tests.support.models import linears
from tests.support.nursery import Nursery

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*LeafSpec.*", "ignore:.*val_dataloader.*")

# As torchrun starts them.
START = """
import os, sys, torch, headrace, warnings
from torch import nn
rank, port, trainer, directory = sys.argv[1:]
os.environ.update(
    RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    GLOO_SOCKET_IFNAME="lo",
)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))

    def forward(self, x):
        return {"loss": self.layers(x).square().mean()}

model = Model()
before = [parameter.detach().clone() for parameter in model.parameters()]
headrace.offload(model, device="cpu", device_memory=3000)
try:
    if trainer == "accelerate":
        from accelerate import Accelerator
        Accelerator(cpu=True).prepare(model)
    else:
        from transformers import Trainer, TrainingArguments
        settings = TrainingArguments(
            directory, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
        )
        Trainer(model, settings, train_dataset=[{"x": torch.ones(16)}] * 8).train()
except headrace.StateError as error:
    print(error)
model(torch.ones(2, 16))["loss"].backward()
assert all(map(torch.equal, model.parameters(), before))
torch.distributed.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.parametrize("trainer", ["accelerate", "transformers"])
def test_processes_of_torchrun(trainer: str, nursery: Nursery, tmp_path: Path) -> None:
    port = _free_port()
    ranks = [nursery.start(START, rank, port, trainer, tmp_path) for rank in range(2)]
    for rank in ranks:
        assert "each rank would train a model of its own" in rank.read_rest(), rank.errors
        assert rank.wait() == 0, rank.errors


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Lightning leaves there what a process of a group has (RANK, WORLD_SIZE, ...), which accelerate would believe."""
    with mock.patch.dict(os.environ):
        yield


@pytest.mark.usefixtures("own_environment")
def test_fabric() -> None:
    model = linears(6, 16)
    headrace.offload(model, device="cpu", device_memory=3000)
    fabric = lightning.Fabric(accelerator="cpu", devices=1, strategy="ddp")
    fabric.launch()
    try:
        with pytest.raises(headrace.StateError, match="each rank would train a model of its own"):
            fabric.setup(model)
    finally:
        torch.distributed.destroy_process_group()
    model(torch.ones(2, 16)).sum().backward()


class Late(Learner):
    """Offloads when the trainer has wrapped it."""

    def on_train_start(self) -> None:
        headrace.offload(self.model, device="cpu", device_memory=40_000)


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize("when", ["before", "later"])
def test_lightning(when: str) -> None:
    learner: Any = Learner() if when == "before" else Late()
    if when == "before":
        headrace.offload(learner.model, device="cpu", device_memory=40_000)
    try:
        with pytest.raises(headrace.StateError, match="would never see"):
            fit(learner, 1, strategy="ddp", devices=1)
    finally:
        torch.distributed.destroy_process_group()
    assert learner.losses == []


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
