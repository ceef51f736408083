"""When is each load issued, and how long does a cycle take, once it is decided what is kept?

Note "choices decide all". Each gap of the tape gets one choice: KEEP the block, load it AHEAD, or load it LATE (at its
own visit, or LATE + d: d slots before it). The loads ahead are served in the order of their uses: serving a later use
first on one serial lane only delays the earlier one. The exception is why LATE exists: a short load whose bytes are
worth more to a long one behind it. The memory profile is then known slot by slot, so each load ahead is issued at the
first slot from which it fits until its use. Issuing earlier is never later in time (every event is a maximum of earlier
ones plus a constant) and takes memory only from loads that come behind it in the lane. So the search in `search.py` is
over one choice per gap and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.planning.plan import Step
from headrace.planning.tape import Gap, Tape

AHEAD: Final = 0
KEEP: Final = 1
LATE: Final = 2  # LATE + d: issued d slots before the use
_ROUNDS = 200  # at most so many are simulated; after that, a change is less than a round in 200


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

    None when it does not fit or settle, or when its loads alone take longer than the limit.
    """
    held = profile(tape, choices) if held is None else held
    if max(held) > tape.budget:
        return None
    chosen = [(gap, choice) for gap, choice in zip(tape.gaps, choices, strict=True) if choice != KEEP]
    if sum([gap.seconds for gap, _ in chosen]) > limit_seconds:
        return None
    ahead = [gap for gap, choice in chosen if choice == AHEAD]
    slots = _issue_slots(tape, ahead, held)
    if slots is None:
        return None
    queue = iter(slots)
    loads = tuple(gap for gap, _ in chosen)
    issues = tuple(next(queue) if choice == AHEAD else _late_slot(gap, choice) for gap, choice in chosen)
    seconds, rounds = _Lanes(tape, loads, issues).settle()
    return Schedule(
        choices=tuple(choices),
        loads=loads,
        issues=issues,
        seconds=seconds,
        rounds=rounds,
        load_bytes=sum(tape.problem.block_bytes[gap.block] for gap in loads),
    )


def _issue_slots(tape: Tape, loads: list[Gap], held: list[int]) -> list[int] | None:
    """The first slot from which each load fits until its use, in lane order. None when a ring does not settle."""
    if not tape.carries:
        return _issue_round(tape, loads, list(held), 0, 0)
    before: list[int] = []
    used = held * 8
    last = 0
    for turn in range(8):
        issues = _issue_round(tape, loads, used, turn * tape.slots, last)
        if issues == before:
            return issues
        before, last = issues, issues[-1] + turn * tape.slots
    return None


def _issue_round(tape: Tape, loads: list[Gap], used: list[int], offset: int, last: int) -> list[int]:
    """The slots (relative to the round at `offset`) that issue one round of loads, none before `last`."""
    issues = []
    budget = tape.budget
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


class _Lanes:
    """The two lanes, walked slot by slot until a round takes as long as the one before."""

    def __init__(self, tape: Tape, loads: Sequence[Gap], issues: Sequence[int]) -> None:
        self.tape = tape
        slots = tape.slots
        issued: list[list[int]] = [[] for _ in range(slots)]
        self.due: list[list[int]] = [[] for _ in range(slots)]  # loads that a slot waits for
        for place, (gap, issue) in enumerate(zip(loads, issues, strict=True)):
            issued[issue % slots].append(place)
            self.due[gap.end].append(place)
        for issue, places in enumerate(issued):
            if len(places) > 1:  # a slot may issue for later rounds, too: nearest use first
                places.sort(key=lambda place: (loads[place].end - issue) % slots)
        self.issued = [[(place, loads[place].seconds) for place in places] for places in issued]
        self.arrival = [0.0] * len(loads)

    def settle(self) -> tuple[float, int]:
        """Seconds of a settled round, and the number of rounds until it settles.

        If loads take little longer than compute, each round uses up a little of what was loaded ahead, and the lasting
        stall begins only when all of that is gone.
        """
        tape, arrival, compute = self.tape, self.arrival, self.tape.compute
        issued, due, other = self.issued, self.due, self.tape.other
        now = lane = started = 0.0
        previous = (-1.0, -1.0)
        rounds = 0
        while True:
            rounds += 1
            for slot in range(tape.slots):
                for place, seconds in issued[slot]:
                    lane = (now if now > lane else lane) + seconds
                    arrival[place] = lane
                for place in due[slot]:
                    if arrival[place] > now:
                        now = arrival[place]
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
        tape, arrival = self.tape, self.arrival
        now = lane = 0.0
        order: list[int] = []  # loads of all rounds so far, in the order of the lane
        begins = 0  # where in `order` the present chain begins
        spans: dict[int, tuple[int, int]] = {}
        found: list[list[int]] = []
        for turn in range(1, rounds + 1):
            for slot in range(tape.slots):
                for place, seconds in self.issued[slot]:
                    if lane < now:
                        begins = len(order)
                    order.append(place)
                    lane = max(now, lane) + seconds
                    arrival[place] = lane
                    spans[place] = max(begins, len(order) - 1 - len(arrival)), len(order)
                for place in self.due[slot]:
                    if arrival[place] > now:
                        now = arrival[place]
                        if turn == rounds:
                            found.append(order[slice(*spans[place])])
                lane = max(now, lane) + tape.other[slot] if tape.other[slot] else lane
                now += tape.compute[slot]
        return found


def stalled_chains(tape: Tape, schedule: Schedule) -> list[list[int]]:
    """For each stall, the loads that kept the lane busy up to it, in order, as places in `schedule.loads`."""
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
