"""Where does host memory come from that is needed again in every step? From a pool: arenas, carved first fit.

The first step finds out how much it takes: what does not fit gets an arena of its own. When all of it has come back,
one arena of exactly the bytes that were in use at once takes the place of the many, and later steps allocate nothing.
"""

from bisect import bisect_left
from dataclasses import dataclass

import torch

from millrace.memory.arena import Arena, aligned, whole_pages
from millrace.memory.ledger import Ledger

__all__ = ["HostPool", "Slab"]


@dataclass(frozen=True, eq=False)
class Slab:
    """`memory` is a uint8 tensor of shape (nbytes,) in the pool's arena of that index, from `offset` on."""

    memory: torch.Tensor
    arena: int
    offset: int


class HostPool:
    """Page-locked host memory for `device`, booked in `ledger` under `purpose`. Not safe for several threads at once.

    Raises BudgetError, before anything is allocated, when more arenas would be over the ledger's host budget.
    """

    def __init__(self, device: torch.device, ledger: Ledger, purpose: str) -> None:
        self._context = device, ledger, purpose
        self._arenas: list[Arena] = []
        self._free: list[list[tuple[int, int]]] = []  # of each arena: ranges (begin, end), in order, never adjacent
        self.held_bytes = 0  # handed out now
        self._peak_bytes = 0
        self.grown = 0  # how many arenas were made since the beginning

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.nbytes for arena in self._arenas)

    def take(self, nbytes: int) -> Slab:
        """Memory for `nbytes`, of arbitrary contents."""
        wanted = aligned(nbytes)
        for index, ranges in enumerate(self._free):
            for place, (begin, end) in enumerate(ranges):
                if end - begin >= wanted:
                    ranges[place : place + 1] = [(begin + wanted, end)] if end - begin > wanted else []
                    return self._handed_out(index, begin, nbytes)
        self._add_arena(wanted)
        self._free[-1] = [(wanted, self._arenas[-1].nbytes)] if self._arenas[-1].nbytes > wanted else []
        return self._handed_out(len(self._arenas) - 1, 0, nbytes)

    def give_back(self, slab: Slab) -> None:
        """The slab's memory may be handed out again. The caller has seen to it that no copy uses it any more."""
        begin, end = slab.offset, slab.offset + aligned(slab.memory.nbytes)
        ranges = self._free[slab.arena]
        place = bisect_left(ranges, (begin, end))
        if place < len(ranges) and ranges[place][0] == end:
            end = ranges.pop(place)[1]
        if place and ranges[place - 1][1] == begin:
            place -= 1
            begin = ranges.pop(place)[0]
        ranges.insert(place, (begin, end))
        self.held_bytes -= aligned(slab.memory.nbytes)

    def consolidate(self) -> None:
        """One arena of the peak instead of many. Only does something when all memory has come back."""
        if self.held_bytes or (len(self._arenas) == 1 and self._arenas[0].nbytes == whole_pages(self._peak_bytes)):
            return
        peak_bytes = self._peak_bytes
        self.clear()
        if peak_bytes:
            self._add_arena(peak_bytes)

    def clear(self) -> None:
        """Lets go of the arenas; memory that is still handed out lives as long as its slab."""
        self._arenas, self._free = [], []
        self._peak_bytes = 0

    def _add_arena(self, nbytes: int) -> None:
        self._arenas.append(Arena(nbytes, *self._context))
        self._free.append([(0, self._arenas[-1].nbytes)])
        self.grown += 1

    def _handed_out(self, arena: int, offset: int, nbytes: int) -> Slab:
        self.held_bytes += aligned(nbytes)
        self._peak_bytes = max(self._peak_bytes, self.held_bytes)
        return Slab(self._arenas[arena].tensor(offset, nbytes), arena, offset)
