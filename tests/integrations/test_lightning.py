"""Does Lightning's Trainer fit an offloaded model with our optimizers, clip, save and resume, bit for bit?"""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import headrace
from headrace.optim import AdamW
from tests.support.compare import assert_same

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*LeafSpec.*", "ignore:.*val_dataloader.*"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


class Learner(lightning.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(5)]
        self.model = nn.Sequential(*layers, nn.Linear(64, 4))
        self.options = options
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = functional.cross_entropy(self.model(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        if self.options:
            optimizer = AdamW(self.model.parameters(), lr=0.01, **self.options)
        else:
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def fit(learner: Learner, epochs: int, resume_from: Path | None = None, **settings: Any) -> lightning.Trainer:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(64, 64, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False} | settings
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", gradient_clip_val=1.0, enable_model_summary=False, **settings
    )
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
    trainer.fit(learner, loader, ckpt_path=resume_from, weights_only=True)
    return trainer


@pytest.mark.extended
@pytest.mark.parametrize("options", [{"overlap": "none"}, {"overlap": "forward"}, {"tier": "disk"}], ids=str)
def test_fit_clip_save_and_resume(options: dict[str, Any], tmp_path: Path) -> None:
    if "tier" in options:
        options = options | {"disk": tmp_path}
    plain, whole, first, second = Learner(), Learner(**options), Learner(**options), Learner(**options)
    fit(plain, 4)
    for learner, epochs, saved, resumed in (
        (whole, 4, None, None),
        (first, 2, tmp_path / "c.ckpt", None),
        (second, 4, None, tmp_path / "c.ckpt"),
    ):
        with headrace.offload(learner.model, device="cpu", device_memory=3 * 65 * 64 * 4) as handle:
            trainer = fit(learner, epochs, resumed)
            if saved is not None:
                trainer.save_checkpoint(saved, weights_only=False)
            assert handle.stats().onload_bytes > 0
            assert handle.stats().steps == len(learner.losses)
    assert plain.losses == whole.losses == [*first.losses, *second.losses]
    for one, other, resumed_one in zip(plain.parameters(), whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, resumed_one)


def content_of(checkpoint: Path) -> Any:
    """What is in it: of whichever device the run was, its tensors are on the host."""
    content = torch.load(checkpoint, weights_only=False)
    assert all(leaf.device.type == "cpu" for leaf in tree_leaves(content) if isinstance(leaf, torch.Tensor))
    return content


def checkpointing(directory: Path, learner: Learner, epochs: int, resume_from: Path | None = None) -> Path:
    """Trains with Trainer's own ModelCheckpoint, every epoch's; returns the newest one."""
    saved = lightning.pytorch.callbacks.ModelCheckpoint(directory, "{epoch}", save_top_k=-1, save_weights_only=False)
    fit(learner, epochs, resume_from, callbacks=[saved], enable_checkpointing=True)
    return Path(saved.best_model_path)


def test_checkpoints_of_model_checkpoint_are_those_of_a_plain_run(tmp_path: Path) -> None:
    """Either run goes on from the other's, and ends with the same bits."""
    where = {"device": "cpu", "device_memory": 3 * 65 * 64 * 4}
    runs = {name: Learner() for name in ("whole", "plain", "offloaded", "on", "from plain", "without")}
    whole, saved = runs["whole"], tmp_path / "offloaded"
    checkpointing(tmp_path / "whole", whole, 4)
    of_plain = checkpointing(tmp_path / "plain", runs["plain"], 2)
    with headrace.offload(runs["offloaded"].model, **where) as handle:
        of_offloaded = checkpointing(saved, runs["offloaded"], 2)
        assert handle.stats().onload_bytes > 0
    contents = [content_of(path) for path in (of_plain, of_offloaded)]
    for content in contents:
        content.pop("callbacks")  # the paths of checkpoints
    of_plain_run, of_offloaded_run = contents
    assert_same(of_offloaded_run, of_plain_run)
    checkpointing(tmp_path / "without", runs["without"], 4, of_offloaded)
    for name, checkpoint in (("on", of_offloaded), ("from plain", of_plain)):
        with headrace.offload(runs[name].model, **where):
            checkpointing(tmp_path / name, runs[name], 4, checkpoint)
    for name in ("without", "on", "from plain"):
        assert [*runs["plain"].losses, *runs[name].losses] == whole.losses, name
        assert all(map(torch.equal, runs[name].parameters(), whole.parameters())), name


def fabric_run(learner: Learner, steps: int, to: Path, resume_from: Path | None = None) -> list[float]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=0.01, fused=True)
    model, optimizer = fabric.setup(learner.model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resume_from is not None:
        fabric.load(resume_from, state)
    losses = []
    for step in range(state["step"], steps):
        loss = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fabric.save(to, state | {"step": steps})
    return losses


def test_checkpoints_of_fabric_are_those_of_a_plain_run(tmp_path: Path) -> None:
    plain, first, second = Learner(), Learner(), Learner()
    expected = fabric_run(plain, 4, tmp_path / "plain.ckpt")
    fabric_run(Learner(), 2, tmp_path / "plain-2.ckpt")
    losses = []
    for learner, steps, name, resumed in ((first, 2, "2.ckpt", None), (second, 4, "4.ckpt", tmp_path / "2.ckpt")):
        with headrace.offload(learner.model, device="cpu", device_memory=3 * 65 * 64 * 4) as handle:
            losses += fabric_run(learner, steps, tmp_path / name, resumed)
            assert handle.stats().onload_bytes > 0
    assert losses == expected
    for one, other in (("plain.ckpt", "4.ckpt"), ("plain-2.ckpt", "2.ckpt")):
        assert_same(*(content_of(tmp_path / name) for name in (one, other)))
