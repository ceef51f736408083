"""What makes a child of the nursery one rank of several? See `run_ranks()` of nursery.py, which starts it."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed


@contextmanager
def ranks(file: Path, world_size: int, rank: int) -> Iterator[None]:
    """One rank of a group that meets at `file`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = distributed.FileStore(str(file), world_size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    yield
    distributed.barrier()
    distributed.destroy_process_group()


def run(program: Callable[..., None], *arguments: Any) -> None:
    """`program` on this rank, which the process was started as."""
    file, world_size, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with ranks(file, world_size, rank):
        program(*arguments)
    print("done")
