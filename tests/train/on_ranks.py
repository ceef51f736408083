"""What the ranks of tests/train/test_ranks.py run: `headrace train` as torchrun would start it, which may be ended."""

import errno
import os
import signal
from collections.abc import Mapping
from typing import Any

import torch

import headrace
from headrace.errors import OutOfMemoryError
from headrace.train.progress import Progress


def runs(rank: int, world_size: int, cache: str, ports: list[int], settings: list[Mapping[str, Any]]) -> None:
    """One run after the other. `ends`: how this one does ("killed", "stopped", "full"), and in which step."""
    environment = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in environment.items()}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_DATASETS_CACHE": cache}
    torch.set_num_threads(1)
    if any(changes["device"] == "emu" for changes in settings):
        from emulator import emu

        emu.reset(
            allocator="exact", scheduler="random", seed=rank, one_host_clock=True
        )  # each process has one of its own
    from headrace.train.config import TrainConfig
    from headrace.train.trainer import train

    for port, changes in zip(ports, settings, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        given = dict(changes)
        how, step = given.pop("ends", (None, 0))
        _end_in(how, step)
        try:
            result = train(TrainConfig(**given), Progress())
        except (headrace.RankError, OutOfMemoryError) as error:
            print(type(error).__name__, error, flush=True)
            os._exit(0)
        stats: Any = result.stats
        assert 0 < stats.device_peak_bytes <= 0.75 * result.weight_bytes
        assert stats.onload_bytes > result.weight_bytes
        if "disk" in given:
            assert stats.fetch_bytes > 0
            assert (stats.disk_bytes > 0) == ("lora_rank" not in given)  # frozen weights stay in their files
        print("stopped" if result.checkpoint else "done", flush=True)


def _full(*arguments: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _end_in(how: str | None, number: int) -> None:
    """In that step, after its update, the last rank is killed, or gets SIGTERM, or the first rank's drive is full."""
    from headrace.train.run import Run

    if not hasattr(Run, "whole_step"):
        Run.whole_step = Run.step  # type: ignore[attr-defined]
    steps: list[float] = []

    def step(self: Run, batches: Any) -> float:
        steps.append(self.whole_step(batches))  # type: ignore[attr-defined]
        rank = int(os.environ["RANK"])
        if len(steps) == number and how == "full" and rank == 0:
            os.pwritev = _full  # type: ignore[assignment]
        elif len(steps) == number and how != "full" and rank == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGTERM)
        return steps[-1]

    Run.step = step  # type: ignore[method-assign]
