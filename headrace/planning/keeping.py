"""Which expert makes room for another? The one of the same layer that was used least of late.

If that layer holds less than its share of the room, an expert of another layer goes. Experts that came for calls that
use nearly all of a layer go before any others, the last one first. See docs/design/experts.md for what else was tried.
"""

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

Key = tuple[int, int]  # layer, expert

# How much an expert is worth: log2(the sum of its decayed uses) + call / _HALF_LIFE, and `call`, the number of its
# layer's call that used it last. All uses decay alike from call to call, so only a use changes the order of a layer's
# experts. If two are worth the same, the one that was used longer ago goes.
_Worth = tuple[float, int]
_UNUSED: _Worth = -math.inf, 0

_HALF_LIFE = 64  # after this many calls of its layer, a use counts half
_NEARLY_ALL = 3 / 4  # of a layer's experts


def passes_through(used: float, count: int) -> bool:
    """Whether a call uses so many of a layer's experts that its choice says nothing about later calls."""
    return used > _NEARLY_ALL * count


class Keeping:
    """Which experts are held, and how often they were used of late. `layers` layers share the room for `room` experts.

    What a method costs grows with the layers, but not with the experts that are held.
    """

    def __init__(self, room: int, layers: int) -> None:
        self._layers = layers
        self.resize(room)
        self._calls: Counter[int] = Counter()  # by layer
        self._worth: dict[Key, _Worth] = {}  # of all that were used, held or not
        self._held: defaultdict[int, set[Key]] = defaultdict(set)  # by layer
        # By layer, the worth of each held expert, ascending. Entries of experts that have gone, and outdated entries,
        # are skipped (`_holds`): so each change is one step, which Ctrl-C cannot leave half done.
        self._order: defaultdict[int, list[tuple[_Worth, Key]]] = defaultdict(list)
        self._passing: dict[Key, None] = {}  # experts that came for calls that use nearly all of a layer, in order

    def resize(self, room: int) -> None:
        """From now on there is room for this many experts."""
        self._share = room / self._layers

    def came(self, key: Key, *, passing: bool = False) -> None:
        """The expert is held from now on. `passing`: it came for a call that uses nearly all of its layer."""
        insort(self._order[key[0]], (self._worth.get(key, _UNUSED), key))
        self._held[key[0]].add(key)
        self._passing.pop(key, None)
        if passing:
            self._passing[key] = None

    def went(self, key: Key) -> None:
        """The expert is not held any more."""
        self._passing.pop(key, None)
        self._held[key[0]].discard(key)

    def is_passing(self, key: Key) -> bool:
        """Whether the expert came for a call that uses nearly all of its layer, and no other call has used it."""
        return key in self._passing

    def used(self, layer: int, experts: Iterable[int], *, passing: bool = False) -> None:
        """A call of the layer has used these experts. `passing`: it uses nearly all of the layer."""
        self._calls[layer] += 1
        now, held = self._calls[layer], self._held[layer]
        for expert in experts:
            key = layer, expert
            uses = 1 + 2 ** (self._worth.get(key, _UNUSED)[0] - now / _HALF_LIFE)
            worth = math.log2(uses) + now / _HALF_LIFE, now
            if key in held:
                insort(self._order[layer], (worth, key))
            self._worth[key] = worth
            if not passing:
                self._passing.pop(key, None)
        if len(self._order[layer]) > 2 * len(held) + _HALF_LIFE:
            self._order[layer] = [entry for entry in self._order[layer] if self._holds(entry)]

    def victim(self, layer: int, kept: Collection[Key]) -> Key | None:
        """Which of the held experts goes, so that another one of the layer can come; never one of `kept`. None: all
        that are held are kept.

        Calls that use nearly all of a layer first want what they used longest ago, so the expert that came last goes.
        """
        for key in reversed(self._passing):
            if key not in kept:
                return key
        own, others = [layer], [other for other in self._held if other != layer]
        has_share = len(self._held[layer]) >= self._share
        for layers in (own, others) if has_share else (others, own):
            free = [first for one in layers if (first := self._first(one, kept)) is not None]
            if free:
                return min(free)[-1]
        return None

    def _first(self, layer: int, kept: Collection[Key]) -> tuple[float, int, Key] | None:
        """The expert that is worth least among the layer's that are not kept: what it is worth now, the number of calls
        since it was used (negated), and its key.
        """
        order, calls = self._order[layer], self._calls[layer]
        del order[: next((place for place, entry in enumerate(order) if self._holds(entry)), len(order))]
        for entry in order:
            (worth, last), key = entry
            if key not in kept and self._holds(entry):
                return worth - calls / _HALF_LIFE, last - calls, key
        return None

    def _holds(self, entry: tuple[_Worth, Key]) -> bool:
        """Whether this is what the expert is worth now, and it is held."""
        worth, key = entry
        return key in self._held[key[0]] and self._worth.get(key, _UNUSED) == worth
