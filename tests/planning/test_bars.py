"""How close do plans come to what no schedule can beat?"""

import statistics

import pytest

from headrace.planning import bytes_bound, lower_bound, make_plan
from tests.planning.models import decoder, random_model

RATIOS = (0.5, 0.9, 1.5)
BUDGETS = (3, 6, 12, 24)
KINDS = {
    "inference": {},
    "training": {"backward": 2.0},
    "recomputing": {"backward": 3.0},
    "frozen": {"backward": 2.0, "frozen": True},
}


@pytest.mark.parametrize(
    "uneven", [pytest.param(False, id="even", marks=pytest.mark.extended), pytest.param(True, id="uneven")]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_decoder(kind, ratio, uneven):
    for budget in BUDGETS:
        problem = decoder(ratio=ratio, budget_blocks=budget, uneven=uneven, **KINDS[kind])
        predicted = make_plan(problem).predicted
        assert predicted.lower_bound_seconds <= predicted.cycle_seconds * (1 + 1e-9)
        over = predicted.cycle_seconds / lower_bound(problem)
        if ratio <= 0.9:
            assert over <= 1.03, (budget, over)
            assert predicted.cycle_seconds / bytes_bound(problem) <= 1.03, budget
        elif budget >= 6:
            assert over <= 1.06, (budget, over)


@pytest.mark.parametrize("kind", KINDS)
def test_two_blocks(kind):
    for ratio in RATIOS:
        predicted = make_plan(decoder(ratio=ratio, budget_blocks=2, **KINDS[kind])).predicted
        assert predicted.cycle_seconds <= 1.04 * predicted.lower_bound_seconds


@pytest.mark.parametrize(
    ("blocks", "budget"),
    [(24, 23), (24, 12), *(pytest.param(32, budget, marks=pytest.mark.extended) for budget in (28, 16))],
)
def test_decoding_takes_turns(blocks, budget):
    """Where loads take far longer than compute, what is kept takes turns: the fewest bytes that any order can move."""
    predicted = make_plan(decoder(blocks=blocks, ratio=200, budget_blocks=budget)).predicted
    assert predicted.onloads == pytest.approx(blocks * (blocks - budget) / (blocks - 1))


def test_training_waits_for_forward_when_loads_are_longer():
    """No schedule reaches max(compute, bytes / bandwidth) here.

    All 24 blocks change at the boundary, so forward loads all 24 at 1.5 s behind it and then computes the last: 37 s,
    and backward, where the lane has time to spare, takes 48 s. The bound by windows says exactly that.
    """
    for budget in (3, 6, 24):
        problem = decoder(ratio=1.5, budget_blocks=budget, backward=2.0)
        assert bytes_bound(problem) == pytest.approx(72.0)
        assert lower_bound(problem) == pytest.approx(85.0)
        assert make_plan(problem).predicted.cycle_seconds == pytest.approx(85.0)


@pytest.mark.extended
def test_random_models():
    ratios = []
    for seed in range(24):
        predicted = make_plan(random_model(seed)).predicted
        ratios.append(predicted.cycle_seconds / predicted.lower_bound_seconds)
    assert min(ratios) >= 1 - 1e-9
    assert statistics.median(ratios) <= 1.03
    assert max(ratios) <= 1.15
