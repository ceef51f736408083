"""Does an expert make room that is wanted least, and none that a call wants?"""

from hypothesis import given
from hypothesis import strategies as st

from headrace.planning import Keeping, passes_through

CALLS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True), min_size=1, max_size=60)


def loads(calls: list[list[int]], room: int, layers: int, *, passing: bool = False) -> int:
    """Calls of the layers in turn; `passing`: as if they used nearly all of a layer's."""
    keeping, held, count = Keeping(room, layers), set[tuple[int, int]](), 0
    for number, experts in enumerate(calls):
        layer = number % layers
        wanted = {(layer, expert) for expert in experts}
        for key in sorted(wanted - held):
            count += 1
            if len(held) == room:
                going = keeping.victim(layer, wanted)
                assert going is not None
                assert going in held - wanted
                held.remove(going)
                keeping.went(going)
            held.add(key)
            keeping.came(key, passing=passing)
        keeping.used(layer, experts, passing=passing)
    return count


@given(CALLS, st.integers(3, 24), st.integers(1, 3), st.booleans())
def test_no_more_is_loaded_than_is_wanted(calls: list[list[int]], room: int, layers: int, passing: bool) -> None:
    wanted = {(number % layers, expert) for number, experts in enumerate(calls) for expert in experts}
    count = loads(calls, room, layers, passing=passing)
    assert len(wanted) <= count <= sum(map(len, calls))
    if room >= len(wanted):
        assert count == len(wanted)


def test_what_is_used_often_stays() -> None:
    calls = [[0, 1 + number % 7] for number in range(50)]
    assert loads(calls, 3, 1) == 1 + 50  # the other one is always new
    assert loads([[0], [1]] * 30, 1, 2) == 60
    assert loads([[0], [1]] * 30, 2, 2) == 2


def test_uses_of_long_ago_count_less() -> None:
    calls = [[0]] * 100 + [[1], [2]] * 200 + [[0]]
    assert loads(calls, 2, 1) < 1 + 100  # 0 is gone in the end: both others are used every other time
    assert loads([[0]] * 100 + [[1], [2]] * 10 + [[0]], 2, 1) == 1 + 20  # for a while it is not


def test_a_layer_keeps_its_share() -> None:
    """Layers come in turn: what was used longest ago is what is wanted next."""
    calls = [[0, 1], [2, 3], [4, 5]] * 20
    assert loads(calls, 6, 3) == 6
    assert 6 < loads(calls, 5, 3) < 120 - 20


def test_calls_that_use_all_find_what_has_room() -> None:
    calls = [[0, 1, 2, 3]] * 24  # of three layers
    assert loads(calls, 8, 3) == 4 * 24  # each makes room for the next one
    assert loads(calls, 8, 3, passing=True) == 12 + 7 * (12 - 4)  # all but those of one call
    assert passes_through(7, 8)
    assert not passes_through(6, 8)


def test_what_has_passed_through_makes_room_first() -> None:
    keeping = Keeping(3, 1)
    for expert in (0, 1, 2):
        keeping.came((0, expert), passing=expert > 0)
    keeping.used(0, [1, 2], passing=True)
    assert keeping.victim(0, ()) == (0, 2)
    keeping.used(0, [2])  # by a call that chooses
    assert keeping.victim(0, ()) == (0, 1)
    keeping.went((0, 1))
    assert keeping.victim(0, ()) == (0, 0)
