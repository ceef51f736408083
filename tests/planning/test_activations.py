"""Does the plan for activations keep what fits, hide what leaves, and say what does neither?"""

import random
from typing import Any

import pytest

from headrace.planning import ActivationPlan, ActivationProblem, Saved, plan_activations

MIB = 2**20


def chain(
    layers: int,
    *,
    copy_seconds: float,
    forward_seconds: float = 1.0,
    backward_seconds: float = 2.0,
    budget_bytes: int | None = None,
    **settings: object,
) -> ActivationProblem:
    """Layers that save a tensor each, used in reverse."""
    return ActivationProblem(
        saved=tuple(
            Saved(
                nbytes=MIB,
                offload_seconds=copy_seconds,
                onload_seconds=copy_seconds,
                alone_at=min(index + 1, layers - 1),
                name=f"layers.{index}",
            )
            for index in range(layers)
        ),
        forward_seconds=(forward_seconds,) * layers,
        uses=tuple(reversed(range(layers))),
        backward_seconds=(backward_seconds,) * layers,
        freed_at=tuple(range(layers)),
        budget_bytes=budget_bytes,
        **settings,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("copy_seconds", [0.5, 1.0, 4.0])
def test_all_leave_and_come_back_ahead(copy_seconds: float) -> None:
    """Even if compute waits for copies out; on the way back it waits no longer than it has to."""
    plan = plan_activations(chain(16, copy_seconds=copy_seconds, all_leave=True))
    check(plan)
    assert plan.offloaded == frozenset(range(16))
    assert plan.beyond_bytes == 0
    ceiling = plan_activations(chain(16, copy_seconds=copy_seconds, budget_bytes=0))
    assert plan.seconds < ceiling.seconds - 10 * min(copy_seconds, 2.0)
    assert plan.peak_bytes <= (3 if copy_seconds <= 2 else 6) * MIB


def check(plan: ActivationPlan) -> None:
    """What holds of every plan: it walks through."""
    problem = plan.problem
    released = [index for releases in plan.releases for index in releases]
    assert sorted(released) == sorted(plan.offloaded)
    held = peak = 0
    here: set[int] = set()
    for index, saved in enumerate(problem.saved):
        here.add(index)
        held += saved.nbytes
        peak = max(peak, held)
        for other in plan.releases[index]:
            assert (problem.saved[other].alone_at or 0) <= index
            here.remove(other)
            held -= problem.saved[other].nbytes
    gone: set[int] = set()
    for position, index in enumerate(problem.uses):
        for other_position, other in enumerate(problem.uses[:position]):
            if other not in gone and problem.freed_at[other_position] < position:
                gone.add(other)
                here.remove(other)
                held -= problem.saved[other].nbytes
        for other in (index, *plan.reloads[position]):
            if other not in here:
                here.add(other)
                held += problem.saved[other].nbytes
        peak = max(peak, held)
    assert peak == plan.peak_bytes
    assert plan.host_bytes == sum(problem.saved[index].nbytes for index in plan.offloaded)


def test_copies_that_hide_cost_nothing_and_leave_little() -> None:
    plan = plan_activations(chain(24, copy_seconds=0.9))
    check(plan)
    assert plan.seconds <= 1.005 * plan.problem.compute_seconds
    assert plan.peak_bytes <= 4 * MIB  # of 24
    assert max(plan.offloaded) < 23  # the last one is needed at once


@pytest.mark.parametrize("copy_seconds", [0.4, 0.9, 4.0])
@pytest.mark.parametrize("budget_bytes", [None, 24 * MIB])
def test_few_copies_at_once_cost_nothing(copy_seconds: float, budget_bytes: int | None) -> None:
    """Where no budget asks for more, what finds no copy free stays."""
    settings: dict[str, Any] = {"copy_seconds": copy_seconds, "budget_bytes": budget_bytes}
    unlimited = plan_activations(chain(24, **settings))
    for most_in_flight in (1, 2, 4):
        plan = plan_activations(chain(24, **settings, most_in_flight=most_in_flight))
        check(plan)
        assert plan.stall_seconds <= 0.005 * plan.problem.compute_seconds
        assert len(plan.offloaded) >= len(unlimited.offloaded) // 2
        assert plan.peak_bytes <= 24 * MIB if budget_bytes is not None else plan.peak_bytes < 24 * MIB
        for index in plan.offloaded:
            under_way = [other for other in plan.offloaded if other < index <= other + copy_seconds - 1]
            assert len(under_way) < most_in_flight


def test_slow_copies_leave_as_far_as_they_hide() -> None:
    """A copy takes three layers' forward: a third of the bytes can leave meanwhile, and comes back meanwhile."""
    plan = plan_activations(chain(24, copy_seconds=3.0))
    check(plan)
    assert plan.seconds <= 1.005 * plan.problem.compute_seconds
    assert 6 <= len(plan.offloaded) <= 8


def test_what_fits_stays() -> None:
    plan = plan_activations(chain(24, copy_seconds=0.9, budget_bytes=24 * MIB))
    check(plan)
    assert not plan.offloaded
    assert plan.stall_seconds == 0


def test_a_budget_is_kept_even_if_compute_waits() -> None:
    plan = plan_activations(chain(24, copy_seconds=3.0, budget_bytes=6 * MIB))
    check(plan)
    assert plan.peak_bytes <= 6 * MIB
    assert plan.stall_seconds > 0
    assert plan.beyond_bytes > 8 * MIB
    assert len(plan.recompute) == -(-plan.beyond_bytes // MIB)


def test_an_impossible_budget_is_said() -> None:
    plan = plan_activations(chain(8, copy_seconds=0.1, budget_bytes=MIB))
    check(plan)
    assert plan.peak_bytes > MIB
    assert plan.beyond_bytes >= plan.peak_bytes - MIB


def test_weights_on_the_same_lane_are_counted_in() -> None:
    """Weights take 1.6 of the 2 seconds that each layer's backward lasts: copies of 1 second do not all hide."""
    alone = plan_activations(chain(24, copy_seconds=1.0))
    shared = plan_activations(chain(24, copy_seconds=1.0, other_seconds=(1.6,) * 24))
    assert shared.stall_seconds <= 0.005 * shared.problem.compute_seconds
    assert 0.2 * len(alone.offloaded) <= len(shared.offloaded) <= 0.6 * len(alone.offloaded)


def test_nothing_leaves_that_nobody_asks_for_again() -> None:
    problem = chain(8, copy_seconds=0.1, budget_bytes=0)
    unused = ActivationProblem(
        saved=problem.saved,
        forward_seconds=problem.forward_seconds,
        uses=(7, 6),
        backward_seconds=(1.0, 1.0),
        freed_at=(0, 1),
        budget_bytes=0,
    )
    assert plan_activations(unused).offloaded <= {6, 7}


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_walk_through(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 40)
    used = [index for index in reversed(range(count)) if chance.random() < 0.9]
    if chance.random() < 0.3:
        chance.shuffle(used)
    total = 0
    saved = []
    for index in range(count):
        nbytes = chance.randint(1, 5) * MIB
        total += nbytes
        alone_at = None if chance.random() < 0.1 else min(count - 1, index + chance.randint(0, 3))
        seconds = nbytes / MIB * chance.choice((0.1, 0.5, 2.0))
        saved.append(Saved(nbytes=nbytes, offload_seconds=seconds, onload_seconds=seconds, alone_at=alone_at))
    problem = ActivationProblem(
        saved=tuple(saved),
        forward_seconds=tuple(chance.random() for _ in range(count)),
        uses=tuple(used),
        backward_seconds=tuple(2 * chance.random() for _ in used),
        freed_at=tuple(min(len(used) - 1, position + chance.randint(0, 2)) for position in range(len(used))),
        budget_bytes=chance.choice((None, 0, total // 3, total)),
        offload_bytes=chance.choice((None, total // 2)),
        most_in_flight=chance.choice((None, 1, 3)),
    )
    plan = plan_activations(problem)
    check(plan)
    assert plan == plan_activations(problem)
    if problem.offload_bytes is not None:
        assert plan.host_bytes <= problem.offload_bytes
    if problem.budget_bytes is None and problem.most_in_flight is None:
        assert plan.stall_seconds <= 0.005 * problem.compute_seconds


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at most once"):
        ActivationProblem(saved=(), forward_seconds=(), uses=(0,), backward_seconds=(1.0,), freed_at=(0,))
    with pytest.raises(ValueError, match="other_seconds"):
        chain(2, copy_seconds=1.0, other_seconds=(0.0,))
    with pytest.raises(ValueError, match="times are given"):
        ActivationProblem(saved=(), forward_seconds=(1.0,), uses=(), backward_seconds=(), freed_at=())
    with pytest.raises(ValueError, match="as many"):
        ActivationProblem(saved=(), forward_seconds=(), uses=(), backward_seconds=(1.0,), freed_at=())
