"""When is each load issued and how long does a cycle take, once it is decided what is kept?

Note "keeping decides all". Fix which gaps are kept. The remaining loads are served in the order of their uses: on one
serial lane, serving a later use first only delays the earlier one (earliest deadline first). The memory profile is then
known slot by slot, so each load is issued at the first slot from which it fits until its use. Issuing earlier is never
later in time (every event is a maximum of earlier ones plus a constant) and takes memory only from loads that come
behind it in the lane. So the search in `search.py` is over one bit per gap and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.planning.plan import Step
from millrace.planning.tape import Gap, Tape


@dataclass(frozen=True, slots=True)
class Schedule:
    """Loads in lane order with the slot that issues each (relative to the round of its use), and the time of one round."""

    kept: tuple[bool, ...]
    loads: tuple[Gap, ...]
    issues: tuple[int, ...]
    seconds: float
    load_bytes: int


def profile(tape: Tape, kept: list[bool]) -> list[int]:
    """Bytes in use or kept at each slot."""
    held = list(tape.base)
    for gap, keep in zip(tape.gaps, kept, strict=True):
        if keep:
            add_gap(held, gap, gap.size)
    return held


def add_gap(held: list[int], gap: Gap, size: int) -> None:
    """Add `size` bytes to every slot that the gap covers."""
    slots = len(held)
    for slot in range(gap.begin + 1, gap.end):
        held[slot % slots] += size


def issue_slots(tape: Tape, loads: list[Gap], held: list[int]) -> list[int] | None:
    """The first slot from which each load fits until its use, in lane order. None when a ring does not settle."""
    if not tape.carries:
        return _issue_round(tape, loads, list(held), 0, [], 1)
    rounds: list[int] = []
    used = held * 3
    _issue_round(tape, loads, used, 0, rounds, 3)
    count = len(loads)
    if rounds[count : 2 * count] != rounds[2 * count :]:
        rounds = []
        _issue_round(tape, loads, held * 8, 0, rounds, 8)
        if rounds[-2 * count : -count] != rounds[-count:]:
            return None
    return rounds[len(rounds) - count :]


def _issue_round(tape: Tape, loads: list[Gap], used: list[int], last: int, issues: list[int], rounds: int) -> list[int]:
    slots, budget = tape.slots, tape.budget
    for offset in range(0, rounds * slots, slots):
        for gap in loads:
            size = gap.size
            room = budget - size
            slot = offset + gap.end
            floor = offset + gap.earliest
            if floor < last:
                floor = last
            while slot > floor and used[slot - 1] <= room:
                slot -= 1
                used[slot] += size
            last = slot
            issues.append(slot - offset)
    return issues


def round_seconds(tape: Tape, loads: list[Gap], issues: list[int]) -> float:
    """Seconds of one settled round of a ring (of the whole run for a tape that is not one)."""
    slots = tape.slots
    pending: list[tuple[int, float]] | None
    due: list[list[tuple[int, float]] | None] = [None] * slots
    for gap, issue in zip(loads, issues, strict=True):
        pending = due[gap.end]
        if pending is None:
            due[gap.end] = [(issue - 1, gap.seconds)]
        else:
            pending.append((issue - 1, gap.seconds))
    ends = [0.0] * slots
    now = lane = 0.0
    started = 0.0
    previous = (-1.0, -1.0)
    for turn in range(1, 7):
        offset = turn * slots
        for slot in range(slots):
            pending = due[slot]
            if pending is not None:
                for issued, seconds in pending:
                    event = ends[offset + issued]
                    lane = (event if event > lane else lane) + seconds
                if lane > now:
                    now = lane
            now += tape.compute[slot]
            ends.append(now)
        state = (now - started, now - lane)
        if not tape.carries or (abs(state[0] - previous[0]) + abs(state[1] - previous[1])) <= 1e-12 * now:
            break
        previous, started = state, now
    return state[0]


def make_schedule(tape: Tape, kept: list[bool], held: list[int] | None = None) -> Schedule | None:
    """The schedule that follows from what is kept; None when it does not fit the budget or does not settle."""
    if held is None:
        held = profile(tape, kept)
    if max(held) > tape.budget:
        return None
    loads = [gap for gap, keep in zip(tape.gaps, kept, strict=True) if not keep]
    issues = issue_slots(tape, loads, held)
    if issues is None:
        return None
    return Schedule(
        kept=tuple(kept),
        loads=tuple(loads),
        issues=tuple(issues),
        seconds=round_seconds(tape, loads, issues),
        load_bytes=sum(tape.problem.block_bytes[gap.block] for gap in loads),
    )


def steps_of(tape: Tape, schedule: Schedule) -> tuple[tuple[tuple[Step, ...], ...], frozenset[int]]:
    """The executor's steps of each cycle (visits, then the boundary behind them), and what is present at the start."""
    slots, period = tape.slots, tape.slots // tape.cycles
    residents = tape.problem.residents
    loads: list[list[int]] = [[] for _ in range(slots + 1)]
    evictions: list[list[int]] = [[] for _ in range(slots + 1)]
    start = set(residents | tape.present)
    for gap, issue in zip(schedule.loads, schedule.issues, strict=True):
        loads[issue % slots].append(gap.block)
        if issue <= 0:
            start.add(gap.block)
        if gap.block not in residents and (tape.ring or gap.begin > 0 or gap.block in tape.present):
            evictions[(gap.begin + 1) % slots].append(gap.block)
    for gap, keep in zip(tape.gaps, schedule.kept, strict=True):
        if keep and gap.begin <= 0:
            start.add(gap.block)
    if not tape.ring:
        last = {gap.block: gap.end for gap in tape.gaps if gap.block not in residents}
        for block in sorted(last.keys() | tape.present):
            evictions[last.get(block, 0) + 1].append(block)
    order = [*range(1, slots), 0 if tape.ring else slots]
    steps = [Step(evictions=tuple(sorted(evictions[slot])), loads=tuple(loads[slot])) for slot in order]
    return tuple(tuple(steps[c * period : (c + 1) * period]) for c in range(tape.cycles)), frozenset(start)
