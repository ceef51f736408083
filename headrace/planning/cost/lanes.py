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

    A lane runs its tasks in the order in which they are submitted. Each thread submits its own in their order. Among
    those of several threads, each task is submitted when the tasks of `submitted_after` have ended.
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
    _Clock(tasks, dram_rate, [pair for pair in both_ways if pair[2] < 1]).run()


class _Clock:
    """The present moment, the tasks that run, and how much of each is left."""

    def __init__(
        self, tasks: Sequence[Task], dram_rate: float, both_ways: Sequence[tuple[CostLane, CostLane, float]]
    ) -> None:
        self.tasks = tasks
        self.dram_rate = dram_rate or math.inf
        self.both_ways = both_ways
        self.now = 0.0
        by_thread: dict[CostLane, dict[int, deque[Task]]] = {lane: {} for lane in CostLane}
        for task in tasks:
            by_thread[task.lane].setdefault(task.thread, deque()).append(task)
        self.queues = {lane: list(queues.values()) for lane, queues in by_thread.items() if queues}
        self.submitted: dict[tuple[CostLane, int], float] = {}  # when each thread gave each lane something last
        self.running: dict[CostLane, Task] = {}
        self.asked: dict[CostLane, float] = {}  # of host memory, by each running task
        self.left: dict[CostLane, float] = {}

    def run(self) -> None:
        running, asked, left = self.running, self.asked, self.left
        self._start()
        while running:
            speeds = self._speeds()
            if speeds:
                pause = min([left[lane] / speed for lane, speed in speeds.items()])
                done = {lane: pause * speed for lane, speed in speeds.items()}
            else:
                pause = min(left.values())
                done = dict.fromkeys(left, pause)
            self.now += pause
            for lane, seconds in done.items():
                left[lane] -= seconds
                if left[lane] <= _TINY + 1e-12 * running[lane].seconds:
                    running.pop(lane).end = self.now
                    del asked[lane], left[lane]
            self._start()
        if any(itertools.chain(*self.queues.values())):
            raise ValueError("tasks of two threads wait for each other; a thread submits what others wait for first")

    def _start(self) -> None:
        """Starts all tasks that may start now. A task of no length ends at once, and may let others start."""
        tasks, now, running = self.tasks, self.now, self.running
        moved = True
        while moved:
            moved = False
            for lane, queues in self.queues.items():
                if lane in running:
                    continue
                queue = queues[0] if len(queues) == 1 else self._first_submitted(lane, queues)
                if not queue:
                    continue
                task = queue[0]
                for other in reversed(task.after):
                    if tasks[other].end > now:
                        break
                else:
                    queue.popleft().begin = now
                    if task.seconds <= _TINY:
                        task.end = now
                        moved = True
                    else:
                        running[lane] = task
                        self.asked[lane] = task.dram_bytes / task.seconds
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

    def _speeds(self) -> dict[CostLane, float]:
        """For each running task, the seconds of its work that are done in one second. Empty: all run at full speed."""
        asked, speeds = self.asked, {}
        total = sum(asked.values())
        if total > self.dram_rate:
            slow = self.dram_rate / total
            speeds = {lane: slow if rate else 1.0 for lane, rate in asked.items()}
        for there, back, share in self.both_ways:
            if there in asked and back in asked:
                speeds = speeds or dict.fromkeys(asked, 1.0)
                speeds[there], speeds[back] = min(share, speeds[there]), min(share, speeds[back])
        return speeds
