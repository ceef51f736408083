"""How many bytes does headrace hold, in which tier and for what? Counted as they come and go, with the peaks.

Ctrl-C may interrupt the main thread at any call, and the garbage collector may run on any thread, even in the middle of
a count. So one C call puts each change into a queue, and counting a change replaces all sums at once: each entry counts
exactly once.
"""

import contextlib
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.config import format_bytes
from headrace.errors import BudgetError
from headrace.memory.shared_budget import Share


class Tier(StrEnum):  # a string's hash is faster than an Enum's
    """Where bytes can rest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


_INSTEAD = {  # what else helps, by purpose
    "gradients": ", or train fewer parameters",
    "optimizer states": ', or give the optimizer tier="disk"',
}


class _Change(NamedTuple):
    """Bytes that come or (negative) go. `locked`: True if page-locked, False if refused, None: no need."""

    tier: Tier
    purpose: str
    nbytes: int
    locked: bool | None = None
    until: "_End | None" = None  # the end of the object's life, when the bytes go again


class _End(weakref.ref[Any]):
    """The end of an object's life, with the change that is counted then."""

    __slots__ = ("change",)
    change: _Change


@dataclass(frozen=True)
class _Sums:
    """Bytes that are held now, and the peaks. `last`: the entry that was counted last."""

    last: _Change | _End | None = None
    held: dict[tuple[Tier, str], int] = field(default_factory=dict)
    peak: dict[tuple[Tier, str], int] = field(default_factory=dict)
    tier_held: dict[Tier, int] = field(default_factory=dict)
    tier_peak: dict[Tier, int] = field(default_factory=dict)
    budgeted_held: int = 0
    budgeted_peak: int = 0
    locked_bytes: int = 0
    refused_bytes: int = 0

    def after(self, entry: _Change | _End, counted_to_budget: frozenset[str]) -> "_Sums":
        """The sums after `entry` is counted."""
        tier, purpose, nbytes, locked, _ = entry.change if isinstance(entry, _End) else entry
        held = self.held.get((tier, purpose), 0) + nbytes
        tier_held = self.tier_held.get(tier, 0) + nbytes
        budgeted = nbytes if tier is Tier.DEVICE and purpose in counted_to_budget else 0
        return _Sums(
            entry,
            self.held | {(tier, purpose): held},
            self.peak | {(tier, purpose): max(held, self.peak.get((tier, purpose), 0))},
            self.tier_held | {tier: tier_held},
            self.tier_peak | {tier: max(tier_held, self.tier_peak.get(tier, 0))},
            self.budgeted_held + budgeted,
            max(self.budgeted_peak, self.budgeted_held + budgeted),
            self.locked_bytes + (nbytes if locked is True else 0),
            self.refused_bytes + (nbytes if locked is False else 0),
        )


