"""May parameters be updated while backward still runs? Only where nothing happens to gradients before the step.

An update in backward takes gradients as they land, with the settings of that moment. Clipping, a GradScaler, a second
micro-batch and a learning rate set before `step()` all come later. So the first steps are watched: nothing is updated
early before one whole step has shown that the loop does none of this, and each later step is checked for it.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.errors import StateError
from headrace.optim.norms import SeenGradient
from headrace.runtime.autograd import without_overrides
from headrace.runtime.grad_scaler import make_grad_scaler_leave_traces
from headrace.runtime.pending import Unit, watch

__all__ = ["EarlyUpdates"]


class EarlyUpdates:
    """What one optimizer updated since its last step, and whether it may.

    `begin` (the update of parameters of a unit, given their gradients) and `settings` (of all param groups, as they are
    now) are methods of the optimizer. It is not kept alive by this: one that was dropped updates nothing any more.
    """

    def __init__(self, begin: Callable[..., Sequence[Any]], settings: Callable[[], list[dict[str, Any]]]) -> None:
        self._begin = weakref.WeakMethod(begin)
        self._settings_now = weakref.WeakMethod(settings)
        self._proven = False  # one step was watched, and did nothing to gradients
        self._watched: dict[Any, SeenGradient] = {}  # gradients, as they were when backward ended
        self._versions: dict[Any, int] = {}  # of the weights, at that moment; updates under way go on counting theirs
        self._repeated = False
        self._abandoned = False  # a backward raised after updates in it
        self._loaded = False  # a state was loaded after updates in a backward, whose step has not come
        self._own: frozenset[Any] = frozenset()  # the parameters of the optimizer
        self._used: list[dict[str, Any]] | None = None  # the settings of updates in this backward
        self.updated: dict[Any, None] = {}  # parameters updated since the last step
        self._marks: dict[Any, tuple[int, int]] = {}  # of all that were ever updated: tells of writes since
        make_grad_scaler_leave_traces(self)

    # as a Watcher -----------------------------------------------------------------------------------------------------
    def complete(self, unit: Unit, gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]) -> Sequence[Any]:
        """All gradients of a unit are here, or on their way."""
        self._look_for_failure()
        self._look_for_load()
        begin = self._begin()
        if not self._proven or begin is None:
            return ()
        if self._watched:
            self._refuse("backward ran again before step(): gradients accumulate, or a GradScaler skipped a step")
        if self._used is None:
            self._used = self._settings()
        return begin(unit, gradients, arrived, self.updated)

    def delivered(self, parameters: Mapping[Any, bool]) -> None:
        """Backward is over, and the gradients are the parameters'."""
        self._look_for_failure()
        self._look_for_load()
        for parameter in self._own.intersection(parameters):  # blocks may have another optimizer's, too
            if parameter.grad is None:  # a hook took it: nothing was updated with it, nor will be
                continue
            self._repeated = self._repeated or parameter in self._watched
            self._watched[parameter] = SeenGradient(parameter.grad)
            self._versions[parameter] = _mark(parameter)[0]
        if self._used is None:
            self._used = self._settings()

    def abandoned(self) -> None:
        """Backward raised, and what was updated in it stays so."""
        self._abandoned = bool(self.updated)

    # on the thread of updates -----------------------------------------------------------------------------------------
    def performed(self, parameters: Iterable[Any]) -> None:
        """Their update has been written."""
        for parameter in parameters:
            self._marks[parameter] = _mark(parameter)

    # in step() --------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """A step begins. Raises StateError when something happened to gradients that an early update does not know."""
        self._look_for_failure()
        if self._loaded:
            self._refuse("a state was loaded between backward and step()")
        if self._repeated:
            self._refuse("backward ran again before step(): gradients accumulate, or a GradScaler skipped a step")
        with without_overrides():  # which would wait for the updates
            changed = any(not seen.is_still(parameter.grad) for parameter, seen in self._watched.items())
        if changed:
            self._refuse("gradients were changed after backward (clipping, GradScaler.unscale_, or by hand)")
        if any(_mark(one)[0] != version for one, version in self._versions.items() if one not in self.updated):
            self._refuse("weights were written between backward and step(), by hand or by another optimizer")
        if self._used is not None and self._used != self._settings():
            self._refuse("settings of param groups (such as lr) were changed between backward and step()")

    def end_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """A step is over; `parameters` are watched from now on."""
        self._proven = self._proven or bool(self._watched)
        self._forget()
        self._own = frozenset(parameters)
        watch(self, self._own)

    def load(self) -> None:
        """A state was loaded, and the loop begins anew with the next backward."""
        self._proven = False
        self._abandoned = False  # what it did to weights is of no concern, if these were loaded too
        self._loaded = bool(self.updated)
        if not self._loaded:
            self._forget()

    def _look_for_failure(self) -> None:
        if self._abandoned:
            self._refuse("a backward raised, and the optimizer goes on without its gradients")

    def _look_for_load(self) -> None:
        """A backward: what was updated in the one before a load is of no concern, if these weights were loaded too."""
        if not self._loaded:
            return
        kept = sum(self._marks.get(parameter) == _mark(parameter) for parameter in self.updated)
        if kept:
            self._refuse(
                f"a state was loaded between backward and step(), but not the weights of {kept} parameters (by"
                " load_state_dict() or copy_(): what is written through .data or NumPy is not noticed)"
            )
        self._forget()

    def _refuse(self, reason: str) -> None:
        late = f"; {len(self.updated)} parameters were updated already" if self.updated else "; nothing was updated"
        self._proven = False
        self._forget()
        raise StateError(
            f'{reason}, which overlap="backward" cannot take into account: it updates parameters while backward runs'
            f'{late}; use overlap="forward", which is exact with all of this'
        )

    def _settings(self) -> list[dict[str, Any]]:
        settings = self._settings_now()
        return [] if settings is None else settings()

    def _forget(self) -> None:
        self._watched.clear()
        self._versions.clear()
        self.updated.clear()
        self._used = None
        self._repeated = False
        self._loaded = self._abandoned = False


def _mark(parameter: Any) -> tuple[int, int]:
    """Differs after a write or another `data`. Waits for no update."""
    with without_overrides():
        return parameter._version, parameter.data_ptr()
