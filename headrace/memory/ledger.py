"""How many bytes does headrace hold, in which tier and for what? Counted as they come and go, with the peaks."""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum

from headrace.config import format_bytes
from headrace.errors import BudgetError

__all__ = ["Ledger", "Tier"]


class Tier(StrEnum):  # its hash is that of a string: quicker
    """Where bytes can rest."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Ledger:
    """Counts bytes by tier and purpose ("weights", "gradients", ...). Safe to call from any thread.

    `counted_to_budget` names the purposes whose sum is held to the device budget; its peak is kept apart.
    `host_budget_bytes` caps the host tier; None: no cap.
    """

    def __init__(self, counted_to_budget: frozenset[str] = frozenset(), host_budget_bytes: int | None = None) -> None:
        self._counted_to_budget = counted_to_budget
        self.host_budget_bytes = host_budget_bytes
        self._lock = threading.Lock()
        self._held: Counter[tuple[Tier, str]] = Counter()
        self._tier_held: Counter[Tier] = Counter()
        self._tier_peak: Counter[Tier] = Counter()
        self._peak: Counter[tuple[Tier, str]] = Counter()
        self._budgeted_held = 0
        self._budgeted_peak = 0
        self._locked_bytes = self._refused_bytes = 0
        self._made_bytes = 0  # of host memory, being made now
        # Called with host bytes that are missing, by any thread: lets go of what only saves time, as far as it has any.
        self.spare: weakref.WeakMethod[Callable[[int], None]] | None = None

    def fits(self, nbytes: int) -> bool:
        """Whether the host budget allows `nbytes` more beside all that is held now."""
        return self.host_budget_bytes is None or self.held_bytes(Tier.HOST) + nbytes <= self.host_budget_bytes

    def has_room(self, nbytes: int) -> bool:
        """As `fits`, or once what only saves time has made room."""
        if self.fits(nbytes):
            return True
        make_room = None if self.spare is None else self.spare()
        if make_room is None or self.host_budget_bytes is None:
            return False
        make_room(self.held_bytes(Tier.HOST) + nbytes - self.host_budget_bytes)
        return self.fits(nbytes)

    def take_spare(self, purpose: str, nbytes: int) -> bool:
        """Books host memory for what only saves time, before it is made, if there is room for twice as much (it is
        booked once more while it is made) beside all that is held or being made. False: nothing is booked.
        """
        with self._lock:
            wanted_bytes = self._tier_held[Tier.HOST] + self._made_bytes + 2 * nbytes
            if self.host_budget_bytes is not None and wanted_bytes > self.host_budget_bytes:
                return False
            self._held[Tier.HOST, purpose] += nbytes
            self._tier_held[Tier.HOST] += nbytes
            return True

    @contextlib.contextmanager
    def making(self, nbytes: int) -> Iterator[None]:
        """Host memory is made inside of it, after a look at the budget, and booked: nobody takes it as spare."""
        with self._lock:
            self._made_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self._made_bytes -= nbytes

    def check_host(self, nbytes: int, purpose: str) -> None:
        """Raises BudgetError when `nbytes` more in host memory are over the budget. To be asked before allocating."""
        if self.host_budget_bytes is not None and not self.has_room(nbytes):
            held = self.held_bytes(Tier.HOST)
            raise BudgetError(
                f"{purpose} need {format_bytes(nbytes)} of host memory beside {format_bytes(held)} that are held;"
                f" host_memory allows {format_bytes(self.host_budget_bytes)}; raise it to at least"
                f" {format_bytes(held + nbytes, at_least=True)}, or train fewer parameters"
            )

    def add(self, tier: Tier, purpose: str, nbytes: int) -> None:
        """Books `nbytes` more (less, when negative)."""
        with self._lock:
            self._held[tier, purpose] += nbytes
            self._peak[tier, purpose] = max(self._peak[tier, purpose], self._held[tier, purpose])
            self._tier_held[tier] += nbytes
            self._tier_peak[tier] = max(self._tier_peak[tier], self._tier_held[tier])
            if tier is Tier.DEVICE and purpose in self._counted_to_budget:
                self._budgeted_held += nbytes
                self._budgeted_peak = max(self._budgeted_peak, self._budgeted_held)

    def add_locked(self, nbytes: int, *, refused: bool) -> None:
        """Books host memory that is page-locked, or that the system refused to lock, beside `add`."""
        with self._lock:
            if refused:
                self._refused_bytes += nbytes
            else:
                self._locked_bytes += nbytes

    def locked(self) -> dict[str, int]:
        """Host memory that is page-locked now, and what should be and was refused, as the stats name them."""
        with self._lock:
            return {"host_locked_bytes": self._locked_bytes, "host_refused_bytes": self._refused_bytes}

    def held_bytes(self, tier: Tier, purpose: str | None = None) -> int:
        """Bytes held now, for one purpose or in all."""
        with self._lock:
            return self._tier_held[tier] if purpose is None else self._held[tier, purpose]

    def peak_bytes(self, tier: Tier, purpose: str | None = None) -> int:
        """The most bytes held at once since the last `reset_peaks`, for one purpose or in all."""
        with self._lock:
            return self._tier_peak[tier] if purpose is None else self._peak[tier, purpose]

    @property
    def budgeted_peak_bytes(self) -> int:
        """The most bytes at once of the purposes that the device budget holds."""
        with self._lock:
            return self._budgeted_peak

    def reset_peaks(self) -> None:
        """Peaks start anew from what is held now."""
        with self._lock:
            self._tier_peak = Counter(self._tier_held)
            self._peak = Counter(self._held)
            self._budgeted_peak = self._budgeted_held

    def forked(self) -> None:
        """In a process that was forked: a thread that is not here may have held the lock."""
        self._lock = threading.Lock()

    def by_purpose(self) -> dict[tuple[Tier, str], int]:
        """Bytes held now, for each tier and purpose that holds any."""
        with self._lock:
            return {key: nbytes for key, nbytes in self._held.items() if nbytes}
