"""Does a model from disk take no longer than the longer of its drive and its compute? Everything side by side.

    python benchmarks/disk_overlap.py [--directory .] [--size 4GiB] [--tokens 1,64,256] [--rounds 5] [--train]

One process holds the same Llama twice: once read from its checkpoint with a tenth of its weights as `host_memory` and
as `device_memory` (the device is the CPU), once in RAM. In each round, for each number of tokens, in random order:

- headrace: three forward passes, one right after the other, because each reads ahead for the next (with --train: and
  backward; gradients are new, and go to disk).
- compute: the same with the weights in RAM, by plain PyTorch.
- drive: as many bytes as these passes read from disk (and wrote there) by a plain loop of direct requests of 8 MiB, 4
  in flight, which does nothing else.
- beside: compute and drive at the same time, neither of which waits for the other.

Shown are medians for one pass, and medians over the rounds of two ratios: max(drive, compute) / headrace, and beside /
headrace. The first has the floor of a machine on which the two share nothing. Where they share processors and memory,
beside is what a pass could reach at best, since its compute has to wait for the drive, too.
"""

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from disk_model import drop_cache, make_model, open_in_ram

import headrace
from headrace.config import format_bytes, parse_bytes
from headrace.memory.disk.extent import PIECE_BYTES
from headrace.memory.pages import map_pages

THREADS = 4
PASSES = 3
READ_AHEAD_SECONDS = 0.5  # more than what was read ahead takes to arrive, beside which nothing is measured


def drive(files: list[Path], target: Path, read_bytes: int, written_bytes: int) -> None:
    """So many bytes by direct requests, reads and writes mixed evenly."""
    offsets = [(file, at) for file in files for at in range(0, file.stat().st_size - PIECE_BYTES + 1, PIECE_BYTES)]
    reads = list(itertools.islice(itertools.cycle(offsets), read_bytes // PIECE_BYTES))
    writes = written_bytes // PIECE_BYTES
    jobs: list[tuple[float, Path, int]] = [(n / max(1, len(reads)), file, at) for n, (file, at) in enumerate(reads)]
    jobs += [(n / max(1, writes), target, n * PIECE_BYTES) for n in range(writes)]
    todo = iter(sorted(jobs, key=lambda job: job[0]))

    def work() -> None:
        memory = map_pages(PIECE_BYTES, touched=True)  # the same pages as ours
        opened: dict[Path, int] = {}
        for _, file, at in todo:
            if file not in opened:
                opened[file] = os.open(file, (os.O_RDWR if file == target else os.O_RDONLY) | os.O_DIRECT)
            (os.pwritev if file == target else os.preadv)(opened[file], [memory], at)
        for descriptor in opened.values():
            os.close(descriptor)

    workers = [threading.Thread(target=work) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def passes(model: torch.nn.Module, tokens: int, trains: bool) -> None:
    ids = torch.arange(tokens).view(1, tokens)
    for _ in range(PASSES):
        if trains:
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                model(ids, use_cache=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--size", type=parse_bytes, default="4GiB")
    parser.add_argument("--share", type=float, default=0.1, help="of the weights: host_memory, and device_memory")
    parser.add_argument("--tokens", type=lambda text: [int(word) for word in text.split(",")], default="1,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=arguments.directory) as name:
        directory, target = Path(name), Path(name) / "written"
        make_model(directory, arguments.size)
        files = sorted(directory.glob("*.safetensors"))
        total = sum(file.stat().st_size for file in files)
        if arguments.train:
            with target.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, total)
        os.sync()
        budget = int(total * arguments.share)
        model, handle = headrace.from_pretrained(
            directory,
            trainable=arguments.train,
            device="cpu",
            device_memory=budget,
            host_memory=budget,
            disk=directory / "spill",
            packed=False,  # every pass reads the same bytes: packed.py has the other
        )
        plain, _ = open_in_ram(directory, total)
        print(f"{format_bytes(total)} of weights; budgets of {format_bytes(budget)}; load {os.getloadavg()[0]:.1f}")
        for tokens in arguments.tokens:
            measure(arguments, handle, model, plain, tokens, files, target)


def measure(
    arguments: argparse.Namespace,
    handle: headrace.Offloaded,
    model: torch.nn.Module,
    plain: torch.nn.Module,
    tokens: int,
    files: list[Path],
    target: Path,
) -> None:
    read_bytes = written_bytes = 0

    def beside() -> None:
        reading = threading.Thread(target=cases["drive"])
        reading.start()
        cases["compute"]()
        reading.join()

    cases: dict[str, Callable[[], None]] = {
        "headrace": lambda: passes(model, tokens, arguments.train),
        "compute": lambda: passes(plain, tokens, arguments.train),
        "drive": lambda: drive(files, target, read_bytes, written_bytes),
        "beside": beside,
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    processors: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(arguments.rounds + 1):  # the first records and learns
        for name in sorted(cases, key=lambda _: random.random()):
            time.sleep(READ_AHEAD_SECONDS)
            drop_cache(files[0].parent)
            handle.reset_stats()
            processor = time.process_time()
            taken = seconds(cases[name])
            processor = time.process_time() - processor
            if name == "headrace":
                stats = handle.stats()
                read_bytes, written_bytes = stats.fetch_bytes, stats.spill_bytes
            if number >= 1:
                found[name].append(taken / PASSES)
                processors[name].append(processor / PASSES)
    rounds = list(zip(*found.values(), strict=True))
    reached = statistics.median(max(compute, drive) / ours for ours, compute, drive, _ in rounds)
    possible = statistics.median(both / ours for ours, _, _, both in rounds)
    medians = ", ".join(
        f"{name} {statistics.median(times):.2f} s ({statistics.median(processors[name]):.2f} of CPU)"
        for name, times in found.items()
    )
    print(
        f"{tokens:5} tokens: {medians}; max / headrace {reached:.2f}, beside / headrace {possible:.2f};"
        f" read {format_bytes(read_bytes // PASSES)}, written {format_bytes(written_bytes // PASSES)},"
        f" load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
