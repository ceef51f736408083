"""Are saving and loading done in the memory that a run was given? The kernel kills the process if not.

    PYTHONPATH=. python benchmarks/checkpoint_memory.py [--size 4.5GiB] [--host-memory 256MiB] [--device-memory 192MiB]

Writes a bfloat16 Llama of that size to `--directory`, and starts two processes that live in a memory cgroup of their
budgets, what the interpreter takes, and an allowance: the first maps the model, trains a step (Lion, its state on disk)
and saves; the second loads that checkpoint into a new run and trains a step. For both it prints the most memory that
the process held while it saved and while it loaded (VmHWM), beside what it held before, and what the cgroup counted.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch

import headrace
import headrace.optim
from benchmarks.larger_than_ram import TOKENS, config_of, interpreter_bytes, peak_bytes, run_capped, write
from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes

STAGING_BYTES = 192 << 20  # of the optimizer's state
GRADIENTS_BYTES = 2 * 2 * 4096 * 11008 * 4  # of two blocks, on the CPU as compute device
ALLOWANCE_BYTES = 192 << 20  # activations, and what matrix products take


def anew() -> None:
    """The peak is counted from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(TOKENS).view(1, -1)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def child(directory: Path, host_memory: str, device_memory: str, work: str) -> None:
    """In the capped process. Prints a line of JSON."""
    model, handle = headrace.from_pretrained(
        directory / "model",
        device="cpu",
        host_memory=host_memory,
        device_memory=device_memory,
        blocks="64MiB",
        disk=directory / f"spill-{work}",
    )
    optimizer = headrace.optim.Lion(
        model.parameters(), lr=1e-4, tier="disk", disk=directory / f"state-{work}", state_dtype="8bit"
    )
    step(model, optimizer) if work == "save" else None
    handle.synchronize()
    anew()
    before, begin = peak_bytes(), time.perf_counter()
    if work == "save":
        saving = headrace.save(directory / "checkpoint", model, optimizer)
        nbytes = saving.nbytes
    else:
        headrace.load(directory / "checkpoint", model, optimizer)
        nbytes = sum(path.stat().st_size for path in (directory / "checkpoint").iterdir())
    found = {"before": before, "peak": peak_bytes(), "seconds": time.perf_counter() - begin, "nbytes": nbytes}
    step(model, optimizer)
    found["sum"] = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    print(json.dumps(found))
    handle.remove()


def main() -> None:
    """Parses, writes, runs, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="4.5GiB")
    parser.add_argument("--host-memory", default="256MiB")
    parser.add_argument("--device-memory", default="192MiB")
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    budgets = (arguments.host_memory, arguments.device_memory)
    if arguments.child is not None:
        child(arguments.directory, *budgets, arguments.child)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        (directory / "model").mkdir()
        size = write(config_of(parse_bytes(arguments.size)), directory / "model")
        needed = 8 * size
        if shutil.disk_usage(directory).free < needed:
            sys.exit(f"{directory} has no room for {format_bytes(needed)}: spilled weights, state, and a checkpoint")
        os.sync()
        baseline = interpreter_bytes()
        held = baseline + sum(map(parse_bytes, budgets)) + STAGING_BYTES
        limit = held + GRADIENTS_BYTES + ALLOWANCE_BYTES
        for work in ("save", "load"):
            command = [__file__, "--child", work, "--directory", name, "--host-memory", budgets[0]]
            command += ["--device-memory", budgets[1]]
            found, used = run_capped(command, limit, f"{work}: {format_bytes(size)} of weights")
            rate = found["nbytes"] / found["seconds"] / 1e9
            print(f"  checkpoint {format_bytes(found['nbytes'])}, {found['seconds']:.1f} s, {rate:.2f} GB/s")
            print(f"  VmHWM before {format_bytes(found['before'])}, meanwhile {format_bytes(found['peak'])}")
            print(f"  budgets, staging and interpreter {format_bytes(held)}; sum of the weights {found['sum']!r}")
            if used:
                print(f"  most that the cgroup counted, with page cache: {format_bytes(int(used))}")


if __name__ == "__main__":
    with without_noise():
        main()
