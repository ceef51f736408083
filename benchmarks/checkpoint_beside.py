"""How much longer is a step beside which a checkpoint is written? Steps with and without one, in turn, in one run.

    python benchmarks/checkpoint_beside.py [--rounds 15] [--directory .]

A decoder of 24 layers, float32, trains with AdamW (`overlap="forward"`) on one thread of the CPU; another core is left
to the threads that save, as a host has beside an accelerator. In every round a step runs alone, and one beside a
checkpoint (`wait=False`). Medians of the rounds' ratios: the step; the call that begins the checkpoint, which waits for
the update that is under way; a call that waits for the whole checkpoint; and how long updates waited.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import headrace
import headrace.optim

LAYERS, WIDTH, TOKENS = 24, 768, 256


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def figures(tier: str, directory: Path, rounds: int) -> list[float]:
    """Medians, over a step alone: a step beside, the call that begins it, one that waits, updates that waited."""
    layer = nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    weights, state = {}, {}
    if tier == "disk":
        weights = {"disk": directory / "weights", "host_memory": nbytes // 2}
        state = {"tier": "disk", "disk": directory / "state"}
    handle = headrace.offload(model, device="cpu", device_memory=nbytes // 3, blocks=[model.layers], **weights)
    optimizer = headrace.optim.AdamW(model.parameters(), lr=1e-4, overlap="forward", **state)
    inputs = torch.randn(1, TOKENS, WIDTH)

    def step() -> None:
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    found = []
    for number in range(rounds):
        alone = seconds(step)
        begin = time.perf_counter()
        saving = headrace.save(directory / f"beside-{number}", model, optimizer, wait=False)
        call = time.perf_counter() - begin
        beside = seconds(step)
        saving.wait()
        step()
        waits = seconds(lambda: headrace.save(directory / "waits", model, optimizer))
        found.append([beside / alone, call / alone, waits / alone, saving.waited_seconds / alone])
        for name in (f"beside-{number}", "waits"):
            shutil.rmtree(directory / name)
    handle.remove()
    return [statistics.median(values) for values in zip(*found, strict=True)]


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'tier':6}{'step beside':>12}{'call':>8}{'waited for':>12}{'updates waited':>16}   a step alone is 1")
    for tier in ("host", "disk"):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            beside, call, waits, waited = figures(tier, Path(name), arguments.rounds)
        print(f"{tier:6}{beside:>12.3f}{call:>8.3f}{waits:>12.3f}{waited:>16.3f}")


if __name__ == "__main__":
    main()
