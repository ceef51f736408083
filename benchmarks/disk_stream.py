"""How much of the drive's speed does the disk tier reach? Beside direct reads of a plain loop, in the same rounds.

    python benchmarks/disk_stream.py [--directory .] [--size 2GiB] [--rounds 5]

Everything alternates in one run, in an order that changes from round to round, because drives are shared and noisy:
only ratios of one round compare, and their medians are shown. All of it bypasses the page cache.

- drive: threads that call preadv, each on its own descriptor, with requests as large as the store's; nothing else.
- store: extents of 64 MiB of a spill file into a staging ring, verified against their checksums.
- checkpoint: tensors of a safetensors file, which begin anywhere, laid out in the same ring.

The sweep that chose request size and threads: --sweep.
"""

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.config import format_bytes, parse_bytes
from headrace.memory.disk import Checkpoint, DiskStore, StagingRing
from headrace.memory.disk.extent import PIECE_BYTES
from headrace.memory.ledger import Ledger
from headrace.memory.pages import map_pages

EXTENT_BYTES = 64 << 20
SLOTS = 4
THREADS = 4


def drive(path: Path, request_bytes: int = PIECE_BYTES, threads: int = THREADS, times: int = 1) -> None:
    """Reads the whole file so many times, with `threads` requests in flight."""
    offsets = [*range(0, path.stat().st_size - request_bytes + 1, request_bytes)] * times

    def work(number: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        memory = map_pages(request_bytes, touched=True)  # the same pages as ours
        for offset in offsets[number::threads]:
            os.preadv(descriptor, [memory], offset)
        os.close(descriptor)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@contextmanager
def stored(directory: Path, nbytes: int, ring: StagingRing) -> Iterator[Callable[[], None]]:
    """Reads all extents of a store through the ring: the next read of a slot waits for the one before it."""
    with DiskStore(directory, Ledger()) as store:
        source = torch.randint(0, 256, (EXTENT_BYTES,), dtype=torch.uint8)
        extents = [store.allocate(f"block {n}", EXTENT_BYTES, "weights") for n in range(nbytes // EXTENT_BYTES)]
        for extent in extents:
            store.write(extent, source)
        store.synchronize()

        def read() -> None:
            for extent in extents:
                slot = ring.acquire()
                ring.release(slot, store.read(extent, slot.memory, after=slot.free))
            wait_for(ring)

        yield read


@contextmanager
def in_checkpoint(path: Path, ring: StagingRing) -> Iterator[Callable[[], None]]:
    checkpoint = Checkpoint(path, Ledger())

    def read() -> None:
        for name in checkpoint.records:
            slot = ring.acquire()
            checkpoint.read({name: slot.memory})
            ring.release(slot, None)
        wait_for(ring)

    yield read
    checkpoint.close()


def wait_for(ring: StagingRing) -> None:
    slots = [ring.acquire() for _ in range(SLOTS)]
    for slot in slots:
        if slot.free is not None:
            slot.free.synchronize()
        ring.release(slot, None)


def seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def sweep(path: Path, rounds: int) -> None:
    """Bytes per second by request size and threads."""
    cases = [(mib << 20, threads) for mib in (1, 4, 8, 16) for threads in (1, 2, 4, 8)]
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for number in range(rounds):
        for case in random.Random(number).sample(cases, len(cases)):
            found[case].append(path.stat().st_size / seconds(lambda case=case: drive(path, *case)))  # type: ignore[misc]
    for (request_bytes, threads), speeds in found.items():
        print(f"{format_bytes(request_bytes):>8} x {threads}: {statistics.median(speeds) / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--size", type=parse_bytes, default="2GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=arguments.directory) as directory:
        path = Path(directory) / "model.safetensors"
        count = arguments.size // EXTENT_BYTES
        tensor = torch.randint(0, 256, (EXTENT_BYTES,), dtype=torch.uint8)
        save_file({f"block {n}": tensor.clone() for n in range(count)}, path)
        os.sync()
        if arguments.sweep:
            sweep(path, arguments.rounds)
            return
        ring = StagingRing(EXTENT_BYTES, SLOTS, torch.device("cpu"), Ledger())
        nbytes = count * EXTENT_BYTES
        spill = Path(directory) / "spill"
        with stored(spill, nbytes, ring) as read_store, in_checkpoint(path, ring) as read_checkpoint:
            cases = {"drive": lambda: drive(path), "store": read_store, "checkpoint": read_checkpoint}
            found: dict[str, list[float]] = {name: [] for name in cases}
            for number in range(arguments.rounds):
                for name in random.Random(number).sample(list(cases), len(cases)):
                    found[name].append(seconds(cases[name]))
        print(f"{format_bytes(nbytes)} in requests of {format_bytes(PIECE_BYTES)}, {THREADS} in flight")
        for name, times in found.items():
            ratio = statistics.median(d / t for d, t in zip(found["drive"], times, strict=True))
            speed = nbytes / statistics.median(times) / 1e9
            print(f"{name:>10}: {speed:5.2f} GB/s, {ratio:.2f} of the drive's")


if __name__ == "__main__":
    main()
