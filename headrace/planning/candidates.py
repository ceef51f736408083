"""Which sets of kept blocks are worth a try before any search?"""

from collections.abc import Iterator

from headrace.planning.belady import Room, sweep
from headrace.planning.tape import Tape, make_tape

_SLOTS = 3200  # the longest tape on which taking turns over several cycles is tried: n - 1 cycles of n equal blocks
_SHARES = 32  # how finely the bytes that stay for good are graded


def candidates(tape: Tape) -> Iterator[tuple[Tape, list[bool]]]:
    """Tapes, and what is kept on each. Tapes of several cycles, on which blocks take turns, come last."""
    seen: set[tuple[bool, ...]] = set()
    turning = []
    rounds = max(3, _SLOTS // tape.slots) if tape.ring else 1
    for room in _rooms(tape):
        cycles = sweep(tape, room, rounds=rounds)
        key = tuple(keep for cycle in cycles for keep in cycle)
        if key not in seen:
            seen.add(key)
            if len(cycles) == 1:
                yield tape, list(key)
            else:
                turning.append((len(cycles), list(key)))
    for count, kept in turning:
        yield make_tape(tape.problem, cycles=count), kept


def _rooms(tape: Tape) -> Iterator[Room]:
    largest = max((gap.size for gap in tape.gaps), default=0)
    for reserve in sorted({min(tape.budget, largest * halves // 2) for halves in range(10)}):
        yield Room(reserve=reserve)
    if tape.ring:
        for pinned in _even_sets(tape):
            yield Room(lookahead=2, pinned=pinned)
    for visits in range(1, 5):
        yield Room(lookahead=visits)


def _even_sets(tape: Tape) -> list[frozenset[int]]:
    """Sets of blocks that could stay for good: a growing share of the bytes, spread evenly over the cycle."""
    expiring = {gap.block for gap in tape.gaps if not gap.keepable or not gap.size}
    order = list(dict.fromkeys(gap.block for gap in tape.gaps if gap.block not in expiring))
    sizes = tape.problem.block_bytes
    total = sum(sizes[block] for block in order)
    found: dict[frozenset[int], None] = {}
    for share in range(1, _SHARES + 1):
        chosen, debt, held = [], 0.0, 0
        for block in order:
            debt += sizes[block] * share / _SHARES * min(1.0, tape.budget / max(1, total))
            if debt >= sizes[block] / 2:
                debt -= sizes[block]
                chosen.append(block)
                held += sizes[block]
        if chosen and held < tape.budget:
            found[frozenset(chosen)] = None
    return list(found)
