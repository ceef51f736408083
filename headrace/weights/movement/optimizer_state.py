"""What does a model do with its optimizers' state in host memory? It counts it in a shared budget, and has it sleep."""

import contextlib
import os
from collections.abc import Callable
from weakref import WeakKeyDictionary

from headrace.errors import BudgetError
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.pending import StateHolder

PURPOSE = "optimizer states"


class _Held:
    """The bytes of one optimizer: they are booked as long as this lives."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class OptimizerStates:
    """The states of one model's optimizers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts = ledger.share is not None and ledger.host_budget_bytes is not None
        self._held: WeakKeyDictionary[StateHolder, _Held] = WeakKeyDictionary()

    def hold(self, holder: StateHolder, nbytes: Callable[[], int], make_room: Callable[[int], None]) -> None:
        """See `runtime.pending.Manager.hold_state`. `make_room`: moves the model's own blocks to disk, if they may go.

        Without a shared budget, `host_memory` is for weights, gradients and activations alone, and nothing is booked.
        """
        before_bytes = self._held.setdefault(holder, _Held(0)).nbytes
        if self._counts:
            more_bytes = nbytes() - before_bytes
            if more_bytes > 0:
                make_room(more_bytes)
                self._ledger.check_host(more_bytes, PURPOSE)
            self._book(holder, before_bytes + more_bytes)

    def _book(self, holder: StateHolder, nbytes: int) -> None:
        self._held[holder] = now = _Held(nbytes)  # first, as this ends the booking before
        self._ledger.book(now, Tier.HOST, PURPOSE, nbytes)

    def sleep(self, directory: str | os.PathLike[str]) -> None:
        """Moves all states from host memory to files in `directory`. Raises DiskError."""
        for holder in list(self._held):
            staying_bytes = holder.sleep(directory)
            if self._counts:
                self._book(holder, staying_bytes)

    def wake(self) -> None:
        """Moves those states back for which host memory has room. The others follow with their optimizer's next step,
        which raises an error if there is no room then either.
        """
        for holder in list(self._held):
            with contextlib.suppress(BudgetError):
                holder.wake()
