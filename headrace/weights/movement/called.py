"""When do experts come that are modules of their own? When they are called, and in backward just before.

See docs/design/experts.md. They are blocks as others are, but in no plan: which ones a pass calls is not known.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from headrace.planning import Keeping, Key, Phase
from headrace.weights.meter import Meter
from headrace.weights.movement.block import Block
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.shares import Shares

__all__ = ["CalledExperts"]


class CalledExperts:
    """Experts of one model that are modules: which ones were called, and which make room for others.

    `evict`: unless a block is in use.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        shares: Shares,
        residency: Residency,
        meter: Meter,
        evict: Callable[[Block], None],
    ) -> None:
        self._evict = evict
        self._shares = shares
        self._residency = residency
        self._meter = meter
        self._layers = len({block.called[0] for block in blocks if block.called is not None})
        self._keeping: Keeping | None = None
        self._room = 0  # how many experts `_keeping` was made for
        self._layer = -1  # whose experts are being called
        self._layer_call: set[Key] = set()  # experts that this call of the layer has used
        self._forward: list[Block] = []  # in the order of forward's calls: those that backward has not come back to

    def begin_cycle(self) -> None:
        """A cycle begins: what an earlier forward called is forgotten."""
        self._forward.clear()

    def note_use(self, block: Block) -> None:
        """An expert is called. A call of its layer ends when one is called again, or one of another layer is."""
        key = block.called or (-1, -1)
        self._meter.expert_uses += 1
        if key[0] != self._layer or key in self._layer_call:
            self._keeps.used(self._layer, [expert for _, expert in self._layer_call])
            self._layer, self._layer_call = key[0], set()
        self._layer_call.add(key)

    def follow(self, called: Sequence[Block], phase: Phase, *, gradients_follow: bool) -> Block | None:
        """The experts `called` are visited. In backward, returns the one that forward called before them: it is needed
        next, unless nothing was computed with its output. None: there is none, or this is a forward.
        """
        if phase is Phase.FORWARD and gradients_follow:
            self._forward += called
        elif phase is Phase.BACKWARD and self._forward and self._forward[-1] in called:
            self._forward.pop()
            return self._forward[-1] if self._forward else None
        return None

    def make_room(self, block: Block, keep: Sequence[Block]) -> None:
        """Evicts as many others as it takes for `block`; none of those in `keep`, and none in use."""
        held = {one.called: one for one in self._residency.present() if one.called is not None}
        room_bytes = self._shares.called_bytes - block.nbytes - sum(one.nbytes for one in held.values())
        stay = {one.called for one in keep if one.called is not None}
        while room_bytes < 0 and not stay.issuperset(held):
            kept = stay | self._layer_call
            key = self._keeps.victim(self._layer, held, stay if kept.issuperset(held) else kept)
            self._evict(held[key])
            if held[key].buffer is None:
                room_bytes += held.pop(key).nbytes
            else:  # in use
                stay.add(key)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """What is loaded inside counts as an expert in the report."""
        before = self._meter.onload_bytes
        yield
        self._meter.expert_bytes += self._meter.onload_bytes - before
        self._meter.expert_loads += self._meter.onload_bytes > before

    @property
    def _keeps(self) -> Keeping:
        """Which experts stay, made anew when the room for them has changed."""
        room = max(1, self._shares.called_bytes // max(1, self._shares.largest_called_bytes))
        if self._keeping is None or room != self._room:
            self._keeping, self._room = Keeping(room, self._layers), room
        return self._keeping
