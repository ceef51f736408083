"""How fast are checkpoints saved and loaded? Beside torch.save, safetensors, DCP and accelerate, and the drive itself.

    python benchmarks/checkpoint_speed.py [--size 1GiB] [--rounds 5] [--directory .]

A model of that size in float32 and the state of AdamW for it (twice as much), both in host memory. In each round all
contestants save, and load what they saved into a model and an optimizer that are there; nothing is in the page cache
before a load, and a save counts until its files are on the drive (fsync). The drive's own speed, of direct requests of
8 MiB, 4 in flight, is measured in each round, before and after; ratios are over the better of the two, and medians.
headrace fsyncs, checksums and verifies all of it; the others do not.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

import accelerate
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import headrace
import headrace.optim
from headrace.config import format_bytes, parse_bytes

REQUEST_BYTES, IN_FLIGHT = 8 << 20, 4


def drive_rates(directory: Path, nbytes: int) -> tuple[float, float]:
    """Bytes per second of direct writes, and of direct reads."""
    path = directory / "drive"
    blocks = [mmap(-1, REQUEST_BYTES) for _ in range(IN_FLIGHT)]
    for block in blocks:
        block.write(os.urandom(REQUEST_BYTES))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(descriptor, 0, nbytes)
    rates = []
    for call in (os.pwritev, os.preadv):
        begin = time.perf_counter()

        def run(worker: int, call: Callable[..., int] = call) -> None:
            for offset in range(worker * REQUEST_BYTES, nbytes, IN_FLIGHT * REQUEST_BYTES):
                call(descriptor, [blocks[worker]], offset)

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(run, range(IN_FLIGHT)))
        os.fsync(descriptor)
        rates.append(nbytes / (time.perf_counter() - begin))
    os.close(descriptor)
    path.unlink()
    return rates[0], rates[1]


def on_drive(path: Path) -> None:
    """Waits until all of it is, and leaves nothing of it in the page cache."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Contestants:
    """Each saves to a path, and loads from it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.accelerator = accelerate.Accelerator(cpu=True)
        self.accelerator.prepare(model, optimizer)

    def headrace(self, path: Path) -> tuple[Callable[[], None], Callable[[], None]]:
        return (
            lambda: headrace.save(path, self.model, self.optimizer) and None,
            lambda: headrace.load(path, self.model, self.optimizer),
        )

    def torch(self, path: Path) -> tuple[Callable[[], None], Callable[[], None]]:
        def load() -> None:
            saved = torch.load(path / "all.pt", mmap=True, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            for entries in self.optimizer.state.values():  # mapped: they are read when they are used
                for name, value in entries.items():
                    entries[name] = value.clone()

        def save() -> None:
            path.mkdir()
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, path / "all.pt")

        return save, load

    def safetensors(self, path: Path) -> tuple[Callable[[], None], Callable[[], None]]:
        def tensors() -> dict[str, torch.Tensor]:
            entries = self.optimizer.state_dict()["state"]
            state = {f"{n}.{name}": value for n, values in entries.items() for name, value in values.items()}
            return {**self.model.state_dict(), **state}

        def load() -> None:
            loaded = safetensors.torch.load_file(path / "all.safetensors")
            for name, tensor in tensors().items():
                tensor.copy_(loaded[name])

        def save() -> None:
            path.mkdir()
            safetensors.torch.save_file(tensors(), path / "all.safetensors")

        return save, load

    def dcp(self, path: Path) -> tuple[Callable[[], None], Callable[[], None]]:
        def state() -> dict[str, object]:
            return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

        return (
            lambda: dcp.save(state(), checkpoint_id=path, no_dist=True) and None,
            lambda: dcp.load(state(), checkpoint_id=path, no_dist=True),
        )

    def accelerate(self, path: Path) -> tuple[Callable[[], None], Callable[[], None]]:
        return (
            lambda: self.accelerator.save_state(str(path)) and None,
            lambda: self.accelerator.load_state(str(path)),
        )


def main() -> None:
    """Parses, measures, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="1GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path())
    arguments = parser.parse_args()
    width = 2048
    layers = max(1, parse_bytes(arguments.size) // (4 * width * width))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = headrace.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    nbytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    contestants = Contestants(model, optimizer)
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    drives: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        for number in range(arguments.rounds):
            before = drive_rates(directory, nbytes // 2)
            rates: dict[tuple[str, str], float] = {}
            for who in ("headrace", "torch", "safetensors", "dcp", "accelerate"):
                path = directory / f"{who}-{number}"
                save, load = getattr(contestants, who)(path)
                os.sync()
                begin = time.perf_counter()
                save()
                on_drive(path)
                rates[who, "save"] = nbytes / (time.perf_counter() - begin)
                begin = time.perf_counter()
                load()
                rates[who, "load"] = nbytes / (time.perf_counter() - begin)
                shutil.rmtree(path)
            after = drive_rates(directory, nbytes // 2)
            best = max(before[0], after[0]), max(before[1], after[1])
            drives.append(best)
            for (who, what), rate in rates.items():
                ratios[who, what].append(rate / best[what == "load"])
    write, read = (statistics.median(rate) / 1e9 for rate in zip(*drives, strict=True))
    print(f"{format_bytes(nbytes)}; the drive writes {write:.2f} GB/s and reads {read:.2f} GB/s")
    print(f"{'':14}{'save':>8}{'load':>8}   over the drive")
    for who in dict.fromkeys(who for who, _ in ratios):
        save_ratio, load_ratio = (statistics.median(ratios[who, what]) for what in ("save", "load"))
        print(f"{who:14}{save_ratio:>8.2f}{load_ratio:>8.2f}")


if __name__ == "__main__":
    main()
