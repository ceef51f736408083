"""May parameters be updated while backward still runs? Only where nothing happens to gradients before the step.

An update in backward uses gradients as they arrive, with the settings of that moment. Clipping, a GradScaler, a second
micro-batch and a learning rate set before `step()` all come later. So nothing is updated early until one whole step
has been watched and has done none of this; each later step is checked for it.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.errors import StateError
from headrace.optim.norms import SeenGradient
from headrace.runtime.autograd import without_overrides
from headrace.runtime.grad_scaler import grad_scaler_leaves_traces
from headrace.runtime.pending import Unit, watch


class EarlyUpdates:
    """What one optimizer has updated since its last step, and whether it may update early.

    `begin` (starts the update of parameters of a unit, given their gradients) and `settings` (returns those of all
    groups) are methods of the optimizer, held weakly: an optimizer that was dropped updates nothing any more.
    """

    begins_updates = True

    def __init__(self, begin: Callable[..., Sequence[Any]], settings: Callable[[], list[dict[str, Any]]]) -> None:
        self._begin = weakref.WeakMethod(begin)
        self._settings_now = weakref.WeakMethod(settings)
        self._proven = False  # whether one step was watched, and did nothing to gradients
        self._watched: dict[Any, SeenGradient] = {}  # the gradients, as they were when backward ended
        self._versions: dict[Any, int] = {}  # of the weights, when backward ended; updates under way still raise theirs
        self._repeated = False
        self._abandoned = False  # whether a backward raised after updates in it
        self._loaded = False  # whether a state was loaded after early updates and before their step
        self._own: frozenset[Any] = frozenset()  # the parameters of the optimizer
        self._used: list[dict[str, Any]] | None = None  # the settings with which this backward updates
        self.updated: dict[Any, None] = {}  # parameters updated since the last step
        self._marks: dict[Any, tuple[int, int]] = {}  # of all parameters ever updated; they show later writes
        grad_scaler_leaves_traces.use(self)

    # as a Watcher -----------------------------------------------------------------------------------------------------
    def complete(self, unit: Unit, gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]) -> Sequence[Any]:
        """Called in backward when all gradients of a unit are here, or on their way: begins its update."""
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
        """Called when backward is over and the gradients are in `.grad`: watches them from now on."""
        self._look_for_failure()
        self._look_for_load()
        for parameter in self._own.intersection(parameters):  # a block may have parameters of another optimizer, too
            if parameter.grad is None:  # a hook took the gradient: nothing was updated with it, nor will be
                continue
            self._repeated = self._repeated or parameter in self._watched
            self._watched[parameter] = SeenGradient(parameter.grad)
            self._versions[parameter] = _mark(parameter)[0]
        if self._used is None:
            self._used = self._settings()

    def abandoned(self) -> None:
        """Called when backward raised; the updates in it are not undone."""
        self._abandoned = bool(self.updated)

    # on the thread of updates -----------------------------------------------------------------------------------------
    def performed(self, parameters: Iterable[Any]) -> None:
        """Called when the update of these parameters has been written."""
        for parameter in parameters:
            self._marks[parameter] = _mark(parameter)

    # in step() --------------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Called when a step begins. Raises StateError if something happened that early updates did not see."""
        self._look_for_failure()
        if self._loaded:
            self._refuse("a state was loaded between backward and step()")
        if self._repeated:
            self._refuse("backward ran again before step(): gradients accumulate, or a GradScaler skipped a step")
        with without_overrides():  # else `.grad` would wait for the updates
            changed = any(not seen.is_still(parameter.grad) for parameter, seen in self._watched.items())
        if changed:
            self._refuse("gradients were changed after backward (clipping, GradScaler.unscale_, or by hand)")
        if any(_mark(one)[0] != version for one, version in self._versions.items() if one not in self.updated):
            self._refuse("weights were written between backward and step(), by hand or by another optimizer")
        if self._used is not None and self._used != self._settings():
            self._refuse("settings of param groups (such as lr) were changed between backward and step()")

    def end_step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Called when a step is over; `parameters` are watched from now on."""
        self._proven = self._proven or bool(self._watched)
        self._forget()
        self._own = frozenset(parameters)
        watch(self, self._own)

    def load(self) -> None:
        """Called when a state was loaded: the loop begins anew with the next backward."""
        self._proven = False
        self._abandoned = False  # what it did to the weights does not matter if they were loaded too
        self._loaded = bool(self.updated)
        if not self._loaded:
            self._forget()

    def _look_for_failure(self) -> None:
        if self._abandoned:
            self._refuse("a backward raised, and the optimizer goes on without its gradients")

    def _look_for_load(self) -> None:
        """Called in backward: updates from before a load do not matter if the weights were loaded too, else raises."""
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
    """A mark that differs after a write or another `data`. Taking it waits for no update."""
    with without_overrides():
        return parameter._version, parameter.data_ptr()
