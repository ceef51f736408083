"""When has a block all the gradients that this backward will give it? When it has as many as in the two before.

Autograd does not say that a parameter's gradient is the last one: a reentrant checkpoint delivers once for each use.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import StateError
from headrace.runtime.pending import Unit, Watcher
from headrace.weights.model.managed_param import ManagedParam

__all__ = ["Arrivals", "tell_of_failure", "tell_watchers"]

_ALIKE = 2  # backwards that must have been alike before one is believed to be so too


@dataclass
class _Count:
    """Gradients of one block."""

    now: Counter[ManagedParam] = field(default_factory=Counter)
    last: Counter[ManagedParam] = field(default_factory=Counter)
    alike: int = 0  # how many backwards in a row gave `last`
    taken: bool = False  # updated in this backward


class Arrivals:
    """Counts the gradients of blocks that somebody watches."""

    def __init__(self) -> None:
        self._counts: dict[int, _Count] = {}

    def complete(self, slot: ManagedParam, unit: Unit) -> list[ManagedParam]:
        """One more gradient came. If the block has all of them now, as far as one can tell: the slots that have one."""
        count = self._counts.setdefault(id(unit), _Count())
        if count.taken:
            raise StateError(
                f"parameter {slot.name!r} got one more gradient after its update in this backward, which is unlike the"
                ' backwards before; with overlap="backward" the model must do the same at every step:'
                ' use overlap="forward"'
            )
        count.now[slot] += 1
        return list(count.now) if count.alike >= _ALIKE and count.now == count.last else []

    def taken(self, unit: Unit) -> None:
        """The block is being updated already."""
        self._counts[id(unit)].taken = True

    def end(self, *, completed: bool) -> None:
        """Backward is over."""
        for count in self._counts.values():
            if completed and count.now:
                count.alike = count.alike + 1 if count.now == count.last else 1
                count.last = count.now
            count.now = Counter()
            count.taken = False


def tell_watchers(slots: Iterable[ManagedParam], announced: Collection[ManagedParam]) -> None:
    """Those of the units: the gradients are in homes."""
    watched: dict[Watcher, dict[Any, bool]] = {}
    unit, watchers = None, []
    for slot in slots:
        if slot.unit is not unit:
            unit = slot.unit
            watchers = [] if unit is None else list(unit.watchers)
        for watcher in watchers:
            watched.setdefault(watcher, {})[slot.home] = slot in announced
    for watcher, homes in watched.items():
        watcher.delivered(homes)


def tell_of_failure(announced: Iterable[ManagedParam]) -> None:
    """Who was told of complete gradients has begun updates that a plain run would not make."""
    for watcher in {watcher for slot in announced if slot.unit is not None for watcher in slot.unit.watchers}:
        watcher.abandoned()
