"""Are plans well formed, the same every time, and refused with numbers when nothing fits?"""

import pytest

from headrace.errors import BudgetError
from headrace.planning import Problem, Visit, make_plan
from tests.planning.simulator import simulate


def chain(*, count: int, budget: int, load: float) -> Problem:
    return Problem(
        block_bytes=(100,) * count,
        load_seconds=(load,) * count,
        visits=tuple(Visit(blocks=(block,), compute_seconds=1.0) for block in range(count)),
        budget_bytes=budget,
    )


def test_two_buffers_hide_loads_that_are_shorter_than_compute():
    plan = make_plan(chain(count=24, budget=200, load=0.9))
    assert plan.predicted.cycle_seconds == pytest.approx(24.0)
    assert plan.predicted.peak_bytes == 200
    assert plan.predicted.onloads == 24


def test_a_budget_for_everything_loads_nothing():
    plan = make_plan(chain(count=8, budget=800, load=5.0))
    assert plan.predicted.onload_bytes == 0
    assert plan.kept == frozenset(range(8))


def test_steady_state_returns_to_its_start():
    problem = chain(count=24, budget=600, load=1.5)
    plan = make_plan(problem)
    run = simulate(problem, plan.cycles, cycles=len(plan.cycles), present=plan.start)
    assert run.present == plan.start
    assert sum(run.demand_onloads) == 0


def test_a_budget_below_a_visit_is_refused_with_the_numbers():
    with pytest.raises(BudgetError, match=r"visit 0 .* needs|100 bytes.*99 bytes"):
        chain(count=2, budget=99, load=1.0)


def test_same_problem_same_plan():
    problem = chain(count=12, budget=400, load=1.3)
    assert make_plan(problem) == make_plan(problem)


def test_text_names_what_stays_and_the_times():
    text = make_plan(chain(count=6, budget=400, load=1.5)).to_text()
    assert "stays" in text
    assert "boundary" in text
    assert "no schedule is below" in text
