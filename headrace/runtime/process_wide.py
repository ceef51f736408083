"""What changes for the whole process while headrace is used? Each change has users, and is undone with the last one."""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from headrace.runtime.threads import keeps_interrupts

Method = Callable[..., Any]


class ProcessWide:
    """One change to PyTorch itself: global hooks, or a method of a class.

    `begin` makes the change, and returns the call that undoes it. `anywhere`: it may be undone at any moment. If not,
    the garbage collector could drop the last user while PyTorch iterates over the hooks; then the change is undone only
    when the next user ends.
    """

    def __init__(self, begin: Callable[[], Callable[[], None]], *, anywhere: bool) -> None:
        self._begin = begin
        self._anywhere = anywhere
        self._undo: Callable[[], None] | None = None
        self._users: set[object] = set()  # one token for each
        self._lock = threading.RLock()  # the garbage collector may run `_leave` on a thread that holds it

    @property
    def is_there(self) -> bool:
        """Whether the change is in force."""
        return self._undo is not None

    def use(self, user: object) -> Callable[[], None]:
        """Puts the change in force until the returned call is made, or until `user` is gone."""
        token = object()
        with self._lock:
            self._users.add(token)
            if self._undo is None:
                self._undo = self._begin()
        weakref.finalize(user, keeps_interrupts(self._leave), token, dropped=True).atexit = False
        return functools.partial(self._leave, token, dropped=False)

    def _leave(self, token: object, *, dropped: bool) -> None:
        with self._lock:
            self._users.discard(token)
            if self._users or self._undo is None or (dropped and not self._anywhere):
                return
            undo, self._undo = self._undo, None
            undo()


def hooked(register: Callable[[], Sequence[RemovableHandle]]) -> ProcessWide:
    """Global hooks, which `register` registers."""

    def begin() -> Callable[[], None]:
        handles = register()

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    return ProcessWide(begin, anywhere=False)


def patched(owner: Callable[[], Any], name: str) -> Callable[[Callable[[Method], Method]], ProcessWide]:
    """Decorates a function that takes PyTorch's function `name`, of the class or module that `owner()` returns, and
    returns what replaces it while there are users.
    """

    def begin(replacement: Callable[[Method], Method]) -> Callable[[], None]:
        place = owner()
        own = getattr(place, name)
        ours = replacement(own)
        setattr(place, name, ours)

        def undo() -> None:
            if getattr(place, name) is ours:  # otherwise, somebody has wrapped it
                setattr(place, name, own)

        return undo

    return lambda replacement: ProcessWide(functools.partial(begin, replacement), anywhere=True)
