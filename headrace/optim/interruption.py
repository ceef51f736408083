"""What if a drive fails, or Ctrl-C comes, within a step? The error says how far it came; no other step may follow."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch

from headrace.errors import StateError
from headrace.optim.devices import Member


class Interruption:
    """Whether a step of one optimizer was cut short after some weights had been written."""

    def __init__(self) -> None:
        self._reason: str | None = None

    @property
    def has_struck(self) -> bool:
        """Whether `check` raises an error."""
        return self._reason is not None

    def check(self) -> None:
        """Raises StateError when a step was cut short, and nothing was loaded since."""
        if self._reason is not None:
            raise StateError(self._reason)

    def forget(self) -> None:
        """Called when state was loaded: steps are possible again."""
        self._reason = None

    @contextlib.contextmanager
    def guard_partial_step(self, members: Sequence[Member], drain: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Surrounds an update of these members, which sets `begun` in each. `drain` waits until the work that was given
        to other threads has ended.

        An error before any member has begun is raised as it is, as nothing has changed; a later one as StateError.
        """
        try:
            yield
        except BaseException as error:
            drain()
            # Ctrl-C may have struck after weights were written: has copies of them made anew.
            torch.autograd.graph.increment_version([member.parameter for member in members])
            for member in members:
                member.master.broken_off()
            begun = sum(member.begun or member.updated for member in members)
            if not begun:
                raise
            self._reason = (
                f"a step was cut short ({type(error).__name__}: {error}): {begun} of {len(members)} parameters had been"
                " updated, wholly or in part; load the weights and the optimizer's state from a checkpoint before the"
                " next step()"
            )
            if isinstance(error, Exception):
                raise StateError(self._reason) from error
            raise
