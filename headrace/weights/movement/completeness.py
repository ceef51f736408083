"""When does a block have all gradients of this backward? When it has as many as in each of the two before.

Autograd does not say which gradient of a parameter is the last: a reentrant checkpoint delivers one for each use.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import StateError
from headrace.runtime.pending import Unit, Watcher
from headrace.weights.model.managed_param import ManagedParam

_ALIKE = 2  # backwards that must have been alike before the next is expected to be


@dataclass
class _Count:
    """How many gradients one block got, by parameter."""

    now: Counter[ManagedParam] = field(default_factory=Counter)
    last: Counter[ManagedParam] = field(default_factory=Counter)
    alike: int = 0  # how many backwards in a row have given `last`
    taken: bool = False  # whether an update began in this backward


class Completeness:
    """Counts the gradients of blocks that have watchers."""

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}

    def complete(self, param: ManagedParam, unit: Unit) -> list[ManagedParam]:
        """Called when one more gradient came. Returns the parameters with one, if the block seems to have all now."""
        count = self._counts.setdefault(id(unit), _Count())
        if count.taken:
            raise StateError(
                f"parameter {param.name!r} got one more gradient after its update in this backward, which is unlike the"
                ' backwards before; with overlap="backward" the model must do the same at every step:'
                ' use overlap="forward"'
            )
        count.now[param] += 1
        return list(count.now) if count.alike >= _ALIKE and count.now == count.last else []

    def taken(self, unit: Unit) -> None:
        """Called when an update of the block begins within this backward."""
        self._counts[id(unit)].taken = True

    def end(self, *, completed: bool) -> None:
        """Called when backward is over."""
        for count in self._counts.values():
            if completed and count.now:
                count.alike = count.alike + 1 if count.now == count.last else 1
                count.last = count.now
            count.now = Counter()
            count.taken = False


def tell_watchers(params: Iterable[ManagedParam], announced: Collection[ManagedParam]) -> None:
    """Tells the watchers of these parameters' units that the gradients are in homes."""
    watched: dict[Watcher, dict[Any, bool]] = {}
    unit, watchers = None, []
    for param in params:
        if param.unit is not unit:
            unit = param.unit
            watchers = [] if unit is None else list(unit.watchers)
        for watcher in watchers:
            watched.setdefault(watcher, {})[param.home] = param in announced
    for watcher, homes in watched.items():
        watcher.delivered(homes)


def tell_of_failure(announced: Iterable[ManagedParam]) -> None:
    """Called when backward failed: tells watchers that began updates, which a plain run would not have made."""
    for watcher in {watcher for param in announced if param.unit is not None for watcher in param.unit.watchers}:
        watcher.abandoned()
