"""What should be kept between which uses?"""

from __future__ import annotations

from millrace.planning.belady import joined, sweep
from millrace.planning.problem import Problem
from millrace.planning.schedule import Schedule, make_schedule
from millrace.planning.tape import Tape, make_tape


def best_ring(problem: Problem, bound: float) -> tuple[Tape, Schedule]:
    """The best steady state found."""
    single = make_tape(problem, cycles=1, ring=True)
    best: tuple[Tape, Schedule] | None = None
    for tape, kept in _sweeps(problem, single):
        schedule = make_schedule(tape, kept)
        if schedule is not None and (best is None or _score(tape, schedule) < _score(*best)):
            best = (tape, schedule)
    if best is None:
        raise ValueError("no schedule fits: this is a defect of the planner")
    return best


def best_run(problem: Problem, cycles: int, present: frozenset[int]) -> tuple[Tape, Schedule]:
    """The best run found."""
    tape = make_tape(problem, cycles=cycles, ring=False, present=present)
    best: Schedule | None = None
    for reserve in _reserves(tape):
        kept = sweep(tape, lambda slot, reserve=reserve: reserve, rounds=1)[0]  # type: ignore[misc]
        schedule = make_schedule(tape, kept)
        if schedule is not None and (best is None or _score(tape, schedule) < _score(tape, best)):
            best = schedule
    if best is None:
        raise ValueError("no schedule fits: this is a defect of the planner")
    return tape, best


def _score(tape: Tape, schedule: Schedule) -> tuple[float, float]:
    return (schedule.seconds / tape.cycles, schedule.load_bytes / tape.cycles)


def _reserves(tape: Tape) -> list[int]:
    largest = max((gap.size for gap in tape.gaps), default=0)
    return sorted({min(tape.budget, largest * halves // 2) for halves in range(12)})


def _sweeps(problem: Problem, single: Tape) -> list[tuple[Tape, list[bool]]]:
    found = []
    for reserve in _reserves(single):
        rounds = sweep(single, lambda slot, reserve=reserve: reserve, rounds=30)  # type: ignore[misc]
        if len(rounds) == 1:
            found.append((single, rounds[0]))
        else:
            found.append((make_tape(problem, cycles=len(rounds), ring=True), joined(rounds)))
    return found
