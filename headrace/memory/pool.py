"""Where does host memory come from that is needed again in every step? From a pool: arenas, carved first fit.

The first step shows how much memory a step takes: what does not fit gets an arena of its own. When all memory has been
given back, one arena of exactly the peak size replaces them all, and later steps of that size allocate nothing.

Page-locking costs the system 0.3 to 0.7 s for each GiB. So a larger step keeps that arena and gets another beside it.
Only when larger steps have made several, one arena replaces them all again. Several arenas have room for less than one
does, so this is only where the budgets have room for all of the pool once more. Elsewhere arenas become one each time.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from mmap import PAGESIZE

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError
from headrace.memory import ranges
from headrace.memory.arena import Arena, aligned, whole_pages
from headrace.memory.least import LeastTree
from headrace.memory.ledger import Ledger

_LEAST_GROWTH = 1 / 16  # of the pool, by each arena that a larger step makes: they stay few
_MOST_ARENAS = 16


@dataclass(frozen=True, eq=False)
class Slab:
    """A piece of a pool: `memory` is a uint8 tensor of shape (nbytes,) at `offset` of the arena with index `arena`."""

    memory: torch.Tensor
    arena: int
    offset: int


class HostPool:
    """Page-locked host memory for `device`, booked in `ledger` under `purpose`. Not safe for several threads at once.

    Raises BudgetError, before anything is allocated, if another arena would exceed the ledger's host budget, or
    `limit_bytes` for this pool alone.
    """

    def __init__(self, device: torch.device, ledger: Ledger, purpose: str, limit_bytes: int | None = None) -> None:
        self._context = device, ledger, purpose
        self._limit_bytes = limit_bytes
        self._arenas: list[Arena] = []
        self._free: list[list[ranges.Range]] = []  # of each arena
        self._no_more = LeastTree()  # by arena: minus an upper bound of its largest free range, in bytes
        self._reserved = False
        self._consolidated = False
        self.arena_bytes = 0  # in all arenas
        self.held_bytes = 0  # that are handed out now
        self._peak_bytes = 0
        self.grown = 0  # how many arenas were made since the beginning

    @property
    def locked_bytes(self) -> int:
        """Of `arena_bytes`, those that are page-locked."""
        return sum(arena.nbytes for arena in self._arenas if arena.pinned)

    def take(self, nbytes: int) -> Slab:
        """Memory for `nbytes`, with arbitrary contents; from a new arena if the others have no room for it.

        After the first step, new arenas are larger than that if the budgets are wide.
        """
        slab = self.try_take(nbytes)
        if slab is None:
            least_bytes = int(self.arena_bytes * _LEAST_GROWTH) if self._is_steady_and_wide else 0
            self.grow(max(aligned(nbytes), least_bytes))
            slab = self.try_take(nbytes)
        if slab is None:
            raise RuntimeError(f"a new arena has no room for {nbytes} bytes")
        return slab

    def try_take(self, nbytes: int) -> Slab | None:
        """Memory for `nbytes` from the present arenas; None if they have no room."""
        wanted = aligned(nbytes)
        index = self._no_more.first(0, -wanted)
        while index is not None:
            begin = ranges.take(self._free[index], wanted)
            if begin is not None:
                self.held_bytes += wanted
                self._peak_bytes = max(self._peak_bytes, self.held_bytes)
                return Slab(self._arenas[index].tensor(begin, nbytes), index, begin)
            self._no_more.put(index, -max((end - begin for begin, end in self._free[index]), default=0))
            index = self._no_more.first(index + 1, -wanted)
        return None

    def give_back(self, slab: Slab) -> None:
        """Takes a slab back, to hand its memory out again. The caller has made sure that no copy uses it any more."""
        self._no_more.put(slab.arena, -self._arenas[slab.arena].nbytes)
        ranges.add(self._free[slab.arena], slab.offset, slab.offset + aligned(slab.memory.nbytes))
        self.held_bytes -= aligned(slab.memory.nbytes)

    def keep(self, slabs: Iterable[Slab]) -> None:
        """Makes `slabs` the only ones in use: all others count as given back, even if a `give_back` was cut short."""
        self._free = [[(0, arena.nbytes)] for arena in self._arenas]
        self.held_bytes = 0
        for slab in slabs:
            nbytes = aligned(slab.memory.nbytes)
            ranges.remove(self._free[slab.arena], slab.offset, slab.offset + nbytes)
            self.held_bytes += nbytes
        for index, arena in enumerate(self._arenas):
            self._no_more.put(index, -arena.nbytes)
        self.arena_bytes = sum(arena.nbytes for arena in self._arenas)

    def consolidate(self) -> None:
        """If all memory has been given back, replaces several arenas by one: of the peak size; later, of their sum."""
        if self._reserved or self.held_bytes or len(self._arenas) < 2:
            return
        if self._is_steady_and_wide and len(self._arenas) < _MOST_ARENAS:
            return
        wanted_bytes = self.arena_bytes if self._consolidated else self._peak_bytes
        self._arenas, self._free, self._no_more, self.arena_bytes = [], [], LeastTree(), 0
        self._consolidated = True
        self.grow(wanted_bytes)

    @property
    def _is_steady_and_wide(self) -> bool:
        """Whether the first step is over, and the budgets have room for all of the pool once more."""
        _, ledger, _ = self._context
        within = self._limit_bytes is None or 2 * self.arena_bytes <= self._limit_bytes
        return self._consolidated and within and ledger.fits(self.arena_bytes)

    def reserve(self) -> None:
        """Takes all that the limit allows at once, and keeps it: nobody else can take it from the ledger's budget."""
        if self._limit_bytes is not None and not self._arenas:
            self.grow(self._limit_bytes // PAGESIZE * PAGESIZE)
            self._reserved = True

    def has_room(self, nbytes: int) -> bool:
        """Whether the budgets allow another arena of that size."""
        _, ledger, _ = self._context
        within = self._limit_bytes is None or self.arena_bytes + whole_pages(nbytes) <= self._limit_bytes
        return within and ledger.has_room(whole_pages(nbytes))

    def grow(self, nbytes: int) -> None:
        """Makes another arena."""
        wanted_bytes = self.arena_bytes + whole_pages(nbytes)
        if self._limit_bytes is not None and wanted_bytes > self._limit_bytes:
            _, ledger, purpose = self._context
            raise BudgetError(
                f"{purpose} need {format_bytes(nbytes)} of host memory beside {format_bytes(self.arena_bytes)}; their"
                f" {ledger.allowance(self._limit_bytes, wanted_bytes)}",
                tier="host",
            )
        self._arenas.append(Arena(nbytes, *self._context))
        self._free.append([(0, self._arenas[-1].nbytes)])
        self._no_more.put(len(self._free) - 1, -self._arenas[-1].nbytes)
        self.arena_bytes += self._arenas[-1].nbytes
        self.grown += 1
