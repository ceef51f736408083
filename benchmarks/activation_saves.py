"""What does a saved tensor cost the host, and does that depend on how many there are? On the CPU, in processor time.

    PYTHONPATH=. python benchmarks/activation_saves.py [--quick]

A chain of tanh, each of which saves its output. Microseconds that the thread of the step computes for each save,
forward and backward together, less those without headrace; the medians of rounds. `recorded` is the first forward, with
the plan that is made of it; `planned` goes as planned, and everything stays; at `other sizes` every forward has a shape
of its own, and there is room for all; at `ceiling` there is room for a quarter.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import headrace

ROWS, LEAST_WIDTH, WIDTHS = 64, 16, 97
SETTLED_AFTER = 3


class Chain(nn.Module):
    """Saves as many tensors."""

    def __init__(self, saves: int) -> None:
        super().__init__()
        self.saves = saves
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * self.weight
        for _ in range(self.saves):
            hidden = torch.tanh(hidden)
        return hidden


def microseconds(model: Chain, width: int) -> float:
    """For each save, of this thread."""
    began = time.thread_time()
    model(torch.ones(ROWS, width)).sum().backward()
    return (time.thread_time() - began) / model.saves * 1e6


def measure(saves: int, width: Callable[[int], int], device_memory: int, rounds: int) -> tuple[float, float]:
    """Of the first step, and of those that come when it has settled."""
    model = Chain(saves)
    plain = statistics.median(microseconds(model, width(index)) for index in range(SETTLED_AFTER))
    with headrace.offload_activations(model, min_bytes=0, device_memory=device_memory):
        steps = [microseconds(model, width(index)) - plain for index in range(SETTLED_AFTER + rounds)]
    return steps[0], statistics.median(steps[SETTLED_AFTER:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few saves, few rounds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 3 if arguments.quick else 7
    print(f"{'saves':>8} {'recorded':>12} {'planned':>12} {'other sizes':>12} {'ceiling':>12}  us per save")
    for saves in (200, 800) if arguments.quick else (200, 800, 1600, 6400):
        quarter_bytes = saves * ROWS * (LEAST_WIDTH + SETTLED_AFTER) * 4 // 4
        recorded, planned = measure(saves, lambda index: LEAST_WIDTH, 1 << 30, rounds)
        _, other = measure(saves, lambda index: LEAST_WIDTH + index % WIDTHS, 1 << 30, rounds)
        _, ceiling = measure(saves, lambda index: LEAST_WIDTH + index % WIDTHS, quarter_bytes, rounds)
        print(f"{saves:8} {recorded:12.0f} {planned:12.0f} {other:12.0f} {ceiling:12.0f}", flush=True)


if __name__ == "__main__":
    main()
