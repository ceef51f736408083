"""Who waits while optimizers write homes? All that look at homes: torch functions that take one, and the handle."""

import contextlib
import weakref
from collections.abc import Callable, Sequence

from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block
from headrace.weights.passes.parameter_access import waiting_for_homes

__all__ = ["Updates"]


class Updates:
    """The updates under way of one model's blocks."""

    def __init__(self, blocks: Callable[[], Sequence[Block]]) -> None:
        self._blocks = blocks
        self._guard = contextlib.ExitStack()  # while homes are being updated
        self._guarded = False
        weakref.finalize(self, self._guard.close)

    def changed(self) -> None:
        """Updates began or ended. While any is under way, a torch function that takes a home waits for its update."""
        pending = False
        for block in self._blocks():
            if block.updates and block.being_updated:
                pending = True
        if pending and not self._guarded:
            self._guard.enter_context(waiting_for_homes(ManagedParam.wait_for_updates))
        elif self._guarded and not pending:
            self._guard.close()
        self._guarded = pending

    def wait(self) -> None:
        """The host waits until no optimizer writes any home."""
        for block in self._blocks():
            block.wait_for_updates()
        self.changed()
