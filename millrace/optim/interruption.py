"""What if a drive fails in the middle of a step? The step says how far it came, and no other one follows."""

import contextlib
from collections.abc import Iterator

from millrace.errors import StateError

__all__ = ["Interruption"]


class Interruption:
    """Whether a step of one optimizer was cut short after some weights had been written."""

    def __init__(self) -> None:
        self._reason: str | None = None

    def check(self) -> None:
        """Raises StateError when a step was cut short, and nothing was loaded since."""
        if self._reason is not None:
            raise StateError(self._reason)

    def forget(self) -> None:
        """State was loaded."""
        self._reason = None

    @contextlib.contextmanager
    def told(self, parameters: int) -> Iterator[set[int]]:
        """For the length of an update of so many parameters; those that were written to go into the set.

        What fails before the first one changed nothing and is raised as it is; later it is raised as a StateError.
        """
        begun: set[int] = set()
        try:
            yield begun
        except BaseException as error:
            if not begun:
                raise
            self._reason = (
                f"a step was cut short ({type(error).__name__}: {error}): {len(begun)} of {parameters} parameters on"
                " this tier had been updated, wholly or in part, and their state on disk may lack that update; load"
                " the weights and the optimizer's state from a checkpoint before the next step()"
            )
            if isinstance(error, Exception):
                raise StateError(self._reason) from error
            raise
