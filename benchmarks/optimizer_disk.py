"""How close to the drive is an optimizer step whose state rests on disk? Paired with the same bytes moved alone.

    python benchmarks/optimizer_disk.py --disk DIRECTORY [--device cpu|emu|cuda] [--elements 67108864] [--rounds 7]

A step reads and writes 8 bytes of moments for each float32 parameter, and 10 for each bfloat16 one (split master). The
limit is what the drive takes when the same bytes are read and written by the same store, in 8 MiB requests on its
threads, with nothing computed between: reads of one half of a file beside writes of the other, then the other way
round. Rounds alternate; shown are medians and the median of paired ratios. The bar: 0.85 of the limit.

With a device, weights and gradients are there, and it updates (`update="device"`): state comes from the drive and goes
back to it by the host. The emulated one copies, but computes nothing: what is timed there is the way of the state.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from headrace.memory.arena import Arena
from headrace.memory.disk import DiskStore
from headrace.memory.ledger import Ledger
from headrace.optim import AdamW, threads

REQUEST_BYTES = 8 << 20


def step_on_disk(elements: int, dtype: torch.dtype, directory: Path, device: str) -> Callable[[], None]:
    weight = nn.Parameter(torch.randn(elements).to(device, dtype))
    weight.grad = torch.randn(elements).to(device, dtype)
    optimizer = AdamW([weight], tier="disk", disk=directory, update="host" if device == "cpu" else "device")

    def step() -> None:
        optimizer.step()
        if optimizer._states.disk is not None:
            optimizer._states.disk.synchronize()  # what is written behind is part of the step

    return step


def raw(nbytes: int, directory: Path) -> Callable[[], None]:
    """Reads and writes of `nbytes` each, side by side."""
    store = DiskStore(directory, Ledger())
    halves = [store.allocate(name, nbytes // 2, "optimizer") for name in ("one half", "other half")]
    # Memory that begins at a page, as direct I/O wants it: slots that are read into, and written from.
    arena = Arena(16 * REQUEST_BYTES, torch.device("cpu"), Ledger(), "optimizer")
    memory = arena.tensor(0, 16 * REQUEST_BYTES).view(2, 8, REQUEST_BYTES)
    offsets = range(0, nbytes // 2 // REQUEST_BYTES * REQUEST_BYTES, REQUEST_BYTES)

    def both() -> None:
        for reading, writing in (halves, reversed(halves)):
            under_way = []
            for number, offset in enumerate(offsets):
                if number >= 8:
                    for request in under_way[number - 8]:
                        request.synchronize()
                under_way.append(
                    (
                        store.read(reading, memory[0, number % 8], offset),
                        store.write(writing, memory[1, number % 8], offset),
                    )
                )
            store.synchronize()

    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", type=Path, default=None, help="a directory on the drive; default: the temporary one")
    parser.add_argument("--device", choices=("cpu", "emu", "cuda"), default="cpu", help="which one updates")
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(threads.count())
    if arguments.device == "emu":
        from emulator import emu

        emu.reset(scheduler="threads", dry_run=True, race_detector=False, device_memory=8 << 30, pinned_memory=8 << 30)
    with tempfile.TemporaryDirectory(dir=arguments.disk) as made:
        for dtype, bytes_each in ((torch.float32, 8), (torch.bfloat16, 10)):
            directory = Path(made) / str(dtype)
            step = step_on_disk(arguments.elements, dtype, directory / "ours", arguments.device)
            limit = raw(bytes_each * arguments.elements, directory / "raw")
            seconds: dict[str, list[float]] = {"ours": [], "limit": []}
            for number in range(arguments.rounds + 2):
                for name, run in (("ours", step), ("limit", limit)):
                    begin = time.perf_counter()
                    run()
                    if number >= 2:  # the first ones find no state, and memory that was never touched
                        seconds[name].append(time.perf_counter() - begin)
            nbytes = bytes_each * arguments.elements
            ratio = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["limit"], strict=True))
            print(
                f"{dtype}: {arguments.elements / 1e6:.0f} M parameters, {nbytes / 1e9:.2f} GB read and as much written;"
                f" step {statistics.median(seconds['ours']):.2f} s, limit {statistics.median(seconds['limit']):.2f} s"
                f" ({2 * nbytes / 1e9 / statistics.median(seconds['limit']):.2f} GB/s): {ratio:.2f} of it (bar 0.85)",
                flush=True,
            )
            del step, limit


if __name__ == "__main__":
    main()
