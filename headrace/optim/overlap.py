"""How does an update run beside the next pass? On a thread of its own, block by block, in the order of their next use.

Each block gets a `Pending`; code that reads the block's parameters waits for it. See docs/design/optimizers.md.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from headrace.errors import StateError
from headrace.optim.devices import Member
from headrace.runtime.autograd import without_overrides
from headrace.runtime.pending import LostUpdate, OtherRanks, Pending, Unit, unit_of
from headrace.runtime.threads import OneThread, mark_headrace_thread


class Updater:
    """The thread that performs one optimizer's updates, one block after the other."""

    def __init__(self) -> None:
        self._under_way: list[Pending] = []
        self._start()

    def submit(
        self,
        unit: Unit,
        members: Sequence[Member],
        perform: Callable[[Sequence[Member]], None],
        arrived: Callable[[], None] | None = None,
        others: OtherRanks | None = None,
    ) -> Pending:
        """Has the thread update parameters of `unit`, once `arrived` has returned there. Never blocks.

        Updates of these parameters that were submitted before, by any optimizer, come first. `others` perform parts of
        the update. An update lets go of the gradients at its end; if it fails, they become `.grad` again.
        """
        self._under_way = [pending for pending in self._under_way if not pending.done()]
        held = list(members)
        parameters = [member.parameter for member in members]
        before = [pending for pending in unit.updates if pending.writes(parameters)]
        work = [perform]  # refers to the optimizer, which may go when its last update is done

        def job() -> None:
            if arrived is not None:
                arrived()
            while before:
                before.pop().settle_on_all_ranks()
            unit.wait_for_reads()
            work.pop()(held)
            held.clear()  # before anyone is told: the next backward wants the gradients' memory back
            if others is not None:
                others.post()

        pending = Pending(self.run(job, unit.device), lambda: _give_back(held), others, parameters)
        unit.updates.append(pending)
        self._under_way.append(pending)
        return pending

    def run(self, job: Callable[[], None], device: torch.device | None = None) -> "Future[None]":
        """Calls `job` on the thread, after the jobs submitted before. Never blocks. `device`: of the job's events."""

        def quietly() -> None:
            mark_headrace_thread(device)
            with torch.no_grad(), without_overrides():
                job()

        self._look_for_fork()
        return self._thread.submit(quietly)

    def drain(self) -> None:
        """Waits until every submitted job has ended. Raises no errors: they are for whoever waits for the updates."""
        self.run(lambda: None).exception()

    def drain_writers(self, parameters: Iterable[torch.Tensor]) -> None:
        """Waits until updates of any of these have ended. Raises no errors: they are for whoever waits for these."""
        for pending in [pending for pending in self._under_way if pending.writes(parameters)]:
            pending.settle()

    def synchronize(self) -> None:
        """Waits for every update. Raises one error if updates failed and nobody was told of it."""
        self._look_for_fork()
        failures: list[Exception] = []
        for pending in list(self._under_way):
            try:
                pending.wait()
            except Exception as error:
                failures.append(error)
        self._under_way = [pending for pending in self._under_way if not pending.done()]
        if failures:
            worst = next((error for error in failures if isinstance(error, StateError)), failures[0])
            if len(failures) > 1:
                worst.add_note(f"the updates of {len(failures)} blocks failed; this is one of the errors")
            raise worst

    def _start(self) -> None:
        self._process = os.getpid()
        self._thread = OneThread("headrace-update")
        weakref.finalize(self, self._thread.shutdown, wait=False)

    def _look_for_fork(self) -> None:
        """In a forked child, starts a new thread: the parent's does not exist there, and its updates are lost."""
        if self._process != os.getpid():
            if not all(pending.done() for pending in self._under_way):
                self._under_way = [LostUpdate("what this optimizer updates")]
            self._start()


def by_unit(members: Iterable[Member]) -> tuple[list[tuple[Unit, list[Member]]], list[Member]]:
    """Members that travel in units, by unit, in the order of the units' next use; and the members that do not.

    Units with gradients that somebody else holds come first: `step()` waits for them.
    """
    units: dict[int, tuple[Unit, list[Member]]] = {}
    alone = []
    for member in members:
        unit = unit_of(member.parameter)
        if unit is None:
            alone.append(member)
        else:
            units.setdefault(id(unit), (unit, []))[1].append(member)

    def turn(entry: tuple[Unit, list[Member]]) -> tuple[bool, int]:
        return not any(member.shared for member in entry[1]), entry[0].order

    return sorted(units.values(), key=turn), alone


def _give_back(members: list[Member]) -> None:
    """After a failure, gives parameters that were not updated their gradients back, for another step."""
    for member in members:
        if not member.updated and member.parameter.grad is None:
            member.parameter.grad = member.gradient
    members.clear()
