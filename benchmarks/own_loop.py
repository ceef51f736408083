"""What does a training loop of one's own hold on the device, with offloading and without? DiffSynth-Studio's example.

    PYTHONPATH=. python benchmarks/own_loop.py

Its page on offload training: ten layers of 4096 x 4096 in float32, AdamW, 512 rows; 4 GB of a GPU, 1.4 GB with its
offloading. Here the allocator's peak of the emulated accelerator over a few steps; a GPU's driver takes memory besides.
"""

import gc

import torch
from torch import nn

from emulator import emu
from headrace.compat import OffloadTrainingManager

WIDTH, LAYERS, ROWS, STEPS = 4096, 10, 512, 6
PUBLISHED_GB = {False: 4.0, True: 1.4}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.layer_norm(x, (WIDTH,)))
        return x


def peak_bytes(offloads: bool) -> int:
    """The most that the device holds in a few steps."""
    emu.reset(dry_run=True, device_memory=16 << 30, pinned_memory=16 << 30)
    model = Layers().to("cpu" if offloads else "emu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    manager = OffloadTrainingManager(model, "emu", enable_optimizer_cpu_offload=True) if offloads else None
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(STEPS):
        x = torch.randn((ROWS, WIDTH), device="emu")
        nn.functional.mse_loss(model(x), x + 1).backward()
        if manager is not None:
            manager.after_backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    peak: int = torch.accelerator.max_memory_allocated()
    if manager is not None:
        manager.remove()
    return peak


def main() -> None:
    for offloads, name in ((False, "plain"), (True, "offloaded")):
        print(f"{name:10} {peak_bytes(offloads) / 1e9:5.2f} GB (published: {PUBLISHED_GB[offloads]} GB)", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
