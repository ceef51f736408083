"""Which small changes of what is kept shorten the cycle?

A stall is the end of a chain: loads that follow each other on the lane without a break, from one that memory held back.
Two changes help: keep one of the chain's blocks, so that its load falls away (another block may have to go for it), or
drop what filled the memory when the chain's first load was held back. A local search takes the best of these changes,
and then of their pairs, or the first that saves 1%, until none helps. Work is counted in changes tried, never in
seconds, so the same problem gets the same plan.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from headrace.planning.schedule import AHEAD, KEEP, LATE, Schedule, evaluate, occupy, profile, stalled_chains
from headrace.planning.tape import Tape

_AT_ONCE = 0.99  # a change to less than this share of the time is taken without a look at the others
_FASTER = 1 - 1e-9  # of the time: a smaller difference counts as none

Change = dict[int, int]  # gap -> its new choice


def improve(tape: Tape, starts: Sequence[Schedule], goal: float, trials: int) -> Schedule:
    """The best schedule found from any of `starts`, with at most `trials` changes; ends early at `goal` seconds."""
    search = _Search(tape, goal)
    limits = (trials * place // len(starts) for place in range(1, len(starts) + 1))
    return min((search.descend(*pair) for pair in zip(starts, limits, strict=True)), key=_cost)


def _cost(schedule: Schedule) -> tuple[float, int]:
    return schedule.seconds, schedule.load_bytes


class _Search:
    """The search on one tape, and the choices that it has tried."""

    def __init__(self, tape: Tape, goal: float) -> None:
        self.tape = tape
        self.goal = goal
        self.tried = 0
        self.known: set[tuple[int, ...]] = set()
        self.index = {(gap.block, gap.end): index for index, gap in enumerate(tape.gaps)}
        # The slots of each gap in which keeping its block takes memory that it would not take otherwise.
        self.covered = [0 if gap.free else self._bits(gap.begin + 1, gap.end) for gap in tape.gaps]

    def _bits(self, first: int, end: int) -> int:
        """The slots from `first` to before `end`, one bit each; those before 0 are of the round before."""
        slots = self.tape.slots
        bits = ((1 << max(0, end - first)) - 1) << first % slots
        return (bits | bits >> slots) & ((1 << slots) - 1)

    def descend(self, schedule: Schedule, limit: int) -> Schedule:
        """The schedule after better and better changes, until none helps or `limit` of them were tried in all."""
        while self.tried < limit and schedule.seconds > self.goal:
            best, held = schedule, profile(self.tape, schedule.choices)
            for change in self._changes(schedule):
                found = self._changed(schedule, list(held), change)
                if found is not None and _cost(found) < (best.seconds * _FASTER, best.load_bytes):
                    best = found
                if best.seconds < schedule.seconds * _AT_ONCE or self.tried >= limit:
                    break
            if best is schedule:
                break
            schedule = best
        return schedule

    def _changed(self, schedule: Schedule, held: list[int], change: Change) -> Schedule | None:
        """The schedule after a change, with room made for it. None when it is known, slower or does not fit."""
        self.tried += 1
        choices = list(schedule.choices)
        for index, choice in change.items():
            self._set(choices, held, index, choice)
        if not self._make_room(choices, held, change) or tuple(choices) in self.known:
            return None
        self.known.add(tuple(choices))
        return evaluate(self.tape, choices, held, schedule.seconds)

    def _changes(self, schedule: Schedule) -> Iterator[Change]:
        """Changes that may help: keep a load of a stalled chain, alone or in place of another; free memory; load late;
        two of these."""
        gaps = self.tape.gaps
        hot, blocked = self._stalls(schedule)
        kept = [i for i, choice in enumerate(schedule.choices) if choice == KEEP and not gaps[i].free]
        keepable = [index for index in hot if gaps[index].keepable]
        keep = [{index: KEEP} for index in keepable]
        free = [
            {index: choice} for index in kept if self.covered[index] & blocked for choice in (AHEAD, LATE, LATE + 1)
        ]
        delay = [
            {index: choice}
            for index in hot
            for choice in (AHEAD, LATE, LATE + 1, LATE + 2)
            if choice != schedule.choices[index]
        ]
        yield from keep
        for index in keepable:
            for other in kept:
                if self.covered[index] & self.covered[other]:
                    yield from ({index: KEEP, other: choice} for choice in (AHEAD, LATE))
        yield from free
        yield from delay
        for one, two in combinations([*keep, *free, *delay], 2):
            if one.keys() != two.keys():
                yield {**one, **two}

    def _stalls(self, schedule: Schedule) -> tuple[list[int], int]:
        """The loads in stalled chains, and the slots in which memory held back the first of a chain."""
        hot: dict[int, None] = {}
        blocked = 0
        for chain in stalled_chains(self.tape, schedule):
            loads = [schedule.loads[place] for place in chain]
            hot.update(dict.fromkeys(self.index[gap.block, gap.end] for gap in loads))
            issue = schedule.issues[chain[0]]
            blocked |= self._bits(max(issue - 2, loads[0].earliest), issue)
        return [index for index in hot if not self.tape.gaps[index].free], blocked

    def _make_room(self, choices: list[int], held: list[int], change: Change) -> bool:
        """Give up other kept blocks where memory is too full, first those that are used last; False if that fails."""
        while (most := max(held)) > self.tape.budget:
            slot = held.index(most)
            for index in reversed(range(len(choices))):
                if choices[index] == KEEP and self.covered[index] >> slot & 1 and index not in change:
                    break
            else:
                return False
            self._set(choices, held, index, AHEAD)
        return True

    def _set(self, choices: list[int], held: list[int], index: int, choice: int) -> None:
        gap = self.tape.gaps[index]
        occupy(held, gap, choices[index], -gap.size)
        occupy(held, gap, choice, gap.size)
        choices[index] = choice
