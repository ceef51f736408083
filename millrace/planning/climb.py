"""Which small changes of what is kept shorten the cycle?

A stall is the end of a chain: loads that follow each other on the lane without a break, from one that memory held back.
Two things help: keep one of the chain's blocks, so that its load falls away (something else may have to go for it), or
drop what filled the memory when the chain's first load was held back. The walk tries such changes at random (from a
fixed seed: the same problem gets the same plan) and takes what is no worse than a threshold that falls to zero. Of
those that are equally fast it ends with the one that holds least.
"""

from __future__ import annotations

import random

from millrace.planning.schedule import (
    AHEAD,
    KEEP,
    LATE,
    Schedule,
    evaluate,
    occupy,
    peak_bytes,
    profile,
    stalled_chains,
)
from millrace.planning.tape import Tape

_TOLERANCE = 0.05  # first threshold: how much worse than the current time a change may be,
_TOLERANCE_SLOTS = 0.6  # and this over the number of slots: on a long tape one change matters less
_EQUAL = 1e-3  # times that differ by less are the same: none is measured more exactly
_ONE_MORE = 0.3  # how often a change is made of one more
_LATE_SHARE = 0.4  # how often a load is placed late


class Known:
    """What walks on one tape have found: on a short one they come by the same choices again and again."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.schedules: dict[tuple[int, ...], Schedule] = {}
        self.stalls: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}  # of `_Walk.hot` and `_Walk.blocked`

    def evaluate(self, choices: list[int], held: list[int], limit: float) -> Schedule | None:
        """As `evaluate`; a known schedule also where it takes longer than the limit."""
        key = tuple(choices)
        schedule = self.schedules.get(key)
        if schedule is None:
            schedule = evaluate(self.tape, choices, held, limit)
            if schedule is not None:
                self.schedules[key] = schedule
        return schedule


def climb(
    tape: Tape, schedule: Schedule, goal: float, moves: int, *, seed: int = 0, known: Known | None = None
) -> Schedule:
    """The best schedule met in a walk of `moves` changes; ends early at `goal` seconds."""
    if schedule.seconds <= goal:
        return schedule
    walk = _Walk(tape, schedule, seed, known or Known(tape))
    for move in range(moves):
        walk.tolerance = min(_TOLERANCE, _TOLERANCE_SLOTS / tape.slots) * (1 - (move + 1) / moves) ** 2
        if walk.best.seconds <= goal:
            break
        walk.change()
    return walk.best


def polish(tape: Tape, schedule: Schedule, goal: float, most: int, known: Known) -> Schedule:
    """The best schedule that no change of one choice or of two improves; for short tapes: at most `most` are tried."""
    options = [
        (index, choice)
        for index, gap in enumerate(tape.gaps)
        if not gap.free
        for choice in (AHEAD, LATE, LATE + 1, KEEP)
        if choice != KEEP or gap.keepable
    ]
    pairs = [(one, two) for place, one in enumerate(options) for two in options[place:]]
    best, trials = schedule, 0
    improved = True
    while improved and best.seconds > goal and trials < most:
        improved = False
        for pair in pairs:
            choices = list(best.choices)
            for index, choice in pair:
                choices[index] = choice
            trials += 1
            found = known.evaluate(choices, profile(tape, choices), best.seconds)
            if found is not None and (found.seconds, found.load_bytes) < (best.seconds * (1 - 1e-9), best.load_bytes):
                best, improved = found, True
                break
            if trials >= most:
                break
    return best


class _Walk:
    """The current choices, the best so far, and where the current ones stall."""

    def __init__(self, tape: Tape, schedule: Schedule, seed: int, known: Known) -> None:
        self.tape = tape
        self.known = known
        self.random = random.Random(seed)
        self.choices = list(schedule.choices)
        self.held = profile(tape, self.choices)
        self.current = schedule
        self.best = schedule
        self.best_peak = peak_bytes(tape, schedule)
        self.fastest = schedule.seconds
        self.tolerance = 0.0
        self.index = {(gap.block, gap.end): index for index, gap in enumerate(tape.gaps)}
        self.covering: list[list[int]] = [[] for _ in range(tape.slots)]
        for index, gap in enumerate(tape.gaps):
            if gap.keepable and not gap.free:
                for slot in range(gap.begin + 1, gap.end):
                    self.covering[slot % tape.slots].append(index)
        self._look()

    def change(self) -> None:
        """Try one change; keep it when the time allows."""
        before: dict[int, int] = {}
        self._propose(before)
        while self.random.random() < _ONE_MORE:
            self._propose(before)
        if not before:
            return
        limit = self.current.seconds * (1 + self.tolerance)
        schedule = self.known.evaluate(self.choices, self.held, limit)
        if schedule is None or schedule.seconds > limit:
            for index, choice in before.items():
                self._set(index, choice)
            return
        self.current = schedule
        self._rank(schedule)
        self._look()

    def _rank(self, schedule: Schedule) -> None:
        """The best is what holds and loads least of all that are as fast as the fastest."""
        self.fastest = min(self.fastest, schedule.seconds)
        limit = self.fastest * (1 + _EQUAL)
        if schedule.seconds > limit or schedule is self.best:
            return
        best, peak = self.best, peak_bytes(self.tape, schedule)
        order = (peak, schedule.load_bytes, schedule.seconds)
        if best.seconds > limit or order < (self.best_peak, best.load_bytes, best.seconds):
            self.best, self.best_peak = schedule, peak

    def _look(self) -> None:
        """Find the loads in stalled chains, and the slots in which memory held back the first of a chain."""
        found = self.known.stalls.get(self.current.choices)
        if found is not None:
            self.hot, self.blocked = found
            return
        chains = stalled_chains(self.tape, self.current)
        hot: dict[int, None] = {}
        blocked: dict[int, None] = {}
        for chain in chains:
            for place in chain:
                gap = self.current.loads[place]
                hot[self.index[gap.block, gap.end]] = None
            head = self.current.loads[chain[0]]
            slot = self.current.issues[chain[0]]
            for earlier in range(max(slot - 2, head.earliest), slot):
                blocked[earlier % self.tape.slots] = None
        self.hot, self.blocked = list(hot), list(blocked)
        self.known.stalls[self.current.choices] = self.hot, self.blocked

    def _propose(self, before: dict[int, int]) -> None:
        """Change some choices, and note what they were: keep or delay a hot load, or clear a blocked slot."""
        draw = self.random.random()
        if draw < 0.1:
            index = self.random.randrange(len(self.choices))
            if self.choices[index] == KEEP or self.random.random() < 0.5:
                self._load(index, before)
            else:
                self._keep(index, before)
        elif draw < 0.35 and self.blocked:
            kept = [i for i in self.covering[self.random.choice(self.blocked)] if self.choices[i] == KEEP]
            if kept:
                self._load(self.random.choice(kept), before)
                if self.random.random() < 0.5:
                    self._keep(self.random.choice(self.hot), before)
        elif draw < 0.5:
            index = self.random.choice(self.hot)
            self._choose(index, self._late() if self.choices[index] == AHEAD else AHEAD, before)
            self._clear(index, before)
        else:
            self._keep(self.random.choice(self.hot), before)

    def _keep(self, index: int, before: dict[int, int]) -> None:
        """Keep a block through a gap, and load others that are in the way (ahead, or now and then late)."""
        gap = self.tape.gaps[index]
        if not gap.keepable or gap.free:
            return
        self._choose(index, KEEP, before)
        self._clear(index, before)

    def _clear(self, index: int, before: dict[int, int]) -> None:
        """Give up others that are kept where the memory is too full."""
        while (over := max(self.held)) > self.tape.budget:
            there = self.covering[self.held.index(over)]
            kept = [other for other in there if self.choices[other] == KEEP and other != index]
            if not kept:
                return
            self._load(self.random.choice(kept), before)

    def _load(self, index: int, before: dict[int, int]) -> None:
        if not self.tape.gaps[index].free:
            self._choose(index, self._late() if self.random.random() < _LATE_SHARE else AHEAD, before)

    def _late(self) -> int:
        draw = self.random.random()
        return LATE if draw < 0.6 else LATE + 1 if draw < 0.85 else LATE + 2

    def _choose(self, index: int, choice: int, before: dict[int, int]) -> None:
        before.setdefault(index, self.choices[index])
        self._set(index, choice)

    def _set(self, index: int, choice: int) -> None:
        gap = self.tape.gaps[index]
        occupy(self.held, gap, self.choices[index], -gap.size)
        occupy(self.held, gap, choice, gap.size)
        self.choices[index] = choice
