"""How does Lightning's Trainer fit an offloaded model, save it and go on? Offload it before `fit`."""

import lightning
import tiny
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import headrace

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights


class Learner(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return headrace.optim.AdamW(self.model.parameters(), lr=1e-3, overlap="forward")


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, epochs=1, checkpoints=None, resume_from=None):
    model = tiny.llama()
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    trainer = lightning.Trainer(
        accelerator="cpu" if str(device) == "cpu" else "auto",
        max_epochs=epochs,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=checkpoints is not None,  # also to go on from one: Lightning wants the same callbacks
        callbacks=[ModelCheckpoint(checkpoints, "{epoch}", save_top_k=-1)] if checkpoints is not None else [],
    )
    loader = torch.utils.data.DataLoader(tiny.batches(), batch_size=None)
    trainer.fit(Learner(model), loader, ckpt_path=resume_from)  # None: from the beginning
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
