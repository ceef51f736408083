"""What is the best that any schedule reaches? Every schedule is tried; nothing here comes from the planner.

Walks the host steps and keeps, for each content of the device, all the time vectors (compute end, lane end, arrivals)
that no other vector with the same content beats in every entry. Choices at a step: any sequence of loads, each with any
smallest set of victims that makes room. Evicting more than needed, or earlier, is never better (memory counts in host
order), and neither is evicting a block that has not been used since it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from headrace.planning import Problem

Times = tuple[float, float, tuple[tuple[int, float], ...]]  # compute end, lane end, arrivals of blocks in flight


def best_ends(problem: Problem, cycles: int) -> list[float]:
    """The earliest end of compute after 1, 2, ... `cycles` cycles, from an empty device."""
    fronts: dict[frozenset[int], list[Times]] = {frozenset(): [(0.0, 0.0, ())]}
    ends = []
    for cycle in range(cycles):
        for index, visit in enumerate(problem.visits):
            reached: dict[frozenset[int], list[Times]] = {}
            for content, front in fronts.items():
                for times in front:
                    for after, moved in _choices(problem, content, times, frozenset(visit.blocks), index):
                        end = max([moved[0], *(at for block, at in moved[2] if block in visit.blocks)])
                        end += visit.compute_seconds
                        waiting = tuple((block, at) for block, at in moved[2] if at > end)
                        _insert(reached.setdefault(after, []), (end, moved[1], waiting))
            fronts = reached
        ends.append(min(times[0] for front in fronts.values() for times in front))
        if cycle + 1 < cycles:
            fronts = _expired(problem, fronts)
    return ends


def _expired(problem: Problem, fronts: dict[frozenset[int], list[Times]]) -> dict[frozenset[int], list[Times]]:
    """At the boundary: changing blocks go (one in flight makes compute wait for it)."""
    reached: dict[frozenset[int], list[Times]] = {}
    for content, front in fronts.items():
        for compute, lane, waiting in front:
            late = [at for block, at in waiting if block in problem.changing]
            rest = tuple((block, at) for block, at in waiting if block not in problem.changing)
            moved = (max([compute, *late]), lane, rest)
            _insert(reached.setdefault(content - problem.changing, []), moved)
    return reached


def _choices(
    problem: Problem, content: frozenset[int], times: Times, needed: frozenset[int], index: int
) -> Iterator[tuple[frozenset[int], Times]]:
    """Every content and time vector that a step can lead to: first the needed blocks, then any loads."""
    missing = sorted(needed - content)
    if missing:
        for block in missing:
            for room in _rooms(problem, content, times, needed, frozenset(), block):
                yield from _choices(problem, room | {block}, _issue(problem, times, block), needed, index)
        return
    yield from _prefetches(problem, content, times, needed, frozenset())


def _prefetches(
    problem: Problem, content: frozenset[int], times: Times, needed: frozenset[int], new: frozenset[int]
) -> Iterator[tuple[frozenset[int], Times]]:
    yield content, times
    for block in range(len(problem.block_bytes)):
        if block not in content:
            for room in _rooms(problem, content, times, needed, new, block):
                moved = _issue(problem, times, block)
                yield from _prefetches(problem, room | {block}, moved, needed, new | {block})


def _issue(problem: Problem, times: Times, block: int) -> Times:
    compute, lane, waiting = times
    arrival = max(lane, compute) + problem.load_seconds[block]
    return compute, arrival, (*waiting, (block, arrival))


def _rooms(
    problem: Problem, content: frozenset[int], times: Times, needed: frozenset[int], new: frozenset[int], block: int
) -> Iterator[frozenset[int]]:
    """What can stay when `block` comes: the content less any smallest set of victims."""
    sizes = problem.block_bytes
    over = sum(sizes[b] for b in content) + sizes[block] - problem.budget_bytes
    if over <= 0:
        yield content
        return
    flying = {b for b, _ in times[2]}
    free = sorted(content - needed - new - flying)
    for count in range(1, len(free) + 1):
        for victims in combinations(free, count):
            gained = sum(sizes[b] for b in victims)
            if gained >= over and all(gained - sizes[b] < over for b in victims):
                yield content.difference(victims)


def _insert(front: list[Times], times: Times) -> None:
    """Add to the front unless beaten; remove what it beats."""
    if any(_beats(other, times) for other in front):
        return
    front[:] = [other for other in front if not _beats(times, other)]
    front.append(times)


def _beats(one: Times, two: Times) -> bool:
    """Is `one` nowhere later than `two`?"""
    if one[0] > two[0] + 1e-12 or one[1] > max(two[1], two[0]) + 1e-12:
        return False
    late = dict(two[2])
    return all(at <= max(late.get(block, 0.0), two[0]) + 1e-12 for block, at in one[2])
