"""How close do plans come to the best of all schedules, for models small enough to try them all?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.planning import Phase, Problem, Visit, make_plan, make_run, simulate
from tests.planning.exhaustive import best_ends


@st.composite
def small_models(draw: st.DrawFn, *, most: int, kinds: tuple[str, ...]) -> Problem:
    """Three blocks and more: even or uneven sizes, loads and compute; budgets from the largest visit up."""
    count = draw(st.integers(3, most))
    kind = draw(st.sampled_from(kinds))
    even = draw(st.booleans())
    sizes = (100,) * count if even else tuple(draw(st.integers(20, 200)) for _ in range(count))
    if draw(st.booleans()):
        pace = draw(st.sampled_from([40, 80, 120, 200]))
        loads = tuple(size / pace for size in sizes)
    else:
        loads = tuple(draw(st.integers(2, 30)) / 10 for _ in range(count))
    compute = [1.0 if even else draw(st.integers(1, 20)) / 10 for _ in range(count)]
    visits = [Visit(blocks=(block,), compute_seconds=compute[block]) for block in range(count)]
    if kind != "inference":
        visits += [
            Visit(blocks=(block,), phase=Phase.BACKWARD, compute_seconds=2 * compute[block])
            for block in reversed(range(count))
        ]
    return Problem(
        block_bytes=sizes,
        load_seconds=loads,
        visits=tuple(visits),
        budget_bytes=draw(st.integers(max(sizes), sum(sizes))),
        changing=frozenset(range(count)) if kind == "training" else frozenset(),
    )


def check_cold(problem: Problem) -> None:
    """Two cycles from an empty device."""
    plan = make_run(problem, cycles=2)
    run = simulate(problem, plan.cycles, cycles=2)
    assert run.peak_bytes <= problem.budget_bytes
    assert run.seconds == pytest.approx(2 * plan.predicted.cycle_seconds)
    best = best_ends(problem, 2)[-1]
    assert best * (1 - 1e-9) <= run.seconds <= 1.05 * best


def check_steady(problem: Problem, cycles: int, window: int) -> None:
    """The steady state, against the growth of the best run over its last `window` cycles."""
    plan = make_plan(problem)
    run = simulate(problem, plan.cycles, cycles=3 * len(plan.cycles), present=plan.start)
    assert run.peak_bytes <= problem.budget_bytes
    ends = best_ends(problem, cycles)
    best = (ends[-1] - ends[-1 - window]) / window
    assert plan.predicted.cycle_seconds <= 1.05 * best
    assert plan.predicted.lower_bound_seconds <= plan.predicted.cycle_seconds * (1 + 1e-9)
    # A bound on any steady state holds for the best run too, less what an empty start and an open end can be worth.
    assert plan.predicted.lower_bound_seconds * cycles <= ends[-1] + sum(problem.load_seconds) + problem.compute_seconds


SETTINGS = {"derandomize": True, "deadline": None, "database": None}


@settings(max_examples=60, **SETTINGS)
@given(small_models(most=5, kinds=("inference", "training", "frozen")))
def test_two_cycles_from_cold(problem):
    check_cold(problem)


@settings(max_examples=60, **SETTINGS)
@given(small_models(most=4, kinds=("inference", "training", "frozen")))
def test_steady_state(problem):
    check_steady(problem, cycles=12, window=6)


@settings(max_examples=12, **SETTINGS)
@given(small_models(most=6, kinds=("inference", "training", "frozen")))
def test_up_to_six_blocks(problem):
    check_cold(problem)
    check_steady(problem, cycles=6, window=3)
