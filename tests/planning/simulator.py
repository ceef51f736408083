"""How long does a plan take, and how many bytes does it hold, when the executor walks it?

Nothing here comes from the planner, which predicts both. The machine: one serial onload lane, one serial compute lane,
a host that walks the visits in order and runs ahead of both. A load issued at a visit starts when the lane is free and
the compute of the visit before has ended (the event that the executor records on the compute stream at the moment of
issue). Compute of a visit starts when the visit before has ended and all of its blocks have arrived. Memory counts in
host order: from a load's issue to its eviction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planning.plan import Step
from headrace.planning.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What happened, cycle by cycle (tuples have one entry per cycle; seconds from the start of the run, and bytes)."""

    cycle_ends: tuple[float, ...]
    stall_seconds: tuple[float, ...]
    onload_bytes: tuple[int, ...]
    onloads: tuple[int, ...]
    demand_onloads: tuple[int, ...]
    peak_bytes: int
    present: frozenset[int]

    @property
    def seconds(self) -> float:
        return self.cycle_ends[-1] if self.cycle_ends else 0.0


def simulate(
    problem: Problem,
    steps: Sequence[Sequence[Step]],
    *,
    cycles: int,
    present: frozenset[int] | None = None,
) -> Simulation:
    """Walk `cycles` cycles; cycle c follows `steps[c % len(steps)]` (a Plan's `cycles`), starting with `present`.

    None: only the residents. Otherwise exactly these, and the residents that never change. (The memory of the other
    residents is theirs all the same; one that is not named waits for its reload.) Raises ValueError when a planned
    eviction would drop a block in use.
    """
    start = problem.residents if present is None else present | (problem.residents - problem.changing)
    machine = _Machine(problem, start)
    ends, stalls, moved, loads, demands = [], [], [], [], []
    for cycle in range(cycles):
        plan = steps[cycle % len(steps)]
        before = (machine.onload_bytes, machine.onloads, machine.demand_onloads, machine.stall_seconds)
        for index in range(len(problem.visits)):
            machine.visit(index, plan[index])
        ends.append(machine.compute_end)
        stalls.append(machine.stall_seconds - before[3])
        machine.boundary(plan[len(problem.visits)])
        moved.append(machine.onload_bytes - before[0])
        loads.append(machine.onloads - before[1])
        demands.append(machine.demand_onloads - before[2])
    return Simulation(
        cycle_ends=tuple(ends),
        stall_seconds=tuple(stalls),
        onload_bytes=tuple(moved),
        onloads=tuple(loads),
        demand_onloads=tuple(demands),
        peak_bytes=machine.peak_bytes,
        present=frozenset(machine.arrival),
    )


class _Machine:
    """The two lanes and the device memory, in the order in which the host meets them."""

    def __init__(self, problem: Problem, present: frozenset[int]) -> None:
        self.problem = problem
        self.compute_end = 0.0
        self.lane_end = 0.0
        self.arrival = dict.fromkeys(sorted(present), 0.0)  # block -> seconds; fresh copies only
        self.held_bytes = problem.resident_bytes + sum(problem.block_bytes[b] for b in present - problem.residents)
        self.peak_bytes = self.held_bytes
        self.onload_bytes = 0
        self.onloads = 0
        self.demand_onloads = 0
        self.stall_seconds = 0.0

    def visit(self, index: int, step: Step) -> None:
        """One visit."""
        visit = self.problem.visits[index]
        needed = visit.blocks
        ended = self.compute_end
        for block in step.evictions:
            if block in needed:
                raise ValueError(f"the step at visit {index} evicts block {block}, which that visit uses")
            self._evict(block)
        for block in needed:
            if block not in self.arrival:
                self.demand_onloads += block not in step.loads
                self._load(block, needed, index)
        for block in step.loads:
            if block not in self.arrival:
                self._load(block, needed, index)
        start = max([self.compute_end, *(self.arrival[block] for block in needed)])
        self.stall_seconds += start - ended
        if visit.other_load_seconds:
            self.lane_end = max(self.lane_end, start) + visit.other_load_seconds
        self.compute_end = start + visit.compute_seconds

    def boundary(self, step: Step) -> None:
        """The end of a cycle: changing blocks expire, then the boundary's step."""
        for block in sorted(self.problem.changing):
            self._expire(block)
        for block in step.evictions:
            self._evict(block)
        for block in step.loads:
            if block not in self.arrival:
                self._load(block, (), len(self.problem.visits))

    def _expire(self, block: int) -> None:
        if block in self.problem.residents:
            self.arrival.pop(block, None)  # stale: the memory stays, the next load fills it again
        else:
            self._evict(block)

    def _evict(self, block: int) -> None:
        if block in self.problem.residents or block not in self.arrival:
            return
        self.compute_end = max(self.compute_end, self.arrival.pop(block))  # compute waits for a copy still in flight
        self.held_bytes -= self.problem.block_bytes[block]

    def _load(self, block: int, in_use: tuple[int, ...], index: int) -> None:
        size = self.problem.block_bytes[block]
        if block not in self.problem.residents:
            while self.held_bytes + size > self.problem.budget_bytes:
                self._evict(self._farthest(in_use, index))
            self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.lane_end = max(self.lane_end, self.compute_end) + self.problem.load_seconds[block]
        self.arrival[block] = self.lane_end
        self.onload_bytes += size
        self.onloads += 1

    def _farthest(self, in_use: tuple[int, ...], index: int) -> int:
        """The present block that may go and is used last from visit `index` on (ties: the smallest index)."""
        visits = self.problem.visits
        count = len(visits)

        def distance(block: int) -> int:
            for ahead in range(1, count + 1):
                if block in visits[(index + ahead) % count].blocks:
                    return ahead
            return count + 1

        candidates = [b for b in self.arrival if b not in in_use and b not in self.problem.residents]
        if not candidates:
            raise ValueError(f"no room at visit {index}: everything present is in use or resident")
        return max(candidates, key=lambda block: (distance(block), -block))
