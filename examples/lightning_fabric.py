"""How does a loop with Lightning Fabric train an offloaded model? Offload before `setup`."""

import lightning
import tiny
import torch

import millrace


def main(device=None, device_memory="2MiB", offload=True):
    fabric = lightning.Fabric(accelerator="cpu" if str(device) == "cpu" else "auto", devices=1)
    model = tiny.llama()
    handle = millrace.offload(model, device=device, device_memory=device_memory) if offload else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped, optimizer = fabric.setup(model, optimizer)
    for batch in fabric.setup_dataloaders(torch.utils.data.DataLoader(tiny.batches(), batch_size=None)):
        fabric.backward(wrapped(**batch).loss)
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory="2MiB"))
    print(handle.report())
