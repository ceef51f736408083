"""What would Belady's rule keep, if room must be left for the loads in flight?

Belady's rule (evict what is used farthest in the future) moves the fewest bytes when nothing is loaded ahead. Loading
ahead needs room. It is left in one of two ways:

- `reserve` bytes stay free at every slot: newcomers with a far next use do not stay, so the same blocks do every cycle;
- there is room for what the next `lookahead` visits lack: the block used farthest ahead gives way at that moment, the
  newcomer stays, and kept blocks may take turns from cycle to cycle. That saves bytes: a cycle of n equal blocks with
  room for k misses n (n - k) / (n - 1) per cycle instead of n - k + 1.

The rule is walked cycle after cycle until the content at a boundary recurs, which yields a steady state of some cycles.
"""

from dataclasses import dataclass

from headrace.planning.tape import Tape


@dataclass(frozen=True, slots=True)
class Room:
    """How much room a sweep leaves for loads in flight, and which blocks it gives up only if it must."""

    reserve: int = 0
    lookahead: int = 0
    pinned: frozenset[int] = frozenset()


def sweep(tape: Tape, room: Room, *, rounds: int) -> list[list[bool]]:
    """What is kept in each round of one period of a one-cycle tape (in the last round when no period is found)."""
    walk = _Walk(tape, room)
    seen: dict[frozenset[int], int] = {}
    history: list[list[bool]] = []
    for turn in range(rounds):
        content = frozenset(walk.held)
        if content in seen:
            return history[seen[content] :]
        seen[content] = turn
        history.append(walk.round(turn))
    return history[-1:]


class _Walk:
    """The content of the device while the rule walks the slots."""

    def __init__(self, tape: Tape, room: Room) -> None:
        self.tape = tape
        self.room = room
        self.held: dict[int, int] = {}  # gap through which a block is kept -> slot of its end, counted over all rounds
        self.bytes = 0
        self.ending: list[list[int]] = [[] for _ in range(tape.slots)]
        begins: dict[tuple[int, int], int] = {}
        for index, gap in enumerate(tape.gaps):
            self.ending[gap.end].append(index)
            begins[gap.block, gap.begin % tape.slots if tape.ring else gap.begin] = index
            if not tape.ring and gap.begin == 0 and gap.keepable and not gap.free:
                self.held[index] = gap.end
                self.bytes += gap.size
        self.following = [begins.get((gap.block, gap.end)) for gap in tape.gaps]

    def round(self, turn: int) -> list[bool]:
        tape, gaps = self.tape, self.tape.gaps
        kept = [False] * len(gaps)
        base = turn * tape.slots
        for slot in range(tape.slots):
            for index in self.ending[slot]:
                kept[index] = gaps[index].free
                if self.held.pop(index, None) is not None:
                    kept[index] = True
                    self.bytes -= gaps[index].size
            self._make_room(tape.budget - tape.base[slot] - self._missing(slot))
            for index in self.ending[slot]:
                ahead = self.following[index]
                if ahead is not None and gaps[ahead].keepable and not gaps[ahead].free:
                    passes = tape.slots if gaps[ahead].end <= slot else 0
                    self.held[ahead] = base + passes + gaps[ahead].end
                    self.bytes += gaps[ahead].size
            self._make_room(tape.budget - self.room.reserve)
        return kept

    def _missing(self, slot: int) -> int:
        """Bytes of the blocks that the next visits need and the device lacks."""
        missing = 0
        for ahead in range(slot + 1, slot + 1 + self.room.lookahead):
            for index in self.ending[ahead % self.tape.slots]:
                gap = self.tape.gaps[index]
                if index not in self.held and not gap.free:
                    missing += gap.size
        return missing

    def _make_room(self, limit: int) -> None:
        """Give up the blocks used farthest ahead, until `limit` holds; pinned blocks last."""
        pinned, gaps = self.room.pinned, self.tape.gaps
        while self.bytes > limit and self.held:
            going = [index for index in self.held if gaps[index].block not in pinned] if pinned else self.held
            if not going and self.bytes <= self.tape.budget:
                return
            victim = max(going or self.held, key=self.held.__getitem__)
            del self.held[victim]
            self.bytes -= gaps[victim].size
