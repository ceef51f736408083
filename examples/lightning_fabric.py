"""How does a loop with Lightning Fabric train an offloaded model, save it and go on? Offload before `setup`."""

import lightning
import tiny
import torch

import headrace

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights


def main(device=None, device_memory=DEVICE_MEMORY, offload=True, epochs=1, checkpoints=None, resume_from=None):
    fabric = lightning.Fabric(accelerator="cpu" if str(device) == "cpu" else "auto", devices=1)
    model = tiny.llama()
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer = fabric.setup(model, optimizer)
    state = {"model": wrapped, "optimizer": optimizer, "epoch": 0}
    if resume_from is not None:
        fabric.load(resume_from, state)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(tiny.batches(), batch_size=None))
    for epoch in range(state["epoch"], epochs):
        for batch in loader:
            fabric.backward(wrapped(**batch).loss)
            fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        if checkpoints is not None:
            fabric.save(f"{checkpoints}/epoch={epoch}.ckpt", state | {"epoch": epoch + 1})
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
