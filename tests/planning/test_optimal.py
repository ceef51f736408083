"""How close do plans come to the best of all schedules, for models small enough to try them all?"""

from dataclasses import replace

import pytest
from hypothesis import Phase as Phases
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planning import Phase, Problem, Visit, make_plan
from tests.planning.exhaustive import best_ends
from tests.planning.simulator import simulate


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
    """One pass from an empty device; of blocks that do not change, two in a row."""
    passes = 1 if problem.changing else 2
    once = replace(problem, visits=passes * problem.visits, cyclic=False)
    plan = make_plan(once)
    run = simulate(once, plan.cycles, cycles=1)
    assert run.peak_bytes == plan.predicted.peak_bytes <= problem.budget_bytes
    assert run.seconds == pytest.approx(plan.predicted.cycle_seconds)
    best = best_ends(problem, passes)[-1]
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
    assert plan.predicted.lower_bound_seconds <= 1.001 * best


# No shrinking: a smaller case would be found by minutes of brute force.
SETTINGS = {"derandomize": True, "database": None, "phases": [Phases.generate]}


@settings(max_examples=40, **SETTINGS)
@given(small_models(most=5, kinds=("inference", "training", "frozen")))
def test_from_cold(problem):
    check_cold(problem)


@settings(max_examples=40, **SETTINGS)
@given(small_models(most=4, kinds=("inference", "training", "frozen")))
def test_steady_state(problem):
    check_steady(problem, cycles=12, window=6)


@pytest.mark.extended
@settings(max_examples=12, **SETTINGS)
@given(small_models(most=6, kinds=("inference", "training", "frozen")))
def test_up_to_six_blocks(problem):
    check_cold(problem)
    check_steady(problem, cycles=6, window=3)


def test_a_short_load_late_makes_room_for_a_long_one():
    """Loading block 1 only at its visit lets the long load of block 2 run behind the first visit's compute."""
    compute = (1.7, 0.1, 0.1, 0.1)
    problem = Problem(
        block_bytes=(36, 46, 153, 28),
        load_seconds=(0.45, 0.575, 1.9125, 0.35),
        visits=tuple(Visit(blocks=(block,), compute_seconds=seconds) for block, seconds in enumerate(compute)),
        budget_bytes=216,
    )
    check_cold(problem)
    twice = replace(problem, visits=2 * problem.visits, cyclic=False)
    assert make_plan(twice).predicted.cycle_seconds == pytest.approx(6.7625)


def test_taking_turns_beats_a_fixed_set():
    """Three blocks, room for two, long loads: Belady's rule loads three blocks in two cycles, a fixed set four."""
    problem = Problem(
        block_bytes=(100,) * 3,
        load_seconds=(1.0,) * 3,
        visits=tuple(Visit(blocks=(block,), compute_seconds=0.1) for block in range(3)),
        budget_bytes=200,
    )
    plan = make_plan(problem)
    assert plan.predicted.onloads == pytest.approx(1.5)
    check_steady(problem, cycles=12, window=6)
