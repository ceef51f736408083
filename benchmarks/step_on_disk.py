"""How long does an optimizer's step take where weights, gradients and state rest on disk? Both ways, side by side.

    python benchmarks/step_on_disk.py [--size 12GiB] [--rounds 3] [--directory .]

A bfloat16 Llama in a memory cgroup, as in larger_than_ram.py; one backward, and steps of headrace's SGD with
`tier="disk"` (whose state is the bits that bfloat16 lacks). Timed are

- moving: blocks of a checkpoint go to the store before the first step; every other block as an image past the page
  cache, and then the rest through the memory that shows both files.
- step: in files, and through the memory that shows them, in turn; until all is written.
- drive: the bytes that a step in files moves, by a plain loop of direct requests.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
from disk_overlap import drive
from larger_than_ram import ALLOWANCE_BYTES, LAYER_BYTES, config_of, interpreter_bytes, run_capped, write

import headrace
from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes
from headrace.optim import elements
from headrace.weights.rest.rests import CheckpointRest

BYTES_READ, BYTES_WRITTEN = 6, 4  # for each parameter: weight, gradient and remainder; weight and remainder
PARTS = 4  # of what the plain loop moves: the file that it writes has room for one


def child(directory: Path, host_memory: str, device_memory: str, rounds: int) -> None:
    """In the capped process. Prints a line of JSON."""
    model, handle = headrace.from_pretrained(
        directory, device="cpu", host_memory=host_memory, device_memory=device_memory, disk=directory / "spill"
    )
    tokens = torch.arange(16).view(1, -1)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    store = handle._tiers.store
    assert store is not None

    def timed(run: Callable[[], None]) -> float:
        begin = time.perf_counter()
        run()
        handle.synchronize()
        os.fsync(store._file.descriptor)
        return time.perf_counter() - begin

    blocks = [block for block in handle.settled_blocks("this benchmark") if not block.rest.writable]
    halves = {"files": blocks[::2], "memory": blocks[1::2]}
    found: dict[str, list[float]] = {}
    for way, half in halves.items():
        with mock.patch.object(CheckpointRest, "is_as_in_files", way == "files"):
            taken = timed(lambda half=half: [block.make_writable() for block in half] and None)
        found[f"moving by {way}, GB/s"] = [sum(block.nbytes for block in half) / taken / 1e9]
    optimizer = headrace.optim.SGD(model.parameters(), lr=1e-3, tier="disk", disk=directory / "state")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    target = directory / "written"
    with target.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, BYTES_WRITTEN * parameters // PARTS)
    files = sorted(directory.glob("*.safetensors"))

    def step() -> None:
        optimizer.step()
        optimizer._states.disk.synchronize()  # type: ignore[union-attr]

    divide = elements.in_files
    for number in range(rounds + 1):  # the first finds no state
        for way in ("files", "memory", "drive")[:: 1 if number % 2 else -1]:
            if way == "drive":
                begin = time.perf_counter()
                for _ in range(PARTS):
                    drive(files, target, BYTES_READ * parameters // PARTS, BYTES_WRITTEN * parameters // PARTS)
                taken = time.perf_counter() - begin
            else:
                with mock.patch.object(elements, "in_files", divide if way == "files" else lambda one: ([], one)):
                    taken = timed(step)
            if number:
                found.setdefault(f"{way}, s", []).append(taken)
            print(number, way, taken, file=sys.stderr, flush=True)
    handle.remove()
    print(json.dumps(found))


def main() -> None:
    """Parses, writes, runs, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="12GiB")
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--device-memory", default="512MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.host_memory, arguments.device_memory, arguments.rounds)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        size = write(config_of(parse_bytes(arguments.size)), Path(name))
        os.sync()
        budgets = parse_bytes(arguments.host_memory) + parse_bytes(arguments.device_memory)
        limit = interpreter_bytes() + budgets + 2 * LAYER_BYTES + ALLOWANCE_BYTES
        command = [__file__, "--child", name, "--host-memory", arguments.host_memory]
        command += ["--device-memory", arguments.device_memory, "--rounds", str(arguments.rounds)]
        found, _ = run_capped(command, limit, f"{format_bytes(size)} of weights, load {os.getloadavg()[0]:.1f}")
        for what, values in found.items():
            print(f"{what}: {statistics.median(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})")
        pairs = zip(found["memory, s"], found["files, s"], strict=True)
        print(f"through memory / in files: {statistics.median(a / b for a, b in pairs):.2f}")


if __name__ == "__main__":
    with without_noise():
        main()
