"""What does a visit cost the host, beside what the layer itself costs it? For layers of 12 small parameters.

    python benchmarks/overhead.py [--device cpu|emu|cuda] [--rounds 40]

Layers are tiny, so that what remains is the Python and PyTorch work of a visit: streamed (loaded, bound, packed,
evicted), and resident, where everything fits and stays. Plain and offloaded passes alternate in one run. Shown are the
CPU seconds of the calling thread, in backward of all threads: the least of all rounds, and what ours has more, also as
a share of the plain layer's own. The last row is a step of decoding, all weights resident, of layers that compute for
about 200 us. On the emulated accelerator (the default: its kernels are not run) copies cost what it takes to enqueue
them there; on the CPU each copy wakes a thread.
"""

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import nn

import headrace

BLOCKS = 48
WIDTH = 8
DECODING_WIDTH = 192
PARAMETERS = 12


class Layer(nn.Module):
    """Twelve parameters: four linear layers and two normalisations."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.linears[1](self.linears[0](self.norms[0](hidden)))
        return self.linears[3](self.linears[2](self.norms[1](hidden)))


def train(model: nn.Module, hidden: torch.Tensor) -> tuple[float, ...]:
    """Seconds of forward and backward."""
    begin = time.thread_time()
    loss = model(hidden).sum()
    forward = time.thread_time() - begin
    begin = time.process_time()  # autograd has threads of its own on an accelerator
    loss.backward()
    backward = time.process_time() - begin
    model.zero_grad(set_to_none=True)
    return forward, backward


@torch.inference_mode()
def infer(model: nn.Module, hidden: torch.Tensor) -> tuple[float, ...]:
    begin = time.thread_time()
    model(hidden)
    return (time.thread_time() - begin,)


def compared(
    run: Callable[[nn.Module, torch.Tensor], tuple[float, ...]],
    plain: nn.Module,
    device: str,
    blocks: int,
    rounds: int,
    hidden: torch.Tensor,
) -> list[tuple[float, float]]:
    """For each part of the run: seconds of the plain layer, and what ours takes more. The budget holds `blocks`."""
    block_bytes = sum(parameter.nbytes for parameter in plain[0].parameters()) + PARAMETERS * 64
    model, on_device = copy.deepcopy(plain), copy.deepcopy(plain).to(device)
    with headrace.offload(model, device=device, device_memory=blocks * block_bytes, blocks=list(model)):
        for _ in range(6):
            run(model, hidden)
        pairs = [(run(on_device, hidden), run(model, hidden)) for _ in range(rounds)]
    own = [min(times) / len(plain) for times in zip(*(theirs for theirs, _ in pairs), strict=True)]
    ours = [min(times) / len(plain) for times in zip(*(ours for _, ours in pairs), strict=True)]
    return [(theirs, our - theirs) for theirs, our in zip(own, ours, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="emu")
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    device, rounds = chosen.device, chosen.rounds
    if device == "emu":
        from emulator import emu

        emu.reset(scheduler="lazy", dry_run=True, race_detector=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(BLOCKS)))
    hidden = torch.randn(4, WIDTH, device=device)
    print(f"host microseconds of a layer of {PARAMETERS} parameters, {BLOCKS} layers, {rounds} rounds, on {device}")
    print(f"{'':24}{'plain':>8}{'more':>8}{'more/plain':>12}")
    for name, blocks in (("streamed", 4), ("resident", 3 * BLOCKS)):
        pair = (compared(run, plain, device, blocks, rounds, hidden) for run in (train, infer))
        rows = [row for found in pair for row in found]
        for part, (own, more) in zip(("forward", "backward", "inference"), rows, strict=True):
            print(f"{f'{name} {part}':24}{own * 1e6:8.0f}{more * 1e6:8.0f}{more / own:12.2f}")
    wide = nn.Sequential(*(Layer(DECODING_WIDTH) for _ in range(BLOCKS)))
    own, more = compared(infer, wide, device, 3 * BLOCKS, rounds, torch.randn(1, DECODING_WIDTH, device=device))[0]
    print(f"{'decoding, resident':24}{own * 1e6:8.0f}{more * 1e6:8.0f}{more / own:12.2f}")


if __name__ == "__main__":
    main()
