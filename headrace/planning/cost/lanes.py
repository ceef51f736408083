"""When does each task run, if lanes are served in order, tasks wait for others, and the host's DRAM is shared?

A discrete-event model: a lane runs one task at a time, in the order in which tasks were given to it, each after the
tasks that it waits for. Tasks that move bytes through host memory at the same moment share its rate: if together they
ask for more than there is, all slow down alike. Likewise, the two directions of the link may slow each other down.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

PASS_THREAD, UPDATE_THREAD = 0, 1

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


@dataclass(slots=True)
class Task:
    """One thing to do: alone it takes `seconds` and moves `dram_bytes` through host memory. It moves `nbytes`.

    `after`: indices of the tasks that must have ended; all are smaller than its own. `run_lanes` says when it runs.

    A lane runs its tasks in the order in which they are submitted. Each thread submits its own in their order, and each
    of them when the tasks of `submitted_after` have ended.
    """

    lane: CostLane
    name: str
    seconds: float
    after: tuple[int, ...] = ()
    dram_bytes: float = 0.0
    nbytes: int = 0
    thread: int = PASS_THREAD
    submitted_after: tuple[int, ...] = ()
    begin: float = 0.0
    end: float = math.inf  # while it has not ended


def run_lanes(
    tasks: Sequence[Task], *, dram_rate: float = 0.0, duplex_share: float = 1.0, disk_duplex_share: float = 1.0
) -> None:
    """Runs `tasks`, which then have their `begin` and `end`; `dram_rate` in bytes per second (0: no limit).

    `duplex_share`, `disk_duplex_share`: the part of each direction's speed that is left while both run.

    Raises ValueError for a task that waits for itself or for a later one, and for threads that wait for each other.
    """
    for index, task in enumerate(tasks):
        if task.after and not 0 <= min(task.after) <= max(task.after) < index:
            raise ValueError(f"task {index} ({task.name}) waits for {task.after}; give indices below its own")
    both_ways = ((CostLane.ONLOAD, CostLane.OFFLOAD, duplex_share), (CostLane.FETCH, CostLane.SPILL, disk_duplex_share))
    _Clock(tasks, dram_rate, both_ways).run()


class _Clock:
    """The present moment, the tasks that run, and how much of each is left."""

    def __init__(
        self, tasks: Sequence[Task], dram_rate: float, both_ways: Sequence[tuple[CostLane, CostLane, float]]
    ) -> None:
        self.tasks = tasks
        self.dram_rate = dram_rate
        self.both_ways = both_ways
        self.now = 0.0
        self.queues: dict[CostLane, list[deque[Task]]] = {}
        for lane in CostLane:
            by_thread: dict[int, deque[Task]] = {}
            for task in tasks:
                if task.lane is lane:
                    by_thread.setdefault(task.thread, deque()).append(task)
            if by_thread:
                self.queues[lane] = list(by_thread.values())
        self.submitted: dict[tuple[CostLane, int], float] = {}  # when each thread gave each lane something last
        self.running: dict[CostLane, Task] = {}
        self.left: dict[CostLane, float] = {}

    def run(self) -> None:
        self._start()
        while self.running:
            speeds = self._speeds()
            left = self.left
            pause = min([left[lane] / speed for lane, speed in speeds.items()])
            self.now += pause
            for lane, speed in speeds.items():
                left[lane] -= pause * speed
                if left[lane] <= _TINY + 1e-12 * self.running[lane].seconds:
                    self.running.pop(lane).end = self.now
            self._start()
        if any(itertools.chain(*self.queues.values())):
            raise ValueError("tasks of two threads wait for each other; a thread submits what others wait for first")

    def _start(self) -> None:
        """Starts all tasks that may start now. A task of no length ends at once, and may let others start."""
        moved = True
        while moved:
            moved = False
            for lane, queues in self.queues.items():
                if lane in self.running:
                    continue
                queue = queues[0] if len(queues) == 1 else self._first_submitted(lane, queues)
                if not queue or self._waits(queue[0]):
                    continue
                task = queue.popleft()
                task.begin = self.now
                if task.seconds <= _TINY:
                    task.end = self.now
                    moved = True
                else:
                    self.running[lane] = task
                    self.left[lane] = task.seconds

    def _first_submitted(self, lane: CostLane, queues: Sequence[deque[Task]]) -> deque[Task]:
        """The queue whose first task was submitted before those of the others; an empty one if none was yet."""
        first, earliest = deque[Task](), math.inf
        for queue in queues:
            if not queue:
                continue
            key = lane, queue[0].thread
            after = [self.tasks[other].end for other in queue[0].submitted_after]
            submitted = max([self.submitted.get(key, 0.0), *after])
            if submitted <= self.now:
                self.submitted[key] = submitted
                if submitted < earliest:
                    first, earliest = queue, submitted
        return first

    def _waits(self, task: Task) -> bool:
        for other in reversed(task.after):  # noqa: SIM110 - asked at every event, and a generator is three times as slow
            if self.tasks[other].end > self.now:
                return True
        return False

    def _speeds(self) -> dict[CostLane, float]:
        """For each running task, the seconds of its work that are done in one second."""
        asked = {lane: task.dram_bytes / task.seconds for lane, task in self.running.items()}
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
