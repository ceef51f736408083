"""Does the book of traces tell what comes next, by how a cycle begins and by the one before it?"""

import gc
import weakref
from collections.abc import Sequence

import pytest

from headrace.planning import Phase, Problem, Visit, make_plan
from headrace.weights.movement.trace import MOST_PLANS, MOST_TRACES, Course, Entry, Trace, TraceBook, VisitKey

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
TRAIN, EVALUATE = Entry("model", FORWARD, True), Entry("model", FORWARD, False)
BACK = Entry("", BACKWARD, True)


def visits(*blocks: int, phase: Phase = FORWARD) -> list[VisitKey]:
    return [((block,), phase) for block in blocks]


STEP = [*visits(0, 1, 2), *visits(2, 1, 0, phase=BACKWARD)]
PASS = visits(0, 1, 2)


class Player:
    """Plays cycles to a book, and tells which of them it had expected."""

    def __init__(self) -> None:
        self.book = TraceBook()

    def play(self, entry: Entry, happens: Sequence[VisitKey]) -> bool:
        trace = self.book.expect(entry)
        expected = trace is not None and list(trace.visits) == list(happens)
        if trace is not None and expected:
            self.book.followed(entry, trace)
        else:
            self.book.enter(entry, happens, [1.0] * len(happens))
        return expected


def course_of(keys: Sequence[VisitKey], blocks: int = 3, budget: int = 2) -> Course:
    """A course whose plan is made for these visits."""
    problem = Problem(
        block_bytes=(1,) * blocks,
        load_seconds=(0.5,) * blocks,
        visits=tuple(Visit(blocks=key[0], phase=key[1], compute_seconds=1.0) for key in keys),
        budget_bytes=budget,
        changing=frozenset(),
        cyclic=True,
        max_ahead=None,
    )
    return Course(Trace(TRAIN.site, tuple(keys), (1.0,) * len(keys)), make_plan(problem), 0)


@pytest.fixture
def player() -> Player:
    return Player()


def test_nothing_is_expected_before_anything_happened(player: Player) -> None:
    assert player.book.expect(TRAIN) is None
    assert not player.play(TRAIN, STEP)
    assert player.play(TRAIN, STEP)
    assert player.book.expect(EVALUATE) is None  # another kind of beginning


def test_evaluation_inside_training_has_a_trace_of_its_own(player: Player) -> None:
    rhythm = [(TRAIN, STEP), (TRAIN, STEP), (EVALUATE, PASS), (EVALUATE, PASS)]
    expected = [player.play(*cycle) for cycle in rhythm * 3]
    assert expected == [False, True, False, True] + [True] * 8


def test_two_forwards_before_two_backwards(player: Player) -> None:
    """f f b b: the first forward ends when the second begins, which ends with the first backward."""
    first = (TRAIN, PASS)
    second = (TRAIN, [*PASS, *visits(2, 1, 0, phase=BACKWARD)])
    third = (BACK, visits(2, 1, 0, phase=BACKWARD))
    rounds = [[player.play(*cycle) for cycle in (first, second, third)] for _ in range(4)]
    assert rounds[0] == [False, False, False]
    assert rounds[1] == [False, True, True]  # what follows the third was not known before
    assert rounds[2] == rounds[3] == [True, True, True]


def test_what_comes_before_tells_apart_what_begins_alike(player: Player) -> None:
    """Two micro-batches of which the second skips a layer (every other cycle is a short one)."""
    short = [*visits(0, 2), *visits(2, 0, phase=BACKWARD)]
    expected = [player.play(TRAIN, cycle) for cycle in [STEP, short] * 5]
    assert expected[:3] == [False, False, False]
    assert all(expected[3:])


def test_the_same_visits_are_the_same_trace_with_its_plans() -> None:
    book = TraceBook()
    first = book.enter(TRAIN, STEP, [1.0] * 6)
    first.plans[frozenset(), True] = course_of(STEP).plan
    book.enter(EVALUATE, PASS, [1.0] * 3)
    assert book.enter(TRAIN, STEP, [2.0] * 6) is first
    assert first.plans
    book.forget_plans()
    assert not first.plans


