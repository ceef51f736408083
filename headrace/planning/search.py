"""Which plan should the executor walk? What should be kept between which uses?

The search begins with candidates: Belady's rule with different room for loads in flight, and evenly spread sets of
blocks that stay for good (`candidates.py`). It then tries small changes of the best of them (`improve.py`). Both parts
end as soon as a plan is within `CLOSE` of the lower bound.
"""

from headrace.planning.bounds import lower_bound
from headrace.planning.candidates import candidates
from headrace.planning.improve import improve
from headrace.planning.plan import Plan, Prediction, Step
from headrace.planning.problem import Problem
from headrace.planning.schedule import AHEAD, KEEP, Schedule, evaluate, steps_of
from headrace.planning.tape import Tape, make_tape

CLOSE = 1.005  # times the lower bound: good enough to stop
FAR = 1.02  # times the goal: beyond it, a search from each candidate is worth it
TURNING_MAY_WIN = 1.05  # a plan of several cycles is improved if it takes at most this much of the one-cycle plan
TURNING_MUST_SAVE = 0.995  # and taken if it then takes less than this much of it
TRIALS = 1000  # at most this many schedules are tried to improve one,
_TRIED_SLOTS = 48_000  # with this many slots in all of them together,
_TRIED_PAIRS = 9_600_000  # and this many pairs of slots, because each load is placed by a walk over slots
_SHORT = 40  # up to this many slots, every candidate is improved, and a one-cycle plan is tried over several cycles
_LONG = 120  # up to this many slots, a plan of several cycles is improved


def make_plan(problem: Problem) -> Plan:
    """The plan of the steady state, or of a single pass from an empty device if the problem is not cyclic.

    The same problem always gets the same plan.
    """
    compute = problem.compute_seconds
    bound = lower_bound(problem) if problem.cyclic else compute
    tape, schedule = _best_schedule(problem, bound)
    steps, start = steps_of(tape, schedule)
    seconds = schedule.seconds / tape.cycles
    predicted = Prediction(
        cycle_seconds=seconds,
        compute_seconds=compute,
        stall_seconds=max(0.0, seconds - compute),
        lower_bound_seconds=bound,
        onload_bytes=round(schedule.load_bytes / tape.cycles),
        onloads=len(schedule.loads) / tape.cycles,
        peak_bytes=_peak_bytes(problem, steps, start),
    )
    return Plan(problem=problem, cycles=steps, start=start, predicted=predicted)


def _peak_bytes(problem: Problem, steps: tuple[tuple[Step, ...], ...], start: frozenset[int]) -> int:
    """The peak of one round from `start`: a block counts from its load's issue to its eviction by the host."""
    sizes = {block: size for block, size in enumerate(problem.block_bytes) if block not in problem.residents}
    held = peak = problem.resident_bytes + sum(sizes.get(block, 0) for block in start)
    for cycle in steps:
        for step in cycle:
            held -= sum(sizes[block] for block in step.evictions)
            held += sum(sizes.get(block, 0) for block in step.loads)
            peak = max(peak, held)
    return peak


def _best_schedule(problem: Problem, bound: float) -> tuple[Tape, Schedule]:
    """The best steady state or single pass that the search finds. `bound`: seconds that no schedule can beat."""
    tape, goal = make_tape(problem, ring=problem.cyclic), bound * CLOSE
    leaders: dict[int, tuple[Tape, Schedule]] = {}  # number of cycles -> the best schedule over them
    singles: list[Schedule] = []
    for shape, kept in candidates(tape):
        schedule = evaluate(shape, kept)
        if schedule is None:
            continue
        leader = leaders.get(shape.cycles)
        if leader is None or _score(shape, schedule) < _score(*leader):
            leaders[shape.cycles] = (shape, schedule)
        if shape is tape:
            singles.append(schedule)
            if schedule.seconds <= goal:
                return shape, schedule
    leaders.pop(1, None)
    best = _improved(tape, singles, goal)
    if best is not None and best[1].seconds <= goal:
        return best
    limit = TURNING_MUST_SAVE
    for shape, schedule in sorted(leaders.values(), key=lambda pair: _score(*pair))[:1] + _repeated(best):
        found = shape, schedule
        if best is not None and _score(*found)[0] > TURNING_MAY_WIN * _score(*best)[0]:
            continue
        if shape.slots <= _LONG:
            found = shape, improve(shape, [schedule], goal * shape.cycles, _trials(shape))
        if best is None or _score(*found)[0] < limit * _score(*best)[0]:
            best, limit = found, 1.0
    if best is None:
        raise ValueError("no schedule fits the budget although every visit does: please report this problem")
    return best


def _improved(tape: Tape, candidates: list[Schedule], goal: float) -> tuple[Tape, Schedule] | None:
    """The best schedule improved from the best candidate and from keeping nothing; far from the goal, from all."""
    plain = evaluate(tape, [KEEP if gap.free else AHEAD for gap in tape.gaps])
    ordered = sorted(candidates, key=lambda schedule: _score(tape, schedule))
    starts = [*ordered[:1], *([plain] if plain is not None else [])]
    if not starts:
        return None
    best = improve(tape, starts, goal, _trials(tape))
    others = ordered[1:]
    if others and tape.slots <= _SHORT and best.seconds > FAR * goal:
        found = improve(tape, others, goal, _trials(tape) // 2 * len(others))
        best = min(best, found, key=lambda schedule: _score(tape, schedule))
    return tape, best


def _repeated(single: tuple[Tape, Schedule] | None) -> list[tuple[Tape, Schedule]]:
    """A one-cycle plan laid out over two and three cycles, if these are short: a search may find turns to take."""
    found = []
    for cycles in (2, 3):
        if single is not None and single[0].ring and single[0].slots * cycles <= _SHORT:
            shape = make_tape(single[0].problem, cycles=cycles)
            schedule = evaluate(shape, single[1].choices * cycles)
            if schedule is not None:
                found.append((shape, schedule))
    return found


def _trials(tape: Tape) -> int:
    return min(TRIALS, _TRIED_SLOTS // tape.slots, _TRIED_PAIRS // tape.slots**2)


def _score(tape: Tape, schedule: Schedule) -> tuple[float, float]:
    return (schedule.seconds / tape.cycles, schedule.load_bytes / tape.cycles)
