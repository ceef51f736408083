"""Which expert makes room for another? Of the layer that wants room, the one that was used least of late.

Where a layer has less than its share, one of the others. Before any of them go those that came for calls that use
nearly all of a layer, the last one first. See docs/design/experts.md for what else was tried.
"""

from collections import Counter
from collections.abc import Collection, Iterable

__all__ = ["Keeping", "Key", "passes_through"]

Key = tuple[int, int]  # layer, expert

_HALF_LIFE = 64  # calls of its layer, after which a use counts half
_NEARLY_ALL = 3 / 4  # of a layer's experts


def passes_through(used: float, count: int) -> bool:
    """Whether a call uses so many of a layer's experts that which ones it is says nothing about the calls to come."""
    return used > _NEARLY_ALL * count


class Keeping:
    """What was used in a room for so many experts, that so many layers share."""

    def __init__(self, room: int, layers: int) -> None:
        self._share = room / layers
        self._calls: Counter[int] = Counter()  # by layer
        self._uses: dict[Key, tuple[float, int]] = {}  # and the call of its layer up to which they are counted
        self._passing: dict[Key, None] = {}  # what came for a call that uses nearly all; the last one comes last

    def came(self, key: Key, *, passing: bool) -> None:
        """It is here from now on; `passing`: for a call that uses nearly all."""
        self._passing.pop(key, None)
        if passing:
            self._passing[key] = None

    def went(self, key: Key) -> None:
        """It is not here any more."""
        self._passing.pop(key, None)

    def used(self, layer: int, experts: Iterable[int], *, passing: bool = False) -> None:
        """A call of the layer has used these."""
        self._calls[layer] += 1
        for expert in experts:
            self._uses[layer, expert] = self._count((layer, expert)) + 1, self._calls[layer]
            if not passing:
                self._passing.pop((layer, expert), None)

    def victim(self, layer: int, held: Collection[Key], kept: Collection[Key]) -> Key:
        """Which of those that are held goes, so that another one of the layer can come; none that is kept.

        Calls that use nearly all come back to what they used longest ago: so what came last goes.
        """
        for key in reversed(self._passing):
            if key in held and key not in kept:
                return key
        own = [key for key in held if key[0] == layer]
        chosen = own if len(own) >= self._share else [key for key in held if key[0] != layer]
        free = [key for key in chosen if key not in kept] or [key for key in held if key not in kept]
        return min(free, key=self._rank)

    def _rank(self, key: Key) -> tuple[float, int, Key]:
        return self._count(key), -self._age(key), key

    def _count(self, key: Key) -> float:
        uses, _ = self._uses.get(key, (0.0, 0))
        return uses * float(0.5 ** (self._age(key) / _HALF_LIFE))

    def _age(self, key: Key) -> int:
        return self._calls[key[0]] - self._uses.get(key, (0.0, 0))[1]