def test_the_same_visits_from_elsewhere_take_other_times() -> None:
    book = TraceBook()
    alone = book.enter(TRAIN, STEP, [1.0] * 6)
    together = book.enter(TRAIN._replace(site="4 micro-batches"), STEP, [4.0] * 6)
    assert alone.compute_seconds == (1.0,) * 6
    assert together.compute_seconds == (4.0,) * 6
    assert book.expect(TRAIN) is alone


def test_a_trace_knows_whether_it_repeats(player: Player) -> None:
    for _ in range(2):
        player.play(TRAIN, STEP)
        player.play(EVALUATE, PASS)
    step, evaluation = player.book.expect(TRAIN), player.book.expect(EVALUATE)
    assert step is not None
    assert evaluation is not None
    assert not step.repeats
    assert not evaluation.repeats
    player.play(TRAIN, STEP)
    player.play(TRAIN, STEP)
    assert step.repeats


def test_traces_that_never_come_again_go(player: Player) -> None:
    """Layers are skipped at random: the trace that was followed longest ago goes, and nothing refers to it any more."""
    first = visits(0)
    player.play(TRAIN, first)
    old = weakref.ref(player.book.expect(TRAIN))
    for number in range(1, 2 * MOST_TRACES):
        player.play(EVALUATE if number % 3 else TRAIN, visits(0, number))
        assert len(player.book) <= MOST_TRACES
    gc.collect()
    assert old() is None


def test_a_trace_that_is_followed_now_and_then_stays(player: Player) -> None:
    player.play(TRAIN, STEP)
    known = player.book.expect(TRAIN)
    for number in range(3 * MOST_TRACES):
        player.play(EVALUATE, visits(0, number))
        if number % (MOST_TRACES // 2) == 0:
            player.play(TRAIN, STEP)
    assert player.book.enter(TRAIN, STEP, [1.0] * len(STEP)) is known


def test_a_trace_keeps_the_plans_that_are_used() -> None:
    course = course_of(STEP)
    for number in range(3 * MOST_PLANS):
        course.trace.keep_plan((frozenset({number}), True), course.plan)
        course.trace.keep_plan((frozenset({0}), True), course.plan)
    assert len(course.trace.plans) == MOST_PLANS
    assert (frozenset({0}), True) in course.trace.plans


def test_a_course_gives_the_plans_steps_in_order() -> None:
    course = course_of(STEP)
    for position, key in enumerate(STEP):
        assert course.advance(key) == course.plan.step(0, position)
        assert course.position == position
    assert not course.strayed
    assert course.end() == course.plan.step(0, len(STEP))


def test_a_visit_that_is_skipped_is_passed_over() -> None:
    course = course_of(STEP)
    course.advance(STEP[0])
    assert course.advance(STEP[2]) == course.plan.step(0, 2)
    assert course.position == 2
    assert not course.strayed


@pytest.mark.parametrize("stray", [((7,), FORWARD), ((0,), FORWARD), ((0, 1), FORWARD)])
def test_a_visit_that_the_trace_lacks_is_a_stray(stray: VisitKey) -> None:
    """Another block, one that is over, other blocks at once: no step, and the trace is to be learned anew."""
    course = course_of(STEP)
    course.advance(STEP[0])
    course.advance(STEP[1])
    assert course.advance(stray) is None
    assert course.strayed
    assert course.advance(STEP[2]) == course.plan.step(0, 2)  # what comes after it is served as planned


def test_next_use_goes_round() -> None:
    course = course_of(STEP)
    course.advance(STEP[0])
    assert [course.next_use(block) for block in (0, 1, 2)] == [5, 1, 2]
    course.advance(STEP[3])
    assert [course.next_use(block) for block in (0, 1, 2)] == [2, 1, 5]
    assert course.next_use(9) == float("inf")
