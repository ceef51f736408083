"""Where in a list of numbers is the first that is small enough? Found in time logarithmic in the list's length."""

import math


class LeastTree:
    """Numbers by index, from 0 on; infinity where none was put.

    They are a binary tree in one list: the second half holds the numbers, place k the lesser of places 2k and 2k + 1.
    """

    def __init__(self) -> None:
        self._least = [math.inf, math.inf]

    def put(self, index: int, number: float) -> None:
        """Sets the number at `index`."""
        while index >= len(self._least) // 2:
            self._least = _with_room(self._least)
        least = self._least
        place = index + len(least) // 2
        least[place] = number
        while place > 1:
            place //= 2
            left, right = least[2 * place], least[2 * place + 1]
            least[place] = left if left <= right else right

    def first(self, index: int, most: float) -> int | None:
        """The index of the first number at or after `index` that is at most `most`; None if there is none."""
        least, count = self._least, len(self._least) // 2
        if index >= count:
            return None
        place = index + count
        while least[place] > most:  # go on with the subtree to the right
            while place % 2:
                place //= 2
            if place == 0:
                return None
            place += 1
        while place < count:
            place = 2 * place if least[2 * place] <= most else 2 * place + 1
        return place - count


def _with_room(least: list[float]) -> list[float]:
    """The same tree for twice as many numbers."""
    count = len(least) // 2
    wider = [math.inf] * (2 * count) + least[count:] + [math.inf] * count
    for place in range(2 * count - 1, 0, -1):
        wider[place] = min(wider[2 * place], wider[2 * place + 1])
    return wider
