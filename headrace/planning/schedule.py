"""When is each load issued, and how long does a cycle take, once it is decided what is kept?

Note "choices decide all". Each gap of the tape gets one choice: KEEP the block, load it AHEAD, or load it LATE (at its
own visit, or LATE + d: d slots before it). The loads ahead are served in the order of their uses: serving a later use
first on one serial lane only delays the earlier one. LATE is for the exception, a short load that had better leave its
memory to a long load behind it. The memory profile is then known slot by slot, so each load ahead is issued at the
first slot from which it fits until its use. Issuing it earlier delays nothing (every event is a maximum of earlier
events plus a constant) and takes memory only from loads behind it in the lane. So the search in `search.py` is over one
choice per gap and nothing else.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.planning.plan import Step
from headrace.planning.tape import Gap, Tape

AHEAD: Final = 0
KEEP: Final = 1
LATE: Final = 2  # LATE + d: issued d slots before the use
_ROUNDS = 200  # at most this many are simulated; after that, a change is less than a round in 200


@dataclass(frozen=True, slots=True)
class Schedule:
    """Loads in the order of use, the slot that issues each (relative to the round of its use), and the time."""

    choices: tuple[int, ...]
    loads: tuple[Gap, ...]
    issues: tuple[int, ...]
    seconds: float  # of one settled round of a ring, or of the whole single pass
    rounds: int  # the number of rounds until it settles
    load_bytes: int


def profile(tape: Tape, choices: Sequence[int]) -> list[int]:
    """Bytes in use or kept at each slot."""
    held = list(tape.base)
    for gap, choice in zip(tape.gaps, choices, strict=True):
        occupy(held, gap, choice, gap.size)
    return held


def occupy(held: list[int], gap: Gap, choice: int, size: int) -> None:
    """Add `size` bytes to every slot that a gap surely takes: all of them when kept, the last ones when loaded late."""
    if choice != AHEAD:
        slots = len(held)
        for slot in range(gap.begin + 1 if choice == KEEP else _late_slot(gap, choice), gap.end):
            held[slot % slots] += size


def _late_slot(gap: Gap, choice: int) -> int:
    return max(gap.earliest, gap.end - (choice - LATE))


def evaluate(
    tape: Tape, choices: Sequence[int], held: list[int] | None = None, limit_seconds: float = float("inf")
) -> Schedule | None:
    """The schedule that follows from the choices (`held`: their profile, if it is known).

    None when it does not fit or settle, or when it takes longer than the limit, if that is seen early.
    """
    held = profile(tape, choices) if held is None else held
    if max(held) > tape.budget:
        return None
    chosen = [(gap, choice) for gap, choice in zip(tape.gaps, choices, strict=True) if choice != KEEP]
    loads = tuple([gap for gap, _ in chosen])
    if sum([gap.seconds for gap in loads]) > limit_seconds:
        return None
    slots = _issue_slots(tape, [gap for gap, choice in chosen if choice == AHEAD], held)
    if slots is None:
        return None
    queue = iter(slots)
    issues = tuple([next(queue) if choice == AHEAD else _late_slot(gap, choice) for gap, choice in chosen])
    settled = _Lanes(tape, loads, issues).settle(limit_seconds)
    if settled is None:
        return None
    seconds, rounds = settled
    sizes = tape.problem.block_bytes
    return Schedule(
        choices=tuple(choices),
        loads=loads,
        issues=issues,
        seconds=seconds,
        rounds=rounds,
        load_bytes=sum([sizes[gap.block] for gap in loads]),
    )


def _issue_slots(tape: Tape, loads: Sequence[Gap], held: Sequence[int]) -> list[int] | None:
    """The first slot from which each load fits until its use, in lane order. None when a ring does not settle.

    No load is issued before the load in front of it. So a slot between a load's issue and its use holds all loads in
    front of it whose uses come after the slot. The load fits there if the bytes of all loads so far, its own included,
    are at most the slot's room: what the budget leaves beside `held`, plus the bytes of all loads whose uses have come.
    A slot without room for one load has none for any load behind it.
    """
    spare = [tape.budget - nbytes for nbytes in held]
    before: list[int] = []
    rooms: deque[tuple[int, int]] = deque()  # room and slot; slots are left out if a later one has no more room
    last = seen = placed = 0
    for offset in range(0, 8 * tape.slots if tape.carries else 1, tape.slots):
        issues = []
        for gap in loads:
            end, earliest = offset + gap.end, offset + gap.earliest
            while seen < end:
                room = spare[seen - offset] + placed
                while rooms and rooms[-1][0] >= room:
                    rooms.pop()
                rooms.append((room, seen))
                seen += 1
            placed += gap.size
            if earliest > last:
                last = earliest
            while rooms and rooms[0][0] < placed:
                tight = rooms.popleft()[1]
                if tight >= last:
                    last = tight + 1
            issues.append(last - offset)
        if issues == before or not tape.carries:
            return issues
        before = issues
    return None


class _Lanes:
    """The two lanes, walked slot by slot until a round takes as long as the one before."""

    def __init__(self, tape: Tape, loads: Sequence[Gap], issues: Sequence[int]) -> None:
        self.tape = tape
        slots = tape.slots
        self.due = [gap.end for gap in loads]  # the slot that waits for each load; ascending
        # The order in which loads are issued. A slot may issue for later rounds, too: nearest use first.
        by_slot = [(issue % slots, (gap.end - issue) % slots) for gap, issue in zip(loads, issues, strict=True)]
        order = sorted(range(len(loads)), key=by_slot.__getitem__)
        self.issued = [(by_slot[place][0], place, loads[place].seconds) for place in order]

    def settle(self, limit_seconds: float) -> tuple[float, int] | None:
        """Seconds of a settled round, and the number of rounds until it settles; None if the only one is too long.

        If loads take little longer than compute, each round uses up a little of what was loaded ahead, and the lasting
        stall begins only when all of that is gone.
        """
        tape, compute, other = self.tape, self.tape.compute, self.tape.other
        due, issued = [*self.due, tape.slots], [*self.issued, (tape.slots, 0, 0.0)]
        arrival = [0.0] * len(due)
        spare = math.inf if tape.carries else limit_seconds - sum(compute)
        now = lane = started = 0.0
        previous = (-1.0, -1.0)
        rounds = 0
        while True:
            rounds += 1
            first = waits = 0  # of the loads that are not issued yet, and of those that no slot has waited for
            issue, place, seconds = issued[0]
            for slot in range(tape.slots):
                while issue == slot:
                    lane = (now if now > lane else lane) + seconds
                    arrival[place] = lane
                    first += 1
                    issue, place, seconds = issued[first]
                while due[waits] == slot:
                    if arrival[waits] > now:
                        spare -= arrival[waits] - now
                        if spare < 0:
                            return None
                        now = arrival[waits]
                    waits += 1
                if other[slot]:
                    lane = (now if now > lane else lane) + other[slot]
                now += compute[slot]
            state = (now - started, lane - now if lane > now else 0.0)
            settled = abs(state[0] - previous[0]) + abs(state[1] - previous[1]) <= 1e-12 * now
            if settled or not tape.carries or rounds == _ROUNDS:
                return state[0], rounds
            previous, started = state, now

    def chains(self, rounds: int) -> list[list[int]]:
        """The chains of loads that end in a stall in the last of `rounds`. A chain begins after a pause of the lane."""
        tape = self.tape
        arrival = [0.0] * len(self.due)
        now = lane = 0.0
        order: list[int] = []  # loads of all rounds so far, in the order of the lane
        begins = 0  # where in `order` the present chain begins
        spans: dict[int, tuple[int, int]] = {}
        found: list[tuple[int, int]] = []  # of chains that begin alike, the longer one has all of the other
        for turn in range(1, rounds + 1):
            issued, due = deque(self.issued), deque(enumerate(self.due))
            for slot in range(tape.slots):
                while issued and issued[0][0] == slot:
                    _, place, seconds = issued.popleft()
                    if lane < now:
                        begins = len(order)
                    order.append(place)
                    lane = max(now, lane) + seconds
                    arrival[place] = lane
                    spans[place] = max(begins, len(order) - 1 - len(arrival)), len(order)
                while due and due[0][1] == slot:
                    place = due.popleft()[0]
                    if arrival[place] > now:
                        now = arrival[place]
                        if turn == rounds:
                            if found and found[-1][0] == spans[place][0] and found[-1][1] <= spans[place][1]:
                                found.pop()
                            found.append(spans[place])
                lane = max(now, lane) + tape.other[slot] if tape.other[slot] else lane
                now += tape.compute[slot]
        return [order[begin:end] for begin, end in found]


def stalled_chains(tape: Tape, schedule: Schedule) -> list[list[int]]:
    """The loads that kept the lane busy up to a stall, in order, as places in `schedule.loads`: of each chain of loads
    those up to its last stall.
    """
    return _Lanes(tape, schedule.loads, schedule.issues).chains(schedule.rounds)


def steps_of(tape: Tape, schedule: Schedule) -> tuple[tuple[tuple[Step, ...], ...], frozenset[int]]:
    """The executor's steps of each cycle (visits, then the boundary behind them), and what is present at the start."""
    slots, period = tape.slots, tape.slots // tape.cycles
    residents = tape.problem.residents
    loads: list[list[int]] = [[] for _ in range(slots + 1)]
    evictions: list[list[int]] = [[] for _ in range(slots + 1)]
    start = set(residents - tape.problem.changing if tape.ring else residents)
    order = sorted(range(len(schedule.loads)), key=lambda place: schedule.loads[place].end - schedule.issues[place])
    for place in order:
        gap, issue = schedule.loads[place], schedule.issues[place]
        loads[issue % slots].append(gap.block)
        if issue <= 0:
            start.add(gap.block)
        if gap.block not in residents and (tape.ring or gap.begin > 0):
            evictions[(gap.begin + 1) % slots].append(gap.block)
    for gap, choice in zip(tape.gaps, schedule.choices, strict=True):
        if choice == KEEP and gap.begin <= 0:
            start.add(gap.block)
    if not tape.ring:
        last = {gap.block: gap.end for gap in tape.gaps if gap.block not in residents}
        for block in sorted(last):
            evictions[last[block] + 1].append(block)
    walk = [*range(1, slots), 0 if tape.ring else slots]
    steps = [Step(evictions=tuple(sorted(evictions[slot])), loads=tuple(loads[slot])) for slot in walk]
    return tuple(tuple(steps[c * period : (c + 1) * period]) for c in range(tape.cycles)), frozenset(start)
