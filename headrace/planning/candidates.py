"""Which sets of kept blocks are worth a try before any search? What Belady's rule keeps, with room for loads in flight.

Belady's rule (evict what is used farthest in the future) moves the fewest bytes when nothing is loaded ahead. Loading
ahead needs room. There are two ways to leave it:

- `reserve` bytes stay free at every slot: newcomers whose next use is far do not stay, so each cycle keeps the same
  blocks;
- there is room for what the next `lookahead` visits lack: the block used farthest ahead gives way at that moment, the
  newcomer stays, and kept blocks may take turns from cycle to cycle. That saves bytes: a cycle of n equal blocks with
  room for k misses n (n - k) / (n - 1) per cycle instead of n - k + 1.

The rule is walked cycle after cycle until the content at a boundary recurs, which yields a steady state of some cycles.
"""

from collections.abc import Iterator

from headrace.planning.tape import Tape, make_tape

_SLOTS = 3200  # the longest tape on which taking turns over several cycles is tried: n - 1 cycles of n equal blocks
_SHARES = 32  # how finely the bytes that stay for good are graded


def candidates(tape: Tape) -> Iterator[tuple[Tape, list[bool]]]:
    """Tapes, and what is kept on each. Tapes of several cycles, on which blocks take turns, come last."""
    seen: set[tuple[bool, ...]] = set()
    turning = []
    rounds = max(3, _SLOTS // tape.slots) if tape.ring else 1
    for walk in _walks(tape):
        cycles = walk.period(rounds)
        key = tuple(keep for cycle in cycles for keep in cycle)
        if key not in seen:
            seen.add(key)
            if len(cycles) == 1:
                yield tape, list(key)
            else:
                turning.append((len(cycles), list(key)))
    for count, kept in turning:
        yield make_tape(tape.problem, cycles=count), kept


def _walks(tape: Tape) -> "Iterator[_Walk]":
    largest = max((gap.size for gap in tape.gaps), default=0)
    for reserve in sorted({min(tape.budget, largest * halves // 2) for halves in range(10)}):
        yield _Walk(tape, reserve=reserve)
    if tape.ring:
        for pinned in _even_sets(tape):
            yield _Walk(tape, lookahead=2, pinned=pinned)
    for visits in range(1, 5):
        yield _Walk(tape, lookahead=visits)


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


class _Walk:
    """The content of the device while the rule walks the slots of a one-cycle tape. `pinned` blocks go last."""

    def __init__(
        self, tape: Tape, *, reserve: int = 0, lookahead: int = 0, pinned: frozenset[int] = frozenset()
    ) -> None:
        self.tape = tape
        self.reserve, self.lookahead, self.pinned = reserve, lookahead, pinned
        self.held: dict[int, int] = {}  # gap through which a block is kept -> slot of its end, counted over all rounds
        self.bytes = 0
        self.ending: list[list[int]] = [[] for _ in range(tape.slots)]
        begins: dict[tuple[int, int], int] = {}
        for index, gap in enumerate(tape.gaps):
            self.ending[gap.end].append(index)
            begins[gap.block, gap.begin % tape.slots if tape.ring else gap.begin] = index
            if not tape.ring and gap.begin == 0:
                self._keep(index, gap.end)
        self.following = [begins.get((gap.block, gap.end)) for gap in tape.gaps]

    def period(self, rounds: int) -> list[list[bool]]:
        """What is kept in each round of one period (in the last of `rounds` when no period is found)."""
        seen: dict[frozenset[int], int] = {}
        history: list[list[bool]] = []
        for turn in range(rounds):
            content = frozenset(self.held)
            if content in seen:
                return history[seen[content] :]
            seen[content] = turn
            history.append(self._round(turn))
        return history[-1:]

    def _round(self, turn: int) -> list[bool]:
        tape, gaps = self.tape, self.tape.gaps
        kept = [False] * len(gaps)
        for slot in range(tape.slots):
            for index in self.ending[slot]:
                kept[index] = gaps[index].free
                if self.held.pop(index, None) is not None:
                    kept[index] = True
                    self.bytes -= gaps[index].size
            self._make_room(tape.budget - tape.base[slot] - self._missing(slot))
            for index in self.ending[slot]:
                ahead = self.following[index]
                if ahead is not None:
                    passes = 1 if gaps[ahead].end <= slot else 0
                    self._keep(ahead, (turn + passes) * tape.slots + gaps[ahead].end)
            self._make_room(tape.budget - self.reserve)
        return kept

    def _keep(self, index: int, end: int) -> None:
        gap = self.tape.gaps[index]
        if gap.keepable and not gap.free:
            self.held[index] = end
            self.bytes += gap.size

    def _missing(self, slot: int) -> int:
        """Bytes of the blocks that the next visits need and the device lacks."""
        missing = 0
        for ahead in range(slot + 1, slot + 1 + self.lookahead):
            for index in self.ending[ahead % self.tape.slots]:
                gap = self.tape.gaps[index]
                if index not in self.held and not gap.free:
                    missing += gap.size
        return missing

    def _make_room(self, limit: int) -> None:
        """Give up the blocks used farthest ahead, until `limit` holds; pinned blocks last."""
        pinned, gaps = self.pinned, self.tape.gaps
        while self.bytes > limit and self.held:
            going = [index for index in self.held if gaps[index].block not in pinned] if pinned else self.held
            if not going and self.bytes <= self.tape.budget:
                return
            victim = max(going or self.held, key=self.held.__getitem__)
            del self.held[victim]
            self.bytes -= gaps[victim].size
