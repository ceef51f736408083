"""How long is a step of several micro-batches where weights come from a drive? All at once beside one after the other.

    PYTHONPATH=. python benchmarks/layer_major_disk.py [--size 6GiB] [--micro-batches 8] [--tokens 4] [--directory .]

Writes a bfloat16 Llama of that size to `--directory`, and starts a process that maps it, puts adapters on it (PEFT,
rank 8, all that is trained) and takes steps on the CPU: forward and backward of each micro-batch. The process lives
under the memory limit of `larger_than_ram.py`, made in the same way: both budgets, the interpreter, two blocks and an
allowance. `--drive-rate 500MB` holds the drive to that many bytes per second, by the kernel (cgroup v1, as root), as
a slower one. In each round, in random order: a step by `handle.forward_backward`, and one by a loop; then plain direct
reads, for the drive's speed. Shown are medians, and the median over rounds of loop / forward_backward.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from disk_stream import drive
from larger_than_ram import ALLOWANCE_BYTES, LAYER_BYTES, config_of, interpreter_bytes, run_capped, write

import headrace
from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes
from headrace.integrations.transformers import open_pretrained

_CGROUPS = Path("/sys/fs/cgroup/blkio")
READ_AHEAD_SECONDS = 1.0  # more than what was read ahead takes to arrive, beside which nothing is measured


def child(arguments: argparse.Namespace) -> None:
    """In the capped process: prints a line of JSON."""
    directory: Path = arguments.child
    model, weight_files = open_pretrained(directory)
    torch.manual_seed(0)
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    handle = headrace.offload(
        adapted,
        device="cpu",
        host_memory=arguments.host_memory,
        device_memory=arguments.device_memory,
        disk=directory / "spill",
        checkpoint=weight_files,
    )
    batches = [torch.arange(n, n + arguments.tokens).view(1, -1) for n in range(arguments.micro_batches)]

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = adapted(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def together() -> None:
        handle.forward_backward(batches, loss_of)

    def in_turn() -> None:
        for tokens in batches:
            loss_of(tokens).backward()

    cases = {"forward_backward": together, "loop": in_turn}
    largest = max(directory.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    found: dict[str, list[float]] = {"drive": [], **{name: [] for name in cases}}
    read_bytes: dict[str, int] = {}
    waiting: dict[str, float] = {}
    gradients: dict[str, list[torch.Tensor]] = {}
    with handle, held_to(parse_bytes(arguments.drive_rate), directory):
        for number in range(arguments.rounds + 1):  # the first records and learns
            for name in sorted(cases, key=lambda _: random.random()):
                time.sleep(READ_AHEAD_SECONDS)
                adapted.zero_grad()
                handle.reset_stats()
                seconds = timed(cases[name])
                stats = handle.stats()
                read_bytes[name], waiting[name] = stats.fetch_bytes, stats.stall_share
                gradients[name] = [p.grad.clone() for p in adapted.parameters() if p.grad is not None]
                if number:
                    found[name].append(seconds)
            time.sleep(READ_AHEAD_SECONDS)
            found["drive"].append(8 * largest.stat().st_size / timed(lambda: drive(largest, times=8)))
    one, other = gradients.values()
    equal = len(one) == len(other) > 0 and all(map(torch.equal, one, other))
    print(json.dumps({"found": found, "read_bytes": read_bytes, "waiting": waiting, "equal": equal}))


@contextmanager
def held_to(bytes_per_second: int, directory: Path) -> Iterator[None]:
    """This process reads the drive of `directory` no faster; 0: as fast as it is."""
    if not bytes_per_second:
        yield
        return
    group, device = _CGROUPS / f"headrace-{os.getpid()}", os.stat(directory).st_dev
    group.mkdir()
    limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_second}"
    (group / "blkio.throttle.read_bps_device").write_text(limit)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (_CGROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="6GiB")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drive-rate", default="0", help="bytes per second; 0: what the drive gives")
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=arguments.directory) as name:
        size = write(config_of(parse_bytes(arguments.size)), Path(name))
        os.sync()
        budgets = parse_bytes(arguments.host_memory) + parse_bytes(arguments.device_memory)
        limit = interpreter_bytes() + budgets + 2 * LAYER_BYTES + ALLOWANCE_BYTES
        what = f"{format_bytes(size)} of weights, {arguments.micro_batches} micro-batches of {arguments.tokens} tokens"
        command = [__file__, "--child", name, *sys.argv[1:]]
        told, used = run_capped(command, limit, what)
    for way in ("forward_backward", "loop"):
        seconds, nbytes = statistics.median(told["found"][way]), told["read_bytes"][way]
        print(
            f"{way:18} {seconds:7.1f} s a step, of {', '.join(f'{one:.1f}' for one in told['found'][way])};"
            f" read {format_bytes(nbytes)}, {nbytes / seconds / 1e9:.2f} GB/s;"
            f" compute waited {told['waiting'][way]:.0%}"
        )
    speeds = told["found"]["drive"]
    print(f"plain direct reads {min(speeds) / 1e9:.2f} to {max(speeds) / 1e9:.2f} GB/s")
    ratios = [loop / ours for ours, loop in zip(told["found"]["forward_backward"], told["found"]["loop"], strict=True)]
    print(f"loop / forward_backward: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"gradients of the last two steps equal bit for bit: {told['equal']}")
    if used:
        print(
            f"most that the cgroup counted, with page cache: {format_bytes(int(used))}; load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    with without_noise():
        main()
