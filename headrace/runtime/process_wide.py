"""What changes for the whole process while headrace is used? Each such change has users, and goes with the last."""

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["Method", "ProcessWide", "patched"]

Method = Callable[..., Any]


class ProcessWide:
    """One change of something that belongs to PyTorch: hooks that it calls for everybody, a method of a class.

    `begin` makes it, and returns what undoes it. `anywhere`: it may be undone while anything else goes on. Otherwise
    users that are dropped, which the garbage collector may do amid whatever iterates over the hooks, are looked for
    when the next user ends.
    """

    def __init__(self, begin: Callable[[], Callable[[], None]], *, anywhere: bool) -> None:
        self._begin = begin
        self._anywhere = anywhere
        self._undo: Callable[[], None] | None = None
        self._users: set[object] = set()  # one token for each
        self._lock = threading.RLock()  # the garbage collector may strike where it is held

    @property
    def is_there(self) -> bool:
        """Whether the change is in force."""
        return self._undo is not None

    def use(self, user: object) -> Callable[[], None]:
        """The change is there until what this returns is called; at the latest until `user` is gone."""
        token = object()
        with self._lock:
            self._users.add(token)
            if self._undo is None:
                self._undo = self._begin()
        weakref.finalize(user, self._leave, token, dropped=True).atexit = False
        return functools.partial(self._leave, token, dropped=False)

    def _leave(self, token: object, *, dropped: bool) -> None:
        with self._lock:
            self._users.discard(token)
            if self._users or self._undo is None or (dropped and not self._anywhere):
                return
            undo, self._undo = self._undo, None
            undo()


def patched(owner: Callable[[], Any], name: str, around: Callable[[Method], Method]) -> ProcessWide:
    """`around(own)` takes the place of a function `own` of that name: of the class or module that `owner` gives."""

    def begin() -> Callable[[], None]:
        place = owner()
        own = getattr(place, name)
        ours = around(own)
        setattr(place, name, ours)

        def undo() -> None:
            if getattr(place, name) is ours:  # nobody has put another one around it
                setattr(place, name, own)

        return undo

    return ProcessWide(begin, anywhere=True)
