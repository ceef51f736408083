"""Which bytes of a piece of memory, or of a file, are free? Ranges (begin, end), in order and never adjacent."""

import math
from bisect import bisect_left, bisect_right

Range = tuple[int, int]  # first byte, one past the last


def take(free: list[Range], nbytes: int) -> int | None:
    """Takes `nbytes` from the first range that has them. Returns where they begin; None if no range has them."""
    for begin, end in free:
        if end - begin >= nbytes:
            remove(free, begin, begin + nbytes)
            return begin
    return None


def add(free: list[Range], begin: int, end: int) -> None:
    """Makes these bytes free; none of them was."""
    place = bisect_left(free, (begin, end))
    if place < len(free) and free[place][0] == end:
        end = free.pop(place)[1]
    if place and free[place - 1][1] == begin:
        place -= 1
        begin = free.pop(place)[0]
    free.insert(place, (begin, end))


def remove(free: list[Range], begin: int, end: int) -> None:
    """Takes these bytes out of the free ones; all of them were free."""
    place = bisect_right(free, (begin, math.inf)) - 1
    first, last = free[place]
    free[place : place + 1] = [each for each in ((first, begin), (end, last)) if each[0] < each[1]]
