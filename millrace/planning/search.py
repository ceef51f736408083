"""What should be kept between which uses?

First candidates: Belady's rule with different room for loads in flight, and sets of blocks that stay for good, spread
evenly (`candidates.py`). Then a walk of small changes from the best of them (`climb.py`). Both end as soon as a
candidate is within `CLOSE` of the lower bound.
"""

from __future__ import annotations

from millrace.planning.candidates import candidates
from millrace.planning.climb import Known, climb, polish
from millrace.planning.problem import Problem
from millrace.planning.schedule import AHEAD, KEEP, Schedule, make_schedule
from millrace.planning.tape import Tape, make_tape

CLOSE = 1.005  # over the lower bound: good enough to stop
WALKED_FROM = 1.02  # over the lower bound: a long tape's candidate is walked from when it is not faster than this
TURNING_MAY_WIN = 1.05  # a candidate of several cycles is walked from when it is not slower than this
TURNING_MUST_SAVE = 0.995  # and taken when it is faster than this, over the one-cycle plan
_WALKS = 2  # how many candidates of several cycles are walked from
_SHORT = 40  # slots up to which a plan is polished, and a one-cycle plan is tried over several cycles
_TINY = 14  # slots up to which a steady state is walked to more than once
_TRIALS = 3000  # pairs of changes that polishing tries, at most
_LONG = 120  # slots up to which a plan of several cycles is improved by a walk
_WALKED = 2  # walks from a one-cycle plan, each from the best of the one before
_MOVES = 2500  # changes that a walk tries, at most
_QUICK = 60  # slots up to which a walk is so quick that it is made from wherever the candidates end


def best_ring(problem: Problem, bound: float) -> tuple[Tape, Schedule]:
    """The best steady state found."""
    single = make_tape(problem, cycles=1, ring=True)
    return _best(single, bound)


def best_run(problem: Problem, cycles: int, present: frozenset[int]) -> tuple[Tape, Schedule]:
    """The best run found."""
    tape = make_tape(problem, cycles=cycles, ring=False, present=present)
    return _best(tape, problem.compute_seconds)


def _best(tape: Tape, bound: float) -> tuple[Tape, Schedule]:
    goal = bound * CLOSE
    leaders: dict[int, tuple[Tape, Schedule]] = {}  # cycles -> the best of that many
    for shape, kept in candidates(tape):
        schedule = make_schedule(shape, kept)
        if schedule is None:
            continue
        leader = leaders.get(shape.cycles)
        if leader is None or _score(shape, schedule) < _score(*leader):
            leaders[shape.cycles] = (shape, schedule)
        if shape.cycles == tape.cycles and schedule.seconds / shape.cycles <= goal:
            return shape, schedule
    return _improved(tape, list(leaders.values()), goal)


def _improved(tape: Tape, leaders: list[tuple[Tape, Schedule]], goal: float) -> tuple[Tape, Schedule]:
    """Walk from the best one-cycle candidate, then from those of several cycles that are worth their turns."""
    leaders.sort(key=lambda pair: (_score(*pair), pair[0].cycles))
    best = next((pair for pair in leaders if pair[0].cycles == tape.cycles), None)
    if best is not None:
        best = (tape, _walked(tape, best[1], goal * tape.cycles))
        if best[1].seconds <= goal * tape.cycles:
            return best
    turning = [pair for pair in leaders if pair[0].cycles != tape.cycles]
    limit = TURNING_MUST_SAVE
    for shape, schedule in turning[:_WALKS] + _repeated(best, tape):
        if best is not None and _score(shape, schedule)[0] > TURNING_MAY_WIN * _score(*best)[0]:
            continue
        pair = (shape, climb(shape, schedule, goal * shape.cycles, _moves(shape) if shape.slots <= _LONG else 0))
        if best is None or _score(*pair)[0] < limit * _score(*best)[0]:
            best, limit = pair, 1.0
    if best is None:
        raise ValueError("no schedule fits the budget although every visit does: please report this problem")
    return best


def _walked(tape: Tape, schedule: Schedule, goal: float) -> Schedule:
    """The best of some walks: one from the schedule; where that is quick, more from loading everything and the best."""
    best = schedule
    if tape.slots > _QUICK and schedule.seconds <= goal / CLOSE * WALKED_FROM:
        return best  # walks from there gained 0.07% on the average, and took most of the planner's time
    known = Known(tape)
    for seed in range(_WALKED):
        best = climb(tape, best, goal, _moves(tape), seed=seed, known=known)
    if tape.slots > _SHORT:
        return best
    trials = _TRIALS // 4
    if tape.slots <= _TINY or not tape.ring:
        trials = _TRIALS
        plain = make_schedule(tape, [KEEP if gap.free else AHEAD for gap in tape.gaps])
        for seed, start in enumerate((plain, None, plain), start=1):
            found = climb(tape, start or best, goal, _moves(tape), seed=seed, known=known)
            if _score(tape, found) < _score(tape, best):
                best = found
    return polish(tape, best, goal, trials, known)


def _repeated(single: tuple[Tape, Schedule] | None, tape: Tape) -> list[tuple[Tape, Schedule]]:
    """A one-cycle plan laid out over two and three cycles, where that is short: a walk may find turns to take."""
    found = []
    for cycles in (2, 3):
        if single is not None and tape.ring and tape.slots * cycles <= _SHORT:
            shape = make_tape(tape.problem, cycles=cycles, ring=True)
            schedule = make_schedule(shape, single[1].choices * cycles)
            if schedule is not None:
                found.append((shape, schedule))
    return found


def _moves(tape: Tape) -> int:
    return min(_MOVES, 120 + 60_000 // tape.slots)


def _score(tape: Tape, schedule: Schedule) -> tuple[float, float]:
    return (schedule.seconds / tape.cycles, schedule.load_bytes / tape.cycles)
