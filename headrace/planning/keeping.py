"""Which expert makes room for another? The one of the same layer that was used least of late.

If that layer holds less than its share of the room, an expert of another layer goes. Experts that came for calls that
use nearly all of a layer go before any others, the last one first. See docs/design/experts.md for what else was tried.
"""

from collections import Counter
from collections.abc import Collection, Iterable

Key = tuple[int, int]  # layer, expert

_HALF_LIFE = 64  # after so many calls of its layer, a use counts half
_NEARLY_ALL = 3 / 4  # of a layer's experts


def passes_through(used: float, count: int) -> bool:
    """Whether a call uses so many of a layer's experts that its choice says nothing about later calls."""
    return used > _NEARLY_ALL * count


class Keeping:
    """How often experts were used of late; `layers` layers share the room for `room` experts."""

    def __init__(self, room: int, layers: int) -> None:
        self._share = room / layers
        self._calls: Counter[int] = Counter()  # by layer
        self._uses: dict[Key, tuple[float, int]] = {}  # uses, and the call of the layer at which they were counted
        self._passing: dict[Key, None] = {}  # experts that came for calls that use nearly all of a layer, in order

    def came(self, key: Key, *, passing: bool) -> None:
        """The expert is held from now on. `passing`: it came for a call that uses nearly all of its layer."""
        self._passing.pop(key, None)
        if passing:
            self._passing[key] = None

    def went(self, key: Key) -> None:
        """The expert is not held any more."""
        self._passing.pop(key, None)

    def used(self, layer: int, experts: Iterable[int], *, passing: bool = False) -> None:
        """A call of the layer has used these experts. `passing`: it uses nearly all of the layer."""
        self._calls[layer] += 1
        for expert in experts:
            self._uses[layer, expert] = self._count((layer, expert)) + 1, self._calls[layer]
            if not passing:
                self._passing.pop((layer, expert), None)

    def victim(self, layer: int, held: Collection[Key], kept: Collection[Key]) -> Key:
        """Which of the held experts goes, so that another one of the layer can come; never one of `kept`.

        Calls that use nearly all of a layer first want what they used longest ago, so the expert that came last goes.
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
