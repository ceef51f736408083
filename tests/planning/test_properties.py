"""Are the decisions of a plan consistent, within the budget, and as predicted?

More problems than by default, about one in 0.05 s: PROBLEMS=20000 pytest --timeout 0 tests/planning/test_properties.py
"""

import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planning import Phase, Plan, Problem, Visit, make_plan
from tests.planning.models import decoder, random_model
from tests.planning.simulator import simulate

SETTINGS = {"derandomize": True, "database": None}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any trace: visits of no, one or two blocks in any order, residents, changing blocks, limits on prefetch."""
    count = draw(st.integers(2, 9))
    sizes = tuple(draw(st.integers(0, 100)) for _ in range(count))
    residents = draw(st.frozensets(st.integers(0, count - 1), max_size=2))
    changing = draw(st.sampled_from(["none", "all", "some"]))
    visits = tuple(
        Visit(blocks=tuple(blocks), phase=draw(st.sampled_from(Phase)), compute_seconds=draw(st.integers(0, 20)) / 10)
        for blocks in draw(
            st.lists(st.lists(st.integers(0, count - 1), max_size=2, unique=True), min_size=1, max_size=14)
        )
    )
    held = sum(sizes[block] for block in residents)
    least = held + max(sum(sizes[b] for b in visit.blocks if b not in residents) for visit in visits)
    return Problem(
        block_bytes=sizes,
        load_seconds=tuple(draw(st.integers(0, 20)) / 10 for _ in range(count)),
        visits=visits,
        budget_bytes=least + draw(st.integers(0, 200)),
        residents=residents,
        changing=frozenset(
            {"none": (), "all": range(count), "some": draw(st.frozensets(st.integers(0, count - 1)))}[changing]
        ),
        max_ahead=draw(st.sampled_from([None, 0, 1, 2, 5])),
    )


@st.composite
def balanced(draw: st.DrawFn) -> Problem:
    """Models whose loads take about as long as compute, 0.9 to 1.2 of it: small causes show after many cycles."""
    count = draw(st.integers(2, 12))
    ratio = draw(st.integers(900, 1200)) / 1000
    compute = [1.0] * count if draw(st.booleans()) else [draw(st.integers(3, 20)) / 10 for _ in range(count)]
    sizes = tuple(round(100 * seconds) for seconds in compute)
    kind = draw(st.sampled_from(["inference", "training", "frozen"]))
    other = draw(st.sampled_from([0.0, 0.0, 0.1])) if kind != "inference" else 0.0
    per_visit = draw(st.sampled_from([1, 1, 1, 2]))
    groups = [tuple(range(first, min(first + per_visit, count))) for first in range(0, count, per_visit)]
    if draw(st.integers(0, 3)) == 0:
        groups.append(groups[0])  # tied, as a head with the embedding
    passes = [(Phase.FORWARD, 1.0, groups)]
    if kind != "inference":
        passes.append((Phase.BACKWARD, draw(st.sampled_from([1.0, 2.0, 3.0])), groups[::-1]))
    residents = draw(st.sampled_from([frozenset(), frozenset(), frozenset({0})]))
    held = sum(sizes[block] for block in residents)
    least = held + max(sum(sizes[block] for block in group if block not in residents) for group in groups)
    return Problem(
        block_bytes=sizes,
        load_seconds=tuple(ratio * seconds for seconds in compute),
        visits=tuple(
            Visit(
                blocks=group,
                phase=phase,
                compute_seconds=factor * sum(compute[block] for block in group),
                other_load_seconds=other,
            )
            for phase, factor, order in passes
            for group in order
        ),
        budget_bytes=draw(st.integers(least, max(least, sum(sizes)))),
        residents=residents,
        changing=frozenset(range(count)) if kind == "training" else frozenset(),
        cyclic=draw(st.sampled_from([True, True, True, False])),
        max_ahead=draw(st.sampled_from([None, None, None, 1, 3])),
    )


def check_consistent(plan: Plan, present: frozenset[int], rounds: int) -> frozenset[int]:
    """Walk the decisions alone: nothing absent is evicted, nothing present loaded, all served, all in budget."""
    problem = plan.problem
    fresh = set(present)
    sizes = problem.block_bytes
    assert sum(sizes[b] for b in fresh | problem.residents) <= problem.budget_bytes
    for cycle in range(rounds * len(plan.cycles)):
        steps = plan.cycles[cycle % len(plan.cycles)]
        assert len(steps) == len(problem.visits) + 1
        for index, step in enumerate(steps):
            at_boundary = index == len(problem.visits)
            needed = () if at_boundary else problem.visits[index].blocks
            for block in step.evictions:
                assert block in fresh
                assert block not in problem.residents
                assert block not in needed
                fresh.remove(block)
            if at_boundary:
                assert not (fresh - problem.residents) & problem.changing, "a copy outlives the change of its block"
                fresh -= problem.changing
            for block in step.loads:
                assert block not in fresh
                fresh.add(block)
                held = sum(sizes[b] for b in fresh | problem.residents)
                assert held <= problem.budget_bytes
            assert fresh.issuperset(needed), "a visit would have to load on demand"
    return frozenset(fresh)


def check_predicted(plan: Plan, rel: float) -> None:
    """A cycle takes as long as predicted, forty rounds later."""
    count = len(plan.cycles)
    run = simulate(plan.problem, plan.cycles, cycles=50 * count, present=plan.start)
    settled = (run.cycle_ends[-1] - run.cycle_ends[40 * count - 1]) / (10 * count)
    assert settled == pytest.approx(plan.predicted.cycle_seconds, rel=rel)


@settings(max_examples=80, **SETTINGS)
@given(problems())
def test_steady_plans_are_consistent(problem):
    plan = make_plan(problem)
    used = {block for visit in problem.visits for block in visit.blocks}
    end = check_consistent(plan, plan.start, rounds=2)
    assert end & used == plan.start & used
    run = simulate(problem, plan.cycles, cycles=2 * len(plan.cycles), present=plan.start)
    assert run.peak_bytes == plan.predicted.peak_bytes <= problem.budget_bytes
    assert sum(run.onload_bytes) / len(run.onload_bytes) == pytest.approx(plan.predicted.onload_bytes, abs=1)
    assert sum(run.demand_onloads) == 0
    assert run.present & used == plan.start & used


@settings(max_examples=int(os.environ.get("PROBLEMS", "40")), **SETTINGS)
@given(balanced())
def test_plans_where_loads_take_about_as_long_as_compute(problem):
    plan = make_plan(problem)
    check_consistent(plan, plan.start, rounds=2 if problem.cyclic else 1)
    if problem.cyclic:
        check_predicted(plan, rel=0.005)  # a drift that is slower than this is none


@pytest.mark.parametrize("ratio", [1.02, 1.04, 1.06, 1.08, 1.1])
def test_a_stall_that_comes_after_many_cycles_is_foreseen(ratio):
    """Six blocks, room for three, loads a little longer than compute: what was loaded ahead is used up slowly."""
    plan = make_plan(decoder(blocks=6, ratio=ratio, budget_blocks=3))
    assert plan.predicted.stall_seconds > 0
    check_predicted(plan, rel=1e-6)


@settings(max_examples=30, **SETTINGS)
@given(problems())
def test_single_passes_are_consistent_and_take_what_is_predicted(problem):
    plan = make_plan(replace(problem, cyclic=False))
    assert len(plan.cycles) == 1
    check_consistent(plan, problem.residents, rounds=1)
    run = simulate(problem, plan.cycles, cycles=1, present=plan.start)
    assert run.seconds == pytest.approx(plan.predicted.cycle_seconds)
    assert run.peak_bytes == plan.predicted.peak_bytes
    assert run.onload_bytes == (plan.predicted.onload_bytes,)


@settings(max_examples=30, **SETTINGS)
@given(problems(), st.data())
def test_a_steady_plan_is_safe_from_any_part_of_its_start(problem, data):
    plan = make_plan(problem)
    present = frozenset(b for b in sorted(plan.start - problem.residents) if data.draw(st.booleans()))
    count = len(plan.cycles)
    run = simulate(problem, plan.cycles, cycles=2 * count, present=present)
    used = {block for visit in problem.visits for block in visit.blocks}
    assert run.peak_bytes <= problem.budget_bytes
    assert sum(run.demand_onloads[count:]) == 0
    assert run.present & used == plan.start & used


@settings(max_examples=30, **SETTINGS)
@given(problems())
def test_nothing_is_loaded_earlier_than_allowed(problem):
    if problem.max_ahead is None:
        return
    plan = make_plan(problem)
    visits = problem.visits
    for steps in plan.cycles:
        for index, step in enumerate(steps):
            reach = [visits[(index + ahead) % len(visits)].blocks for ahead in range(problem.max_ahead + 1)]
            for block in step.loads:
                assert any(block in blocks for blocks in reach)


@pytest.mark.parametrize("seed", range(4))
def test_prediction_is_what_the_simulator_settles_to(seed):
    check_predicted(make_plan(random_model(seed, low=24, high=40)), rel=1e-6)


def test_with_room_for_two_visits_nothing_waits_for_its_own_visit():
    for ratio in (0.5, 0.9, 1.5):
        plan = make_plan(decoder(ratio=ratio, budget_blocks=3, backward=2.0))
        for steps in plan.cycles:
            for visit, step in zip(plan.problem.visits[1:], steps[1:], strict=False):
                assert not set(step.loads) & set(visit.blocks)


def test_a_changing_resident_is_loaded_again_in_place():
    problem = Problem(
        block_bytes=(100, 100, 100),
        load_seconds=(0.5, 0.5, 0.5),
        visits=tuple(Visit(blocks=(block,), compute_seconds=1.0) for block in range(3)),
        budget_bytes=200,
        residents=frozenset({1}),
        changing=frozenset({1}),
    )
    plan = make_plan(problem)
    assert plan.predicted.onload_bytes == 300
    assert plan.predicted.peak_bytes == 200
    assert all(1 not in step.evictions for step in plan.cycles[0])


def test_a_single_pass_loads_nothing_for_the_next():
    problem = Problem(
        block_bytes=(100,) * 4,
        load_seconds=(0.5,) * 4,
        visits=tuple(Visit(blocks=(block,), compute_seconds=1.0) for block in range(4)),
        budget_bytes=200,
        cyclic=False,
    )
    plan = make_plan(problem)
    assert plan.predicted.cycle_seconds == pytest.approx(4.5)
    assert plan.predicted.onloads == 4
    assert plan.cycles[0][-1].loads == ()
