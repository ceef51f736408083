"""How does a loop with accelerate train an offloaded model? Offload before `prepare`, which then leaves it in place."""

import tiny
import torch
from accelerate import Accelerator

import headrace

DEVICE_MEMORY = "2MiB"  # for 4.2 MiB of weights


def main(device=None, device_memory=DEVICE_MEMORY, offload=True):
    accelerator = Accelerator(cpu=str(device) == "cpu", gradient_accumulation_steps=2)
    model = tiny.llama()
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(tiny.batches(), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
