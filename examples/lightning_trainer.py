"""How does Lightning's Trainer fit an offloaded model? Offload it before `fit`."""

import lightning
import tiny
import torch

import millrace


class Learner(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return millrace.optim.AdamW(self.model.parameters(), lr=1e-3, overlap="forward")


def main(device=None, device_memory="2MiB", offload=True):
    model = tiny.llama()
    handle = millrace.offload(model, device=device, device_memory=device_memory) if offload else None
    trainer = lightning.Trainer(
        accelerator="cpu" if str(device) == "cpu" else "auto",
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Learner(model), torch.utils.data.DataLoader(tiny.batches(), batch_size=None))
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory="2MiB"))
    print(handle.report())
