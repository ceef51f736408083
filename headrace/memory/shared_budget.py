"""How do several models share one budget? Who computes gets the room, and who was used longest ago gives way first."""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol, Self

import torch

from headrace.config import Size, format_bytes, parse_budget
from headrace.errors import StateError
from headrace.runtime.fibers import calling_thread


class Member(Protocol):
    """An offloaded model that shares a budget. Another one's pass calls it, and only while it computes nowhere else."""

    name: str

    @property
    def device_bytes(self) -> int:
        """The bytes that it holds on the device now: weights, buffers of modules, and what it lends to optimizers."""

    @property
    def movable_host_bytes(self) -> int:
        """The bytes of its host memory that can come free."""

    @property
    def computes_on(self) -> int | None:
        """The thread of its pass under way, or about to begin; None: there is none."""

    def give_way(self, nbytes: int) -> None:
        """Frees blocks on the device, those that it needs last first, until `nbytes` are free or no more can go."""

    def sleep(self) -> None:
        """Frees all that it holds on the device, but for what is in use."""

    def give_way_on_host(self, nbytes: int) -> None:
        """Moves blocks to disk until the budget has room for `nbytes` in host memory, or no more can go."""


class HostCount(Protocol):
    """What counts the host memory of a model: its ledger."""

    @property
    def host_held_bytes(self) -> int:
        """The bytes that it holds now."""


