"""Where does an offloaded model stand, between two passes and within one? One state, and how it may change."""

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum, auto

from headrace.errors import StateError
from headrace.runtime.autograd import NO_TASK, backward_task

__all__ = ["PassState", "Progress"]


class PassState(Enum):
    """What is under way."""

    AT_REST = auto()  # modules have homes; nothing is left of any pass
    FORWARD = auto()  # an outermost call
    BETWEEN = auto()  # a forward has ended, and its backward may follow, or another forward before it
    BACKWARD = auto()  # ... maybe inside of a forward
    BROKEN_OFF = auto()  # what was under way is being undone


_NEXT = {
    PassState.AT_REST: {PassState.FORWARD, PassState.BACKWARD},
    PassState.FORWARD: {PassState.BETWEEN, PassState.BACKWARD},
    PassState.BETWEEN: {PassState.AT_REST, PassState.FORWARD, PassState.BACKWARD},
    PassState.BACKWARD: {PassState.AT_REST, PassState.FORWARD},
    PassState.BROKEN_OFF: {PassState.AT_REST},
}


class Progress:
    """The state of one model. `thread`: which made the last outermost call, and waits while its backward is under way.

    What ends in another way than the states foresee (an exception, Ctrl-C) is undone, and the model is at rest.
    """

    def __init__(self) -> None:
        self.state = PassState.AT_REST
        self.thread = 0
        self._over: set[int] = set()  # autograd's numbers of backwards that have nothing left to compute

    def becomes(self, new: PassState) -> None:
        """The pass goes on. Raises StateError where it cannot go on so."""
        if new is not self.state and new not in _NEXT[self.state]:
            raise StateError(f"a pass that is {self.state.name} cannot become {new.name}")
        self.state = new

    @property
    def in_backward(self) -> bool:
        """Whether this thread runs a backward now, and what it calls may be computed again."""
        task = backward_task()
        return task != NO_TASK and task not in self._over

    @contextlib.contextmanager
    def hooks_of_homes(self) -> Iterator[Callable[[], None]]:
        """The backward that this thread runs is over but for hooks, which are user code as outside of it.

        Gives what to call in another backward, within it, that does no more than call them.
        """
        before, self._over = self._over, {*self._over, backward_task()}
        try:
            yield lambda: self._over.add(backward_task())
        finally:
            self._over = before

    @property
    def runs_hooks(self) -> bool:
        """Whether a backward is at its end, and hooks of homes are called."""
        return bool(self._over)

    @property
    def computes(self) -> bool:
        """Whether the model computes: modules that look at parameters only ask what they are."""
        return self.state in (PassState.FORWARD, PassState.BACKWARD)
