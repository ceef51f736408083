"""How is memory read that an update, under way elsewhere, is still to write? Whoever needs it waits for its `Pending`.

An optimizer that updates parameters beside the next pass, and the model that the parameters belong to, know each other
by this page alone: a parameter that travels with others names its `Unit`; the optimizer leaves a `Pending` there; and
the unit's owner waits for it before the parameters are copied, handed out or written.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol
from weakref import WeakSet

import torch

from headrace.errors import StateError

__all__ = ["OWNER", "LostUpdate", "OtherRanks", "Pending", "Unit", "Watcher", "name_of", "unit_of", "watch"]

OWNER = "_headrace_owner"  # attribute of a managed parameter: its owner has a `name` for it, and the `unit` it is in


class OtherRanks(Protocol):
    """The other ranks of a node, which perform parts of the same update."""

    def post(self) -> None:
        """This rank has performed its part."""

    def have_come(self) -> bool:
        """Whether all ranks have performed theirs."""

    def wait(self) -> None:
        """Until they have. Raises RankError."""


class Pending:
    """An update that was submitted. What failed in it is raised once, by whoever waits first.

    `others`: perform parts of it; `job` posts when it has performed its own. It writes `parameters`.
    """

    _written: Collection[int] = ()  # by id: nothing here keeps a model

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
        """Whether waiting would neither take any time nor raise."""
        over = self._job.done() and (self._told or self._job.exception() is None)
        return over and (self._told or self._others is None or self._others.have_come())

    def settle(self) -> None:
        """The host waits until it has ended; what failed in it is for whoever waits."""
        self._job.exception()

    def writes(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether it is an update of any of these."""
        return not set(map(id, parameters)).isdisjoint(self._written)

    def settle_on_all_ranks(self) -> None:
        """As `settle`; an update that has not failed here has ended on the other ranks, too. Raises RankError."""
        if self._job.exception() is None and self._others is not None:
            self._others.wait()

    def wait(self) -> None:
        """The host waits for the update."""
        error = self._job.exception()
        if error is not None and not self._told:
            self._told = True
            self._on_failure()
            raise error
        if self._others is not None and not self._told:
            self._others.wait()


class LostUpdate(Pending):
    """An update that was under way when this process was forked: it ends in the other one, and never here."""

    def __init__(self, what: str) -> None:
        self._what = what

    def done(self) -> bool:
        """Never."""
        return False

    def settle(self) -> None:
        """Nothing: there is no end to wait for."""

    def wait(self) -> None:
        """Raises StateError."""
        raise StateError(
            f"{self._what} was being updated when this process was forked, and is half written here; call"
            " synchronize() on the handle, or on the optimizer, before the fork"
        )


class Watcher(Protocol):
    """Who is told of gradients on their way home."""

    def complete(
        self, unit: "Unit", gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]
    ) -> Sequence[Any]:
        """No more gradients of `unit` come in this backward. Never blocks.

        `gradients`: for each parameter, what its `grad` will be; complete in host memory when `arrived` returns.
        Returns the parameters whose update the watcher has begun, without waiting for a step.
        """

    def delivered(self, parameters: Mapping[Any, bool]) -> None:
        """Backward is over, the gradients that it brought are the `grad` of these parameters, and their hooks have run.

        True for a parameter that `complete` was told of in this backward.
        """

    def abandoned(self) -> None:
        """A backward raised after `complete` was called: its gradients are gone."""


class Unit(Protocol):
    """Parameters that travel together, and are updated together."""

    updates: list[Pending]
    watchers: "WeakSet[Watcher]"
    order: int  # the smaller, the earlier a pass needs the parameters
    manager: object  # the same for all units of one offloaded model
    common: Any  # the homes of that model on all ranks of a node (weights/movement/common.py); None: of this process

    def wait_for_updates(self) -> None:
        """The host waits until no optimizer writes the parameters any more."""

    def wait_for_reads(self) -> None:
        """The host waits until no copy reads the parameters."""

    def may_be_updated_in_files(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether whoever updates all of these at once may write the files that they rest in, past their memory."""

    def updated_in_files(self) -> None:
        """That was done: the files have what the parameters hold."""


def watch(watcher: Watcher, parameters: Iterable[torch.Tensor]) -> None:
    """`watcher` is told of the gradients of these parameters, as far as somebody manages them."""
    units = {id(unit): unit for parameter in parameters if (unit := unit_of(parameter)) is not None}
    for unit in units.values():
        unit.watchers.add(watcher)


def unit_of(parameter: torch.Tensor) -> Unit | None:
    """What a parameter travels with; None for one that nobody manages."""
    owner = parameter.__dict__.get(OWNER)
    return None if owner is None else owner.unit


def name_of(parameter: torch.Tensor) -> str:
    """The name of a managed parameter in its model."""
    return str(parameter.__dict__[OWNER].name)
