"""Where does an offloaded model stand, between two passes and within one? One state, and how it may change."""

from enum import Enum, auto

from millrace.errors import StateError

__all__ = ["PassState", "Progress"]


class PassState(Enum):
    """What is under way."""

    AT_REST = auto()  # modules have homes; nothing is left of any pass
    FORWARD = auto()  # an outermost call
    BETWEEN = auto()  # a forward has ended, and its backward may follow
    BACKWARD = auto()  # ... maybe inside of a forward
    ENDING = auto()  # a backward is over, and its gradients are delivered or dropped; the user's hooks run


_NEXT = {
    PassState.AT_REST: {PassState.FORWARD, PassState.BACKWARD},
    PassState.FORWARD: {PassState.BETWEEN, PassState.BACKWARD},
    PassState.BETWEEN: {PassState.AT_REST, PassState.BACKWARD},
    PassState.BACKWARD: {PassState.ENDING},
    PassState.ENDING: {PassState.AT_REST, PassState.FORWARD, PassState.BACKWARD},
}


class Progress:
    """The state of one model. `thread`: which made the last outermost call, and waits while its backward is under way.

    What ends in another way than the states foresee (an exception, Ctrl-C) is undone, and the model is at rest.
    """

    def __init__(self) -> None:
        self.state = PassState.AT_REST
        self.thread = 0

    def becomes(self, new: PassState) -> None:
        """The pass goes on. Raises StateError where it cannot go on so."""
        if new is not self.state and new not in _NEXT[self.state]:
            raise StateError(f"a pass that is {self.state.name} cannot become {new.name}")
        self.state = new

    @property
    def computes(self) -> bool:
        """Whether the model computes: modules that look at parameters only ask what they are."""
        return self.state in (PassState.FORWARD, PassState.BACKWARD)
