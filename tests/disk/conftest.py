"""Which stores do the tests of the disk tier use?"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headrace.memory.arena import Arena
from headrace.memory.disk import DiskStore
from headrace.memory.ledger import Ledger

Mount = Callable[..., Path]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def store(tmp_path: Path, ledger: Ledger) -> Iterator[DiskStore]:
    with DiskStore(tmp_path / "store", ledger) as store:
        yield store


@pytest.fixture
def memory(ledger: Ledger) -> Callable[[int], torch.Tensor]:
    """Page-aligned host memory of a number of bytes, filled at random, as direct I/O wants it."""

    def make(nbytes: int) -> torch.Tensor:
        tensor = Arena(nbytes, torch.device("cpu"), ledger, "test").tensor(0, nbytes)
        return tensor.random_(0, 256)

    return make


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a small filesystem of a kind, "tmpfs" or "ext4", of a size, and unmounts it at the end."""
    mounted: list[Path] = []

    def make(kind: str, nbytes: int) -> Path:
        path = tmp_path / f"{kind}-{len(mounted)}"
        path.mkdir()
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "none", str(path)]
        else:
            image = path.with_suffix(".img")
            image.touch()
            with image.open("r+b") as file:
                file.truncate(nbytes)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, timeout=30)
            command = ["mount", "-o", "loop", str(image), str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except FileNotFoundError:
            pytest.skip("there is no mount command here")
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], capture_output=True, timeout=30, check=False)