class SharedBudget:
    """What `headrace.budget()` returns: the budget of all models that are offloaded inside `with` it."""

    def __init__(self, device_bytes: int | None, host_bytes: int | None) -> None:
        self.device_bytes, self.host_bytes = device_bytes, host_bytes
        self._shares: list[weakref.ref[Share]] = []  # of the models, the one that was used longest ago first
        self.device: torch.device | None = None  # on which all of them compute
        self._peak_bytes = self._host_peak_bytes = 0
        self.gives_way_on_host = False  # whether models make room on the host for another one, and ask for none

    def __enter__(self) -> Self:
        _around.set((*_around.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _around.set(_around.get()[:-1])

    def __repr__(self) -> str:
        limits = {"device_memory": self.device_bytes, "host_memory": self.host_bytes}
        given = [f"{name}={format_bytes(nbytes)!r}" for name, nbytes in limits.items() if nbytes is not None]
        names = ", ".join(member.name for member in self._members()) or "nothing yet"
        return f"<budget({', '.join(given)}), shared by {names}>"

    @property
    def device_peak_bytes(self) -> int:
        """The most bytes on the device that the models have held at once."""
        self._note_peaks()
        return self._peak_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes in host memory that the models have held at once, as seen when they took device memory: there
        may have been more in between.
        """
        self._note_peaks()
        return self._host_peak_bytes

    @property
    def device_held_bytes(self) -> int:
        """The bytes on the device that the models hold now."""
        return sum(member.device_bytes for member in self._members())

    @property
    def host_left_bytes(self) -> int | None:
        """The bytes in host memory that a further model may have: what the others leave, or can leave by moving blocks
        to disk. None: no limit.
        """
        if self.host_bytes is None:
            return None
        movable_bytes = sum(member.movable_host_bytes for member in self._members())
        return max(0, self.host_bytes - self.host_held_bytes + movable_bytes)

    @property
    def host_held_bytes(self) -> int:
        """The bytes in host memory that the models hold now."""
        return sum(share.host_held_bytes for share in self._alive())

    def _alive(self) -> "list[Share]":
        """Those of the models, and of one that is being offloaded."""
        return [share for one in self._shares if (share := one()) is not None]

    def _members(self) -> list[Member]:
        """The models that share the budget, the one that was used longest ago first."""
        return [member for share in self._alive() if (member := share.member()) is not None]

    def _note_peaks(self) -> None:
        """Called when a model has taken memory."""
        self._peak_bytes = max(self._peak_bytes, self.device_held_bytes)
        self._host_peak_bytes = max(self._host_peak_bytes, self.host_held_bytes)


class Share:
    """One model's part in a shared budget, until `leave`.

    Raises ValueError if the others compute on a device other than `device`.
    """

    def __init__(self, budget: SharedBudget, device: torch.device, count: HostCount) -> None:
        if device != (budget.device or device):
            raise ValueError(
                f"a budget is for one device, {budget.device} here, and not for {device}; give each device its own"
            )
        budget.device = device
        budget._shares.append(weakref.ref(self))
        self.budget, self._count = budget, weakref.ref(count)
        self.member: Callable[[], Member | None] = lambda: None  # a weak reference to the model, once it is offloaded
        self.may_claim = False  # whether others give way: only during a pass of this model

    @property
    def host_held_bytes(self) -> int:
        """The bytes that the model holds in host memory now."""
        count = self._count()
        return 0 if count is None else count.host_held_bytes

    def check_turn(self) -> None:
        """Called when a pass of the model has a thread, and before it begins. Raises StateError if another one computes
        on another thread. Of two that begin at once, both may be refused.
        """
        for other in self._others():
            if other.computes_on not in (None, calling_thread()):
                raise StateError(
                    f"{other.name}, with which this model shares a budget, computes on thread {other.computes_on}, and"
                    f" thread {calling_thread()} called this one; let them take turns, or offload this one outside of"
                    " headrace.budget()"
                )

    def leave(self) -> None:
        """The model shares the budget no more."""
        self.budget._shares = [one for one in self.budget._shares if one() not in (None, self)]

    def begin(self) -> None:
        """Called when a pass of the model begins, or goes on with its backward after others have computed."""
        self.budget._shares.sort(key=lambda one: one() is self)  # it was used last; the others keep their order
        self.may_claim = True

    def end(self) -> None:
        """Called when the pass ends: what is loaded from here on finds room, or waits."""
        self.may_claim = False

    def note_peaks(self) -> None:
        """Called when the model has taken device memory."""
        self.budget._note_peaks()

    @property
    def others_bytes(self) -> int:
        """The bytes on the device that the others hold now."""
        return sum(other.device_bytes for other in self._others())

    @property
    def others_host_bytes(self) -> int:
        """The bytes in host memory that the others hold now."""
        return self.budget.host_held_bytes - self.host_held_bytes

    def claim(self, most_bytes: int) -> None:
        """The others give way until they hold `most_bytes` on the device, or no more can go. First blocks go, then
        what else they hold, and each time first those of the model that was used longest ago.
        """
        for other in self._others():
            if (too_many := self.others_bytes - most_bytes) > 0:
                other.give_way(too_many)
        for other in self._others():
            if self.others_bytes > most_bytes and other.device_bytes:
                other.sleep()

    def claim_host(self, nbytes: int) -> None:
        """The others that have a disk move blocks there until there is room for `nbytes`, or no more can go."""
        if self.budget.gives_way_on_host:
            return
        self.budget.gives_way_on_host = True
        try:
            for other in self._others():
                if other.computes_on is None:
                    other.give_way_on_host(nbytes)
        finally:
            self.budget.gives_way_on_host = False

    def _others(self) -> list[Member]:
        own = self.member()
        return [other for other in self.budget._members() if other is not own]


_around: ContextVar[tuple[SharedBudget, ...]] = ContextVar("headrace_budgets", default=())  # the innermost last


def current_budget() -> SharedBudget | None:
    """The budget of the `with` statement around the caller; None: there is none."""
    return next(reversed(_around.get()), None)


def budget(*, device_memory: Size | None = None, host_memory: Size | None = None) -> SharedBudget:
    """One budget for several models, which take turns on one device.

        with headrace.budget(device_memory="20GiB", host_memory="100GiB"):
            actor = headrace.offload(actor_model)
            reference = headrace.offload(reference_model)

    Every model that is offloaded inside of the `with` statement shares the budget, for as long as it is offloaded.
    Whichever computes gets the room on the device: weights of the others give way, first those of the model that was
    used longest ago. They come back when their model is called again. In host memory, blocks of models with a `disk`
    move there when a later one needs the room, and stay there. The state of headrace's optimizers for these models
    counts, too, from when they are made, and so do activations in host memory (also of `offload_activations()`).

    - `device_memory`, `host_memory`: as in `offload()`, for all of the models together: bytes, or text such as "8GiB".
      None: each model has a budget of its own there.

    Only one of the models may compute at a time; within a pass of one, the same thread may call another. Raises
    TypeError or ValueError for an invalid size, and ValueError if neither is given.
    """
    if device_memory is None and host_memory is None:
        raise ValueError('budget() limits nothing; give device_memory="8GiB", host_memory="64GiB", or both')
    device_bytes = None if device_memory is None else parse_budget(device_memory, name="device_memory")
    host_bytes = None if host_memory is None else parse_budget(host_memory, name="host_memory")
    return SharedBudget(device_bytes, host_bytes)
