"""Does Lightning's Trainer fit an offloaded model with our optimizers, clip, save and resume, bit for bit?"""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import millrace
from millrace.optim import AdamW

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*LeafSpec.*", "ignore:.*val_dataloader.*"),
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
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", gradient_clip_val=1.0, enable_model_summary=False, **quiet, **settings
    )
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
    trainer.fit(learner, loader, ckpt_path=resume_from, weights_only=True)
    return trainer


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
        with millrace.offload(learner.model, device="cpu", device_memory=3 * 65 * 64 * 4) as handle:
            trainer = fit(learner, epochs, resumed)
            if saved is not None:
                trainer.save_checkpoint(saved, weights_only=False)
            assert handle.stats().onload_bytes > 0
            assert handle.stats().steps == len(learner.losses)
    assert plain.losses == whole.losses == [*first.losses, *second.losses]
    for one, other, resumed_one in zip(plain.parameters(), whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, resumed_one)