class Ledger:
    """Counts bytes by tier and purpose ("weights", "gradients", ...). Safe to call from any thread.

    `counted_to_budget` names the purposes that count to the device budget; their sum has a peak of its own.
    `host_budget_bytes` caps the host tier; None: no cap. It is one rank's share of what the user set for all `ranks`.
    """

    def __init__(
        self,
        counted_to_budget: frozenset[str] = frozenset(),
        host_budget_bytes: int | None = None,
        ranks: int = 1,
    ) -> None:
        self._counted_to_budget = counted_to_budget
        self.host_budget_bytes = host_budget_bytes
        self.ranks = ranks
        self._lock = threading.RLock()
        self._queue: deque[_Change | _End] = deque()  # entries that are not counted yet
        self._ends: dict[int, _End] = {}  # of objects that still live, by id
        self._sums = _Sums()
        self._made_bytes = 0  # of host memory that is being made now
        self.share: Share | None = None  # of the host budget, if other models have it as well
        # Called on any thread with the number of host bytes that are missing: frees memory that only saves time.
        self.spare: weakref.WeakMethod[Callable[[int], None]] | None = None

    @property
    def host_left_bytes(self) -> float:
        """The bytes that the host budget leaves now; infinity without one."""
        if self.host_budget_bytes is None:
            return math.inf
        return self.host_budget_bytes - self._host_bytes

    @property
    def host_held_bytes(self) -> int:
        """The bytes held now in host memory."""
        return self.held_bytes(Tier.HOST)

    @property
    def _host_bytes(self) -> int:
        """The bytes of the host budget that are taken now."""
        return self.host_held_bytes + (0 if self.share is None else self.share.others_host_bytes)

    def fits(self, nbytes: int) -> bool:
        """Whether the host budget allows `nbytes` more than are held now."""
        return nbytes <= self.host_left_bytes

    def has_room(self, nbytes: int) -> bool:
        """Like `fits`, but if they do not fit, first frees host memory that only saves time, and then others' share."""
        if self.fits(nbytes):
            return True
        make_room = None if self.spare is None else self.spare()
        if make_room is not None:
            make_room(int(nbytes - self.host_left_bytes))
        if self.share is not None and not self.fits(nbytes):
            self.share.claim_host(nbytes)
        return self.fits(nbytes)

    def take_spare(self, purpose: str, nbytes: int) -> bool:
        """Books host memory that only saves time, before it is made. False: there is no room, and nothing is booked.

        There must be room for twice as much beside what is held or being made, because making it books it once more.
        """
        others_bytes = (
            0 if self.share is None else self.share.others_host_bytes
        )  # their ledgers have locks of their own
        with self._lock:
            wanted_bytes = self.host_held_bytes + others_bytes + self._made_bytes + 2 * nbytes
            if self.host_budget_bytes is not None and wanted_bytes > self.host_budget_bytes:
                return False
            self.add(Tier.HOST, purpose, nbytes)
            return True

    @contextlib.contextmanager
    def making(self, nbytes: int) -> Iterator[None]:
        """In this context, `nbytes` of host memory are checked, made and booked; `take_spare` leaves room for them."""
        with self._lock:
            self._made_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._made_bytes -= nbytes

    def check_host(self, nbytes: int, purpose: str) -> None:
        """Raises BudgetError if `nbytes` more in host memory exceed the budget. To be called before allocating."""
        if self.host_budget_bytes is not None and not self.has_room(nbytes):
            held = self._host_bytes
            otherwise = _INSTEAD.get(purpose, "")
            raise BudgetError(
                f"{purpose} need {format_bytes(nbytes)} of host memory beside {format_bytes(held)} that are held;"
                f" {self.allowance(self.host_budget_bytes, held + nbytes)}{otherwise}",
                tier="host",
            )

    def allowance(self, allowed_bytes: int, wanted_bytes: int) -> str:
        """For errors: how much `host_memory` allows this process, and what to raise it to."""
        own, of_node = format_bytes(allowed_bytes), format_bytes(self.ranks * allowed_bytes)
        limit = f"host_memory allows {own}"
        if self.ranks > 1:
            limit = f"host_memory={of_node} of the node allows each of its {self.ranks} ranks {own}"
        return f"{limit}; raise it to at least {format_bytes(self.ranks * wanted_bytes, at_least=True)}"

    def add(self, tier: Tier, purpose: str, nbytes: int) -> None:
        """Books `nbytes` more (less, when negative)."""
        self._queue.append(_Change(tier, purpose, nbytes))
        self._counted()

    def book(self, owner: Any, tier: Tier, purpose: str, nbytes: int, *, locked: bool | None = None) -> None:
        """Books `nbytes` for as long as `owner` lives. `locked`: page-locked, or (False) refused; see `_Change`."""
        end = _End(owner, self._queue.append)
        end.change = _Change(tier, purpose, -nbytes, locked)
        self._queue.append(_Change(tier, purpose, nbytes, locked, end))
        self._counted()

    def _counted(self) -> _Sums:
        """Counts all queued entries and returns the sums. Reentrant: objects may be collected meanwhile."""
        with self._lock:
            while self._queue:
                entry, before = self._queue[0], self._sums
                if before.last is not entry:
                    after = before.after(entry, self._counted_to_budget)
                    if self._sums is not before:
                        continue
                    self._sums = after
                if isinstance(entry, _End):
                    self._ends.pop(id(entry), None)
                elif entry.until is not None:
                    self._ends[id(entry.until)] = entry.until
                if self._queue and self._queue[0] is entry:
                    self._queue.popleft()
            return self._sums

    def locked(self) -> dict[str, int]:
        """Bytes of host memory now page-locked, and those that the system refused to lock, named as in the stats."""
        sums = self._counted()
        return {"host_locked_bytes": sums.locked_bytes, "host_refused_bytes": sums.refused_bytes}

    def held_bytes(self, tier: Tier, purpose: str | None = None) -> int:
        """Bytes held now, for one purpose or in all."""
        sums = self._counted()
        return sums.tier_held.get(tier, 0) if purpose is None else sums.held.get((tier, purpose), 0)

    def held_in_tiers(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """Bytes held now on the device, in host memory and on disk; and gradients on the device and in host memory."""
        sums = self._counted() if self._queue else self._sums
        held, of = sums.tier_held, sums.held
        gradients = of.get((Tier.DEVICE, "gradients"), 0), of.get((Tier.HOST, "gradients"), 0)
        return (held.get(Tier.DEVICE, 0), held.get(Tier.HOST, 0), held.get(Tier.DISK, 0)), gradients

    def peak_bytes(self, tier: Tier, purpose: str | None = None) -> int:
        """The most bytes held at once since the last `reset_peaks`, for one purpose or in all."""
        sums = self._counted()
        return sums.tier_peak.get(tier, 0) if purpose is None else sums.peak.get((tier, purpose), 0)

    @property
    def budgeted_bytes(self) -> int:
        """The bytes held now for the purposes that count to the device budget."""
        return self._counted().budgeted_held

    @property
    def budgeted_peak_bytes(self) -> int:
        """The most bytes held at once for the purposes that count to the device budget."""
        return self._counted().budgeted_peak

    def reset_peaks(self) -> None:
        """Peaks start anew from what is held now."""
        with self._lock:
            sums = self._counted()
            self._sums = replace(sums, peak=sums.held, tier_peak=sums.tier_held, budgeted_peak=sums.budgeted_held)

    def forked(self) -> None:
        """Called in a forked child, where the lock may be held by a thread that the child does not have."""
        self._lock = threading.RLock()

    def by_purpose(self) -> dict[tuple[Tier, str], int]:
        """Bytes held now, for each tier and purpose that holds any."""
        return {key: nbytes for key, nbytes in self._counted().held.items() if nbytes}
