"""How many threads update weights, and which? As many as this process may use, started once, and no more than that.

torchrun sets OMP_NUM_THREADS=1 for each of its ranks, and PyTorch follows: eight ranks with one thread each are ten
times slower. So the number comes from the CPU affinity, the cgroup's quota and the number of ranks here.
"""

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headrace.runtime import system
from headrace.runtime.system import after_fork
from headrace.runtime.threads import OneThread

__all__ = ["count", "limited_to", "on_each"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def count() -> int:
    """Threads that share one update, the calling one among them."""
    return _limit or available_cores(
        affinity=system.available_cores(),
        machine=os.cpu_count() or 1,
        quota=_quota_cores(),
        local_ranks=int(told) if (told := os.environ.get("LOCAL_WORLD_SIZE", "")).isdigit() else 1,
    )


def available_cores(*, affinity: int, machine: int, quota: float | None, local_ranks: int) -> int:
    """Cores for one rank: those of affinity and quota, shared with other ranks unless the affinity is its own."""
    cores = affinity if quota is None else min(affinity, math.ceil(quota))
    # A launcher that binds each rank to cores of its own has divided the machine already.
    bound = local_ranks > 1 and affinity <= machine // local_ranks
    return max(1, cores if bound else cores // max(1, local_ranks))


@contextlib.contextmanager
def limited_to(threads: int) -> Iterator[None]:
    """Uses exactly so many threads for the length of a with block."""
    global _limit
    if threads < 1:
        raise ValueError(f"threads={threads}: at least one thread is needed")
    before, _limit = _limit, threads
    try:
        yield
    finally:
        _limit = before


def on_each(work: Callable[[], None], *, at_most: int) -> None:
    """Calls `work` on each thread, on `at_most` of them, and returns when all are done. Raises what one raised."""
    helpers = min(count(), at_most) - 1
    if helpers < 1:
        work()
        return
    chosen = _chosen(helpers)
    try:
        pending = [helper.submit(work) for helper in chosen]
        work()
        for job in pending:
            job.result()
    except BaseException:
        _drain(chosen)
        raise


def _drain(helpers: Sequence[OneThread]) -> None:
    """Waits until they have done whatever they were given, which Ctrl-C may have kept from being known.

    Not even Ctrl-C ends that: they write to memory that the caller lets go of.
    """
    for last in [helper.submit(int) for helper in helpers]:
        while not last.done():
            with contextlib.suppress(BaseException):
                last.result()


_limit: int | None = None
_helpers: list[OneThread] = []
_changing = threading.Lock()  # optimizers step on several threads


def _chosen(number: int) -> list[OneThread]:
    """So many helper threads. There are made more of them where there are too few."""
    with _changing:
        while len(_helpers) < number:
            _helpers.append(OneThread("headrace-optim"))
        return _helpers[:number]


def _forked() -> None:
    """The parent's threads do not exist here, and one of them may have held the lock."""
    global _changing
    _helpers.clear()
    _changing = threading.Lock()


after_fork(_forked)


def _quota_cores() -> float | None:
    """Cores that the cgroup's CPU quota allows; None without a quota."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            hierarchy, _, path = line.split(":", 2)
            if hierarchy == "0":
                own = _CGROUP_ROOT / path.lstrip("/")
                groups = [group for group in (own, *own.parents) if group.is_relative_to(_CGROUP_ROOT)]
                return min((quota for group in groups if (quota := _quota_of(group)) is not None), default=None)
    return None


def _quota_of(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        if quota != "max":
            return int(quota) / int(period)
    return None
