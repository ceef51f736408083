"""What can no schedule beat?

Note "four bounds". The steady state of any schedule takes, per cycle, at least

1. the compute of the cycle: the compute lane is serial;
2. the fewest bytes that any schedule loads, over the best bandwidth of any block. Relax every block to its single
   bytes, each of which may be kept or dropped by itself. For pages of one size Belady's rule (drop what is used
   farthest ahead) loads the fewest; a real schedule is one of the relaxed ones, so it loads no fewer. Dividing by the
   lane's best seconds per byte gives seconds. In the long run the count per cycle is that of the rule's own period;
   without a period, of its first cycles from an empty device, less one budget (what a better start could have held);
3. the sum over any cut of the cycle into windows of what each window takes alone. At the event that begins a window the
   host has issued everything that started before it, so at most the budget's bytes are present or in flight (among
   them the blocks of the visit just computed). Whatever else the window uses must be loaded inside it, and so must all
   that expired at a boundary inside it; behind the last of these loads at least one visit of the window still computes.
   This sees that a forward pass waits for its loads although a long backward pass behind it leaves the lane idle;
4. the smallest cycle time T whose memory has room for the loads in flight: over a cycle the budget offers budget * T
   byte seconds; each visit takes its bytes times its compute, each load its bytes times its time on the lane, and each
   block kept through a gap its bytes times the gap's length. That length is at least the gap's compute, and the time of
   what must be loaded in it by bound 3. (T less the visit would be too much: blocks may take turns, and be kept through
   short gaps only.) Keeping frees the lane, which must load all the rest within T. The best choice of what to keep,
   relaxed to fractions, is a knapsack. What is feasible in time T is feasible in any longer time.
"""

import heapq
import math
from typing import NamedTuple

import numpy as np

from headrace.planning.problem import Problem
from headrace.planning.tape import Gap, Tape, make_tape

_SLOTS_OF_BELADY = 8000  # the byte-wise rule walks at most this many slots in search of its period


def lower_bound(problem: Problem) -> float:
    """Seconds per steady cycle that no schedule of this problem can beat (see the note above)."""
    return max(window_bound(problem), bytes_bound(problem), memory_bound(problem))


def bytes_bound(problem: Problem) -> float:
    """Bounds 1 and 2 alone: max(compute, fewest bytes over bandwidth)."""
    sized = [(size, load) for size, load in zip(problem.block_bytes, problem.load_seconds, strict=True) if size]
    pace = min((load / size for size, load in sized), default=0.0)
    return max(problem.compute_seconds, fewest_bytes(problem) * pace)


def fewest_bytes(problem: Problem) -> float:
    """The fewest bytes per cycle that any schedule loads in the long run."""
    tape = make_tape(problem)
    reloaded = sum(problem.block_bytes[block] for block in problem.residents & problem.changing)
    return reloaded + _belady_bytes(tape)


def window_bound(problem: Problem) -> float:
    """Bounds 1 and 3: the best cut into windows that begins at the boundary or where the phase changes."""
    tape = make_tape(problem)
    visits = problem.visits
    cuts = {0} | {index + 1 for index in range(1, len(visits)) if visits[index].phase is not visits[index - 1].phase}
    if len(cuts) > 4:  # with many micro-batches, the walk from the boundary finds the cuts inside anyway
        cuts = {0}
    return max(problem.compute_seconds, *(_best_windows(tape, cut) for cut in sorted(cuts)))


def memory_bound(problem: Problem) -> float:
    """Bounds 1 and 4: the smallest cycle time at which kept blocks leave room for the loads in flight."""
    tape = make_tape(problem)
    total = sum(gap.seconds for gap in tape.gaps)
    used = sum(size * seconds for size, seconds in zip(tape.base, tape.compute, strict=True))
    used += sum(gap.size * gap.seconds for gap in tape.gaps)
    lengths = _gap_lengths(tape)
    choices = [
        (gap.size * (length - gap.seconds), gap.seconds)
        for gap, length in zip(tape.gaps, lengths, strict=True)
        if gap.keepable
    ]
    low, high = problem.compute_seconds, max(problem.compute_seconds, total)
    for _ in range(40):
        middle = (low + high) / 2
        if total - _most_saved(choices, tape.budget * middle - used) > middle:
            low = middle
        else:
            high = middle
    return low


def _gap_lengths(tape: Tape) -> list[float]:
    """The least time of each gap while its block is kept: its compute, and the loads that it must contain (bound 3)."""
    ends = [0.0]
    for seconds in tape.compute:
        ends.append(ends[-1] + seconds)
    slots_of: dict[int, list[Gap]] = {}
    for gap in tape.gaps:
        slots_of.setdefault(gap.block, []).append(gap)
    loads = sum(gaps[0].seconds for gaps in slots_of.values() if gaps[0].size)
    densest = max((gap.seconds / gap.size for gap in tape.gaps if gap.size), default=0.0)
    shortest = min((visit.compute_seconds for visit in tape.problem.visits), default=0.0)
    lengths = []
    for gap in tape.gaps:
        length = ends[gap.end] - ends[(gap.begin + 1) % tape.slots] + (ends[-1] if gap.begin < -1 else 0.0)
        if gap.end - gap.begin == tape.slots and gap.size:  # all other visits lie in the gap
            here = [
                other for other in slots_of.values() if len(other) == 1 and other[0].end == gap.end and other[0].size
            ]
            inside = loads - sum(other[0].seconds for other in here)
            needed = inside - (tape.budget - gap.size) * densest
            if needed > 0:
                length = max(length, needed + shortest)
        lengths.append(length)
    return lengths


