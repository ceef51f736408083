"""Which plan should the executor walk?"""

from __future__ import annotations

from headrace.planning.bounds import lower_bound
from headrace.planning.plan import Plan, Prediction, Step
from headrace.planning.problem import Problem
from headrace.planning.schedule import Schedule, steps_of
from headrace.planning.search import best_ring, best_run
from headrace.planning.simulator import simulate
from headrace.planning.tape import Tape


def make_plan(problem: Problem) -> Plan:
    """The plan of the steady state (of a single pass from an empty device when the problem is not cyclic).

    The same problem always gets the same plan.
    """
    if not problem.cyclic:
        return make_run(problem, cycles=1)
    bound = lower_bound(problem)
    tape, schedule = best_ring(problem, bound)
    return _plan(problem, tape, schedule, bound, warm=True)


def make_run(problem: Problem, *, cycles: int, present: frozenset[int] = frozenset()) -> Plan:
    """The plan of a run that begins with `present` on the device (and the residents) and ends after `cycles` cycles.

    `predicted` holds averages over the run's cycles, the first loads included.
    """
    if cycles < 1:
        raise ValueError(f"cycles is {cycles}; a run has at least one")
    held = sum(problem.block_bytes[block] for block in present | problem.residents)
    if held > problem.budget_bytes:
        raise ValueError(f"{held:,} bytes are present at the start, but the budget is {problem.budget_bytes:,} bytes")
    tape, schedule = best_run(problem, cycles, present)
    return _plan(problem, tape, schedule, problem.compute_seconds, warm=False)


def _plan(problem: Problem, tape: Tape, schedule: Schedule, bound: float, *, warm: bool) -> Plan:
    steps, start = steps_of(tape, schedule)
    return Plan(
        problem=problem,
        cycles=steps,
        start=start,
        predicted=_predict(problem, steps, start, bound, settling=schedule.rounds if warm else 0),
    )


def _predict(
    problem: Problem, steps: tuple[tuple[Step, ...], ...], start: frozenset[int], bound: float, *, settling: int
) -> Prediction:
    """Walk the plan: rounds to settle, and one to measure."""
    count = len(steps)
    settled = count * settling
    run = simulate(problem, steps, cycles=settled + count, present=start)
    seconds = run.seconds - (run.cycle_ends[settled - 1] if settled else 0.0)
    compute = problem.compute_seconds
    return Prediction(
        cycle_seconds=seconds / count,
        compute_seconds=compute,
        stall_seconds=max(0.0, seconds / count - compute),
        lower_bound_seconds=bound,
        onload_bytes=round(sum(run.onload_bytes[settled:]) / count),
        onloads=sum(run.onloads[settled:]) / count,
        peak_bytes=run.peak_bytes,
    )
