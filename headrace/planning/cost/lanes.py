"""When does each task run, if lanes are served in order, tasks wait for others, and the host's DRAM is shared?

A discrete-event model: a lane runs one task at a time, in the order in which tasks were given to it, each after the
tasks that it waits for. Tasks that move bytes through host memory at the same moment share its rate: if together they
ask for more than there is, all slow down alike. Likewise, the two directions of the link may slow each other down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CostLane", "Span", "Task", "run_lanes"]

_TINY = 1e-15


class CostLane(StrEnum):
    """A resource that runs its tasks in order."""

    COMPUTE = "compute"
    ONLOAD = "onload"
    OFFLOAD = "offload"
    UPDATE = "update"
    FETCH = "fetch"
    SPILL = "spill"
    COLLECTIVE = "collective"  # among devices
    NETWORK = "network"  # among nodes, from host memory to host memory


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: alone it takes `seconds` and moves `dram_bytes` through host memory.

    `after`: indices of the tasks that must have ended; all are smaller than its own. It moves `nbytes`.
    """

    lane: CostLane
    name: str
    seconds: float
    after: tuple[int, ...] = ()
    dram_bytes: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran, and the task that it waited for last (-1: none, because its lane was busy until then)."""

    begin: float
    end: float
    waited_for: int


def run_lanes(
    tasks: Sequence[Task], *, dram_rate: float = 0.0, duplex_share: float = 1.0, disk_duplex_share: float = 1.0
) -> list[Span]:
    """The spans of `tasks`, in their order; `dram_rate` in bytes per second (0: no limit).

    `duplex_share`, `disk_duplex_share`: the part of each direction's speed that is left while both run.

    Raises ValueError for a task that waits for itself or for a later one.
    """
    for index, task in enumerate(tasks):
        if task.after and not 0 <= min(task.after) <= max(task.after) < index:
            raise ValueError(f"task {index} ({task.name}) waits for {task.after}; give indices below its own")
    both_ways = ((CostLane.ONLOAD, CostLane.OFFLOAD, duplex_share), (CostLane.FETCH, CostLane.SPILL, disk_duplex_share))
    return _Clock(tasks, dram_rate, both_ways).run()


class _Clock:
    """The present moment, the tasks that run, and how much of each is left."""

    def __init__(
        self, tasks: Sequence[Task], dram_rate: float, both_ways: Sequence[tuple[CostLane, CostLane, float]]
    ) -> None:
        self.tasks = tasks
        self.dram_rate = dram_rate
        self.both_ways = both_ways
        self.now = 0.0
        queues: dict[CostLane, list[int]] = {lane: [] for lane in CostLane}
        for index, task in enumerate(tasks):
            queues[task.lane].append(index)
        self.queues = {lane: deque(queue) for lane, queue in queues.items() if queue}
        self.dram_rates = [task.dram_bytes / task.seconds if task.seconds > _TINY else 0.0 for task in tasks]
        self.running: dict[CostLane, int] = {}
        self.left: dict[int, float] = {}
        self.begins = [0.0] * len(tasks)
        self.ends: list[float | None] = [None] * len(tasks)

    def run(self) -> list[Span]:
        self._start()
        while self.running:
            speeds = self._speeds()
            pause = min([self.left[index] / speeds[lane] for lane, index in self.running.items()])
            self.now += pause
            for lane, index in list(self.running.items()):
                self.left[index] -= pause * speeds[lane]
                if self.left[index] <= _TINY + 1e-12 * self.tasks[index].seconds:
                    self.ends[index] = self.now
                    del self.running[lane]
            self._start()
        return [self._span(index) for index in range(len(self.tasks))]

    def _start(self) -> None:
        """Starts all tasks that may start now. A task of no length ends at once, and may let others start."""
        moved = True
        while moved:
            moved = False
            for lane, queue in self.queues.items():
                if lane in self.running or not queue:
                    continue
                index = queue[0]
                task = self.tasks[index]
                if self._waits(task.after):
                    continue
                queue.popleft()
                self.begins[index] = self.now
                if task.seconds <= _TINY:
                    self.ends[index] = self.now
                    moved = True
                else:
                    self.running[lane] = index
                    self.left[index] = task.seconds

    def _waits(self, after: tuple[int, ...]) -> bool:
        ends = self.ends
        for other in reversed(after):  # noqa: SIM110 - asked at every event, and a generator is three times as slow
            if ends[other] is None:
                return True
        return False

    def _speeds(self) -> dict[CostLane, float]:
        """For each running task, the seconds of its work that are done in one second."""
        asked = {lane: self.dram_rates[index] for lane, index in self.running.items()}
        total = sum(asked.values())
        if 0 < self.dram_rate < total:
            slow = self.dram_rate / total
            speeds = {lane: slow if rate else 1.0 for lane, rate in asked.items()}
        else:
            speeds = dict.fromkeys(asked, 1.0)
        for there, back, share in self.both_ways:
            if there in speeds and back in speeds:
                speeds[there], speeds[back] = min(share, speeds[there]), min(share, speeds[back])
        return speeds

    def _span(self, index: int) -> Span:
        end = self.ends[index]
        if end is None:
            raise ValueError(f"task {index} ({self.tasks[index].name}) never ran: please report this problem")
        begin, last, moment = self.begins[index], -1, -1.0
        for other in self.tasks[index].after:
            other_end = self.ends[other]
            if other_end is not None and other_end > moment and self.tasks[other].lane is not self.tasks[index].lane:
                last, moment = other, other_end
        return Span(begin, end, last if moment >= begin - 1e-12 * max(1.0, begin) else -1)
