"""What should be kept between which uses?

First candidates: Belady's rule with different room for loads in flight, and sets of blocks that stay for good, spread
evenly (`candidates.py`). Then a walk of small changes from the best of them (`climb.py`). Both end as soon as a
candidate is within `CLOSE` of the lower bound.
"""

from __future__ import annotations

from millrace.planning.candidates import candidates
from millrace.planning.climb import climb
from millrace.planning.problem import Problem
from millrace.planning.schedule import Schedule, make_schedule
from millrace.planning.tape import Tape, make_tape

CLOSE = 1.005  # over the lower bound: good enough to stop
TURNS_MUST_SAVE = 0.995  # a plan of several cycles is taken only when its time is below this share of a one-cycle plan
_CLIMBS = 2  # how many candidates (of different numbers of cycles) the walk begins from
_MOVES = 2000  # evaluations of the walk on a tape of up to 100 slots; fewer on a longer one


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
        if shape.cycles == tape.cycles and schedule.seconds / _rounds(shape) <= goal:
            return shape, schedule
    if not leaders:
        raise ValueError("no schedule fits the budget although every visit does: please report this problem")
    order = sorted(leaders.values(), key=lambda pair: (_score(*pair), pair[0].cycles))
    for shape, schedule in order[:_CLIMBS]:
        leaders[shape.cycles] = (shape, climb(shape, schedule, goal * _rounds(shape), _moves(shape)))
    order = sorted(leaders.values(), key=lambda pair: (_score(*pair), pair[0].cycles))
    single = leaders.get(tape.cycles)
    if single is not None and _score(*order[0])[0] >= TURNS_MUST_SAVE * _score(*single)[0]:
        return single
    return order[0]


def _rounds(tape: Tape) -> int:
    return tape.cycles if tape.ring else 1


def _moves(tape: Tape) -> int:
    return min(_MOVES, _MOVES * 100 // max(1, tape.slots))


def _score(tape: Tape, schedule: Schedule) -> tuple[float, float]:
    return (schedule.seconds / tape.cycles, schedule.load_bytes / tape.cycles)