def _most_saved(choices: list[tuple[float, float]], room: float) -> float:
    """The most lane seconds that keeping saves with `room` byte seconds: a knapsack of (byte seconds, lane seconds)."""
    saved = 0.0
    graded = []
    for weight, seconds in choices:
        if weight <= 0:
            saved += seconds
            room -= weight
        elif seconds:
            graded.append((weight / seconds, seconds, weight))
    for ratio, seconds, weight in sorted(graded):
        if weight > room:
            return saved + max(0.0, room) / ratio
        saved += seconds
        room -= weight
    return saved


class _Load(NamedTuple):
    """What a use of a block adds to the loads of a window: the whole block if the window begins at `certain` or before.

    Otherwise, if the window begins after `possible`, the use adds the bytes that are not there yet at that time.
    """

    block: int
    size: int
    seconds: float
    certain: int
    possible: int


def _best_windows(tape: Tape, cut: int) -> float:
    """The largest sum of window bounds over all partitions of one round that begins at slot `cut`.

    The arrays have an entry for each slot behind the cut at which a window may begin: what it takes up to the slot that
    the loop has reached. All partitions are of interest, so the time is quadratic in the slots.
    """
    slots = tape.slots
    loads = _loads_of_two_rounds(tape)
    returning = _returning(loads, slots, cut)
    best = np.zeros(slots + 1)  # best[k]: the first k slots behind the cut
    compute, certain, possible, densest = np.zeros((4, slots))
    shortest = np.full(slots, math.inf)
    # Without blocks of the visit in front of the window, until they are used again.
    room = float(tape.budget) - np.roll(np.array(tape.base, dtype=float), 1 - cut)
    for slot in range(slots):
        begun = slice(slot + 1)
        seconds, own = tape.compute[(cut + slot) % slots], loads[cut + slot]
        compute[begun] += seconds
        for begin, size in returning[slot]:
            room[begin] += size
        for load in own:
            sure = slice(max(0, min(load.certain - cut, slot) + 1))
            unsure = slice(max(sure.stop, load.possible - cut + 1), slot + 1)
            certain[sure] += load.seconds
            if load.size:
                possible[unsure] += load.seconds
                np.maximum(densest[unsure], load.seconds / load.size, out=densest[unsure])
        if own:
            np.minimum(shortest[begun], seconds, out=shortest[begun])
        extra = np.maximum(0.0, possible[begun] - room[begun] * densest[begun])
        moved = certain[begun] + extra
        waits = moved > 1e-9 * possible[begun]
        longest = np.where(waits, np.maximum(compute[begun], moved + shortest[begun]), compute[begun])
        best[slot + 1] = np.max(best[begun] + longest)
    return float(best[slots])


def _loads_of_two_rounds(tape: Tape) -> list[list[_Load]]:
    """By slot, the loads that its blocks may need."""
    loads: list[list[_Load]] = [[] for _ in range(2 * tape.slots)]
    for gap in tape.gaps:
        for boundary in (0, tape.slots):  # if the block expires, it has done so behind this one
            until = -1 if gap.keepable else boundary
            behind = gap.begin + boundary if gap.keepable else -1
            loads[gap.end + boundary].append(_Load(gap.block, gap.size, gap.seconds, until, behind))
    return loads


def _returning(loads: list[list[_Load]], slots: int, cut: int) -> list[list[tuple[int, int]]]:
    """By slot behind the cut: the windows that use a block of the visit in front of them here first, and its bytes."""
    returning: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
    following: dict[int, int] = {}  # block -> the slot of its next use
    for slot in reversed(range(slots)):
        following |= {load.block: slot for load in loads[cut + slot]}
        for load in loads[(cut + slot - 1) % slots]:
            if load.size and load.block in following:
                returning[following[load.block]].append((slot, load.size))
    return returning


def _belady_bytes(tape: Tape) -> float:
    """Bytes per round that Belady's rule loads when every byte of a block may be kept or dropped by itself."""
    slots = tape.slots
    by_slot: list[list[Gap]] = [[] for _ in range(slots)]
    following: dict[tuple[int, int], Gap] = {}
    for gap in tape.gaps:
        if gap.size:
            by_slot[gap.end].append(gap)
            following[gap.block, gap.begin % slots] = gap
    held: dict[int, int] = {}  # block -> its bytes that are still held
    queue: list[tuple[int, int]] = []  # (minus the slot of the next use, block), farthest first
    passing = loaded = 0
    seen: dict[tuple[tuple[int, int], ...], tuple[int, int]] = {}
    rounds = max(4, _SLOTS_OF_BELADY // slots)
    for turn in range(rounds):
        state = tuple(sorted(held.items()))
        if state in seen:
            then, before = seen[state]
            return (loaded - before) / (turn - then)
        seen[state] = (turn, loaded)
        for slot in range(slots):
            for gap in by_slot[slot]:
                there = held.pop(gap.block, 0)
                passing -= there
                loaded += gap.size - there
            room = tape.budget - tape.base[slot]
            while passing > room:
                block = queue[0][1]
                drop = min(passing - room, held.get(block, 0)) if -queue[0][0] > turn * slots + slot else 0
                passing -= drop
                if drop == 0 or held[block] == drop:
                    heapq.heappop(queue)
                if drop:
                    held[block] -= drop
                    if not held[block]:
                        del held[block]
            for gap in by_slot[slot]:
                ahead = following[gap.block, slot]
                if ahead.keepable:
                    end = turn * slots + ahead.end + (slots if ahead.end <= slot else 0)
                    held[gap.block] = gap.size
                    passing += gap.size
                    heapq.heappush(queue, (-end, gap.block))
    return max(0.0, (loaded - tape.budget) / rounds)
