"""How many threads update weights, and which? As many as this process may use; they are started once.

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
from headrace.runtime.threads import Job, OneThread

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def count() -> int:
    """The number of threads that share one update, the calling one included."""
    return _limit or available_cores(
        affinity=system.available_cores(),
        machine=os.cpu_count() or 1,
        quota=_quota_cores(),
        local_ranks=int(told) if (told := os.environ.get("LOCAL_WORLD_SIZE", "")).isdigit() else 1,
    )


def available_cores(*, affinity: int, machine: int, quota: float | None, local_ranks: int) -> int:
    """The cores for one rank: those that affinity and quota allow, divided among ranks unless they are bound apart."""
    cores = affinity if quota is None else min(affinity, math.ceil(quota))
    # A launcher that binds each rank to cores of its own has divided the machine already.
    bound = local_ranks > 1 and affinity <= machine // local_ranks
    return max(1, cores if bound else cores // max(1, local_ranks))


@contextlib.contextmanager
def limited_to(threads: int) -> Iterator[None]:
    """Has updates use exactly this many threads for the length of a with block."""
    global _limit
    if threads < 1:
        raise ValueError(f"threads={threads}: at least one thread is needed")
    before, _limit = _limit, threads
    try:
        yield
    finally:
        _limit = before


def on_each(work: Callable[[], None], *, at_most: int) -> None:
    """Calls `work` on each thread, on no more than `at_most`; returns when all are done. Raises what one raised."""
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


def begin_on_each(work: Callable[[], None], *, at_most: int) -> Sequence[Job[None]]:
    """Has helper threads call `work`, no more than `at_most`, and waits for none. Without helpers, calls it here."""
    helpers = min(count() - 1, at_most)
    if helpers < 1:
        work()
        return ()
    return [helper.submit(work) for helper in _chosen(helpers)]


def _drain(helpers: Sequence[OneThread]) -> None:
    """Waits until the helpers have done everything that was submitted, also jobs whose future Ctrl-C lost.

    Not even Ctrl-C ends the wait: helpers write to memory that the caller will let go of.
    """
    for last in [helper.submit(int) for helper in helpers]:
        while not last.done():
            with contextlib.suppress(BaseException):
                last.result()


_limit: int | None = None
_helpers: list[OneThread] = []
_changing = threading.Lock()  # optimizers step on several threads


def _chosen(number: int) -> list[OneThread]:
    """This many helper threads; missing ones are started."""
    with _changing:
        while len(_helpers) < number:
            _helpers.append(OneThread("headrace-optim"))
        return _helpers[:number]


def _forked() -> None:
    """Called in a forked child: the parent's threads do not exist there, and one of them may have held the lock."""
    global _changing
    _helpers.clear()
    _changing = threading.Lock()


after_fork(_forked)


def _quota_cores() -> float | None:
    """The cores that the cgroup's CPU quota allows; None without a quota."""
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
