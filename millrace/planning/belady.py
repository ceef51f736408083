"""What would Belady keep, if some bytes are reserved for loads in flight?

Belady's rule (evict what is used farthest in the future) moves the fewest bytes when nothing is loaded ahead. Loading
ahead needs room: `reserve(slot)` bytes are left to it. Walked cycle after cycle until the content at a boundary comes
back, the rule yields a steady state of one or several cycles (taking turns in what is kept, when that saves bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millrace.planning.tape import Tape

Reserve = Callable[[int], int]


def sweep(tape: Tape, reserve: Reserve, *, rounds: int, pinned: frozenset[int] = frozenset()) -> list[list[bool]]:
    """What is kept in each round of a one-cycle tape, for the rounds of one period (the last round when none is found)."""
    by_slot: list[list[int]] = [[] for _ in range(tape.slots)]
    for index, gap in enumerate(tape.gaps):
        by_slot[gap.end].append(index)
    follower = _followers(tape)
    held: dict[int, tuple[int, int]] = {}  # gap ahead -> (slot of its end, counted over all rounds; bytes)
    seen: dict[frozenset[int], int] = {}
    history: list[list[bool]] = []
    for turn in range(rounds):
        key = frozenset(held)
        if key in seen:
            return history[seen[key] :]
        seen[key] = turn
        kept = [False] * len(tape.gaps)
        offset = turn * tape.slots
        for slot in range(tape.slots):
            for index in by_slot[slot]:
                kept[index] = held.pop(index, None) is not None or tape.gaps[index].free
            for index in by_slot[slot]:
                ahead = follower[index]
                gap = tape.gaps[ahead]
                if gap.keepable and not gap.free:
                    turns = 1 if gap.end <= slot else 0
                    held[ahead] = (offset + turns * tape.slots + gap.end, gap.size)
            _evict(tape, held, slot, reserve(slot), pinned, {follower[index] for index in by_slot[slot]})
        history.append(kept)
    return history[-1:]


def _evict(
    tape: Tape, held: dict[int, tuple[int, int]], slot: int, reserved: int, pinned: frozenset[int], fresh: set[int]
) -> None:
    """Drop what is used farthest ahead until the rest, the blocks of this slot and the reserve fit."""
    passing = sum(size for gap, (_, size) in held.items() if gap not in fresh)
    while passing + tape.base[slot] > tape.budget:
        passing -= held.pop(_victim(tape, held, frozenset(), fresh))[1]
    total = passing + sum(held[gap][1] for gap in fresh if gap in held)
    while held and total + reserved > tape.budget:
        victim = _victim(tape, held, pinned, set())
        if victim < 0:
            return
        total -= held.pop(victim)[1]


def _victim(tape: Tape, held: dict[int, tuple[int, int]], pinned: frozenset[int], spared: set[int]) -> int:
    farthest, victim = -1, -1
    for gap, (end, _) in held.items():
        if gap not in spared and end > farthest and tape.gaps[gap].block not in pinned:
            farthest, victim = end, gap
    return victim


def _followers(tape: Tape) -> list[int]:
    """For each gap, the gap that begins where it ends (on a ring; its own index when there is none)."""
    begins: dict[tuple[int, int], int] = {}
    for index, gap in enumerate(tape.gaps):
        begins[gap.block, gap.begin % tape.slots if tape.ring else gap.begin] = index
    return [begins.get((gap.block, gap.end), index) for index, gap in enumerate(tape.gaps)]


def joined(rounds: Sequence[Sequence[bool]]) -> list[bool]:
    """The choices for a tape of several cycles, from those of each of its cycles."""
    return [keep for one in rounds for keep in one]
