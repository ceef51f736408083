"""Which process runs a model? The one that offloaded it; one that was forked from it can only look."""

import os

from headrace.errors import StateError

__all__ = ["OwnProcess"]


class OwnProcess:
    """The process in which this object was made."""

    def __init__(self) -> None:
        self._number = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether that is the calling process."""
        return os.getpid() == self._number

    def check(self) -> None:
        """Raises StateError in any other process."""
        if os.getpid() != self._number:
            raise StateError(
                f"process {self._number} offloaded this model, and this one was forked from it: it can read parameters"
                " and state_dict(), not compute; compute in that process, or load the model here"
            )
