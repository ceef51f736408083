"""Does the tree find the first small number, as a look at all of them does?"""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.memory.least import LeastTree

NUMBERS = st.integers(-3, 9) | st.just(math.inf)


@given(st.lists(st.tuples(st.integers(0, 40), NUMBERS)), st.integers(0, 80), st.integers(-4, 10))
@settings(max_examples=200)
def test_first(puts: list[tuple[int, float]], begin: int, most: int) -> None:
    tree = LeastTree()
    numbers = [math.inf] * 41
    for index, number in puts:
        tree.put(index, number)
        numbers[index] = number
    expected = [index for index, number in enumerate(numbers) if index >= begin and number <= most]
    assert tree.first(begin, most) == (expected[0] if expected else None)
