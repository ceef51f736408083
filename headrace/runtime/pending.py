"""How is memory read that an update under way elsewhere will still write? Whoever needs it waits for its `Pending`.

An optimizer that updates parameters during the next pass, and the model that the parameters belong to, know each other
through this file alone. A parameter that travels with others names its `Unit`. The optimizer leaves a `Pending` in it,
and the unit's owner waits for it before the parameters are copied, handed out or written.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakSet

import torch

from headrace.errors import StateError

OWNER = "_headrace_owner"  # attribute of a managed parameter: its owner (a ManagedParam)


class OtherRanks(Protocol):
    """The other ranks of a node, which perform parts of the same update."""

    def post(self) -> None:
        """Called when this rank has performed its part."""

    def have_come(self) -> bool:
        """Whether all ranks have performed their parts."""

    def wait(self) -> None:
        """Waits until all ranks have performed their parts. Raises RankError."""


class Pending:
    """An update of `parameters` that was submitted as `job`. If it fails, the first to wait for it gets the error.

    `others` are the ranks that perform parts of the update; `job` posts to them when it has performed its own part.
    """

    _written: Collection[int] = ()  # ids of the parameters, so that this keeps no model alive

    def __init__(
        self,
        job: "Future[None]",
        on_failure: Callable[[], None],
        others: OtherRanks | None = None,
        parameters: Iterable[torch.Tensor] = (),
    ) -> None:
        self._job = job
        self._on_failure = on_failure
        self._others = others
        self._written = set(map(id, parameters))
        self._told = False

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        over = self._job.done() and (self._told or self._job.exception() is None)
        return over and (self._told or self._others is None or self._others.have_come())

    def settle(self) -> None:
        """Blocks until the update has ended. Does not raise its error: `wait` does."""
        self._job.exception()

    def writes(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the update writes any of these parameters."""
        return not set(map(id, parameters)).isdisjoint(self._written)

    def settle_on_all_ranks(self) -> None:
        """As `settle`, and blocks until the other ranks have ended it, too, unless it failed here. Raises RankError."""
        if self._job.exception() is None and self._others is not None:
            self._others.wait()

    def wait(self) -> None:
        """Blocks until the update has ended on all ranks. Raises its error to the first caller; RankError."""
        error = self._job.exception()
        if error is not None and not self._told:
            self._told = True
            self._on_failure()
            raise error
        if self._others is not None and not self._told:
            self._others.wait()


class LostUpdate(Pending):
    """An update that was under way when this process was forked: it ends in the parent, and never here."""

    def __init__(self, what: str) -> None:
        self._what = what

    def done(self) -> bool:
        """False: it never ends here."""
        return False

    def settle(self) -> None:
        """Does nothing: there is no end to wait for."""

    def wait(self) -> None:
        """Raises StateError."""
        raise StateError(
            f"{self._what} was being updated when this process was forked, and is half written here; call"
            " synchronize() on the handle, or on the optimizer, before the fork"
        )


class Watcher(Protocol):
    """Is notified of gradients that arrive in host memory during a backward.

    `begins_updates`: whether `complete` may begin updates of weights.
    """

    begins_updates: bool

    def complete(
        self, unit: "Unit", gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]
    ) -> Sequence[Any]:
        """Called when no more gradients of `unit` come in this backward. Never blocks.

        `gradients` has for each parameter what its `grad` will be; they are complete in host memory when `arrived`
        returns. Returns the parameters whose update the watcher has begun already, without waiting for a step.
        """

    def delivered(self, parameters: Mapping[Any, bool]) -> None:
        """Called when a backward is over: its gradients are the `grad` of these parameters, and their hooks have run.

        `parameters` has True for each that was passed to `complete` in this backward.
        """

    def abandoned(self) -> None:
        """Called when a backward has raised after `complete` was called: its gradients are gone."""


class StateHolder(Protocol):
    """An optimizer of an offloaded model, as the model sees it: its state in host memory sleeps with the model."""

    def sleep(self, directory: str | os.PathLike[str]) -> int:
        """Moves the state from host memory to files in `directory`, and returns the bytes that stay. Raises DiskError,
        and has moved nothing then.
        """

    def wake(self) -> None:
        """Moves the state back. Raises BudgetError if host memory has no room, and DiskError."""


class Manager(Protocol):
    """What manages one offloaded model's parameters."""

    def hold_state(self, holder: StateHolder, nbytes: Callable[[], int]) -> None:
        """Has an optimizer's state sleep with the model, and counts its bytes if the host budget is shared.

        `nbytes`: gives the bytes of host memory that the state takes or will take, in place of what it gave before.
        Blocks move to disk where there is no room for them. Raises BudgetError.
        """

    def lend_device_memory(self, nbytes: int) -> torch.Tensor:
        """Device memory for updates, a flat uint8 tensor, off the budget of weights for as long as it is referred to.

        It loses its bytes when the model is let go of or sleeps. Not to be called during a pass. Raises BudgetError.
        """


class Unit(Protocol):
    """Parameters that travel together, and are updated together."""

    updates: list[Pending]
    watchers: "WeakSet[Watcher]"
    order: int  # a pass needs the parameters of units with smaller numbers earlier
    manager: Manager  # the same for all units of one offloaded model
    device: torch.device  # where the model computes
    common: Any  # the homes that a node's ranks share (weights/movement/common.py); None: they are this process's own

    def wait_for_updates(self) -> None:
        """Blocks until no optimizer writes the parameters any more."""

    def wait_for_reads(self) -> None:
        """Blocks until no copy reads the parameters any more."""

    def may_be_updated_in_files(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether an update of all of these at once may write to the files that they rest in, not to their memory."""

    def updated_in_files(self) -> None:
        """Called when an update has written the parameters' new values to the files that they rest in."""


def watch(watcher: Watcher, parameters: Iterable[torch.Tensor]) -> None:
    """From now on, notifies `watcher` of the gradients of these parameters, as far as they are managed."""
    units = {id(unit): unit for parameter in parameters if (unit := unit_of(parameter)) is not None}
    for unit in units.values():
        unit.watchers.add(watcher)


def unit_of(parameter: torch.Tensor) -> Unit | None:
    """The unit that a parameter travels in; None for one that is not managed."""
    owner = parameter.__dict__.get(OWNER)
    return None if owner is None else owner.unit


def name_of(parameter: torch.Tensor) -> str:
    """The name of a managed parameter in its model."""
    return str(parameter.__dict__[OWNER].name)
