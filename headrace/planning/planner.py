"""Which plan should the executor walk?"""

from functools import lru_cache

from headrace.planning.bounds import lower_bound
from headrace.planning.plan import Plan, Prediction, Step
from headrace.planning.problem import Problem
from headrace.planning.schedule import steps_of
from headrace.planning.search import best_schedule


@lru_cache(maxsize=16)
def make_plan(problem: Problem) -> Plan:
    """The plan of the steady state, or of a single pass from an empty device if the problem is not cyclic.

    The same problem always gets the same plan.
    """
    compute = problem.compute_seconds
    bound = lower_bound(problem) if problem.cyclic else compute
    tape, schedule = best_schedule(problem, bound)
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
