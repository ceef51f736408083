"""Where does an offloaded model stand between two passes, and within one? One state, and how it may change."""

from enum import Enum, auto

__all__ = ["PassState"]


class PassState(Enum):
    """What is under way. Whatever ends in another way (an exception, Ctrl-C) goes back to AT_REST by being undone."""

    AT_REST = auto()  # modules have homes; nothing is left of any pass
    FORWARD = auto()  # an outermost call
    BETWEEN = auto()  # a forward has ended, and its backward may follow
    BACKWARD = auto()  # ... maybe inside of a forward
    ENDING = auto()  # a backward is over, and its gradients are delivered or dropped; the user's hooks run

    @property
    def computes(self) -> bool:
        """Whether the model computes: modules that look at parameters only ask what they are."""
        return self in (PassState.FORWARD, PassState.BACKWARD)

    def may_become(self, other: "PassState") -> bool:
        """Whether that is a way for a pass to go on."""
        return other in _NEXT[self]


_NEXT = {
    PassState.AT_REST: {PassState.FORWARD, PassState.BACKWARD},
    PassState.FORWARD: {PassState.BETWEEN, PassState.BACKWARD},
    PassState.BETWEEN: {PassState.AT_REST, PassState.BACKWARD},
    PassState.BACKWARD: {PassState.ENDING},
    PassState.ENDING: {PassState.AT_REST, PassState.FORWARD, PassState.BACKWARD},
}
