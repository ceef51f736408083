"""What does a visit cost the host? Microseconds per block visit of 12 parameters, in forward and backward.

    python benchmarks/overhead.py [--device cpu|emu|cuda]

Blocks are tiny, so that what remains is the Python and PyTorch work of a visit: streamed (loaded, bound, packed,
evicted) and resident (bound and packed). Plain and offloaded passes alternate in one run; medians of their differences
are shown. On the emulated accelerator (the default: its kernels are not run) copies cost what it takes to enqueue them
there; on the CPU each copy wakes a thread.
"""

import argparse
import copy
import statistics
import time

import torch
from torch import nn

import millrace

BLOCKS = 48
WIDTH = 8
ROUNDS = 40
PARAMETERS = 12


class Layer(nn.Module):
    """Twelve parameters: four linear layers and two normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.linears[1](self.linears[0](self.norms[0](hidden)))
        return self.linears[3](self.linears[2](self.norms[1](hidden)))


def pass_seconds(model: nn.Module, hidden: torch.Tensor) -> tuple[float, float]:
    begin = time.perf_counter()
    loss = model(hidden).sum()
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    model.zero_grad(set_to_none=True)
    return middle - begin, end - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="emu")
    device = parser.parse_args().device
    if device == "emu":
        from emulator import emu

        emu.reset(scheduler="lazy", dry_run=True, race_detector=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(BLOCKS)))
    block_bytes = sum(parameter.nbytes for parameter in plain[0].parameters())
    hidden = torch.randn(4, WIDTH, device=device)
    plain_on_device = copy.deepcopy(plain).to(device)
    print(f"host microseconds per visit of a block with {PARAMETERS} parameters, {BLOCKS} blocks, {ROUNDS} rounds")
    print(f"{'':12}{'forward':>10}{'backward':>10}   plain: forward, backward")
    for name, blocks in (("streamed", 4), ("resident", 3 * BLOCKS)):
        model = copy.deepcopy(plain)
        budget_bytes = blocks * (block_bytes + PARAMETERS * 64)
        with millrace.offload(model, device=device, device_memory=budget_bytes, blocks=list(model)):
            for _ in range(6):
                pass_seconds(model, hidden)
            pairs = [(pass_seconds(plain_on_device, hidden), pass_seconds(model, hidden)) for _ in range(ROUNDS)]
        cost = [statistics.median(ours[part] - theirs[part] for theirs, ours in pairs) for part in (0, 1)]
        own = [statistics.median(theirs[part] for theirs, _ in pairs) for part in (0, 1)]
        row = "".join(f"{seconds / BLOCKS * 1e6:10.0f}" for seconds in (*cost, *own))
        print(f"{name:12}{row[:20]}   {row[20:]}")


if __name__ == "__main__":
    main()
