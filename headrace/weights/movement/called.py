"""When do experts come that are modules of their own? When they are called, and in backward just before.

See docs/design/experts.md. They are blocks as others are, but in no plan: which ones a pass calls is not known.
"""

import contextlib
from collections.abc import Iterator, Sequence

from headrace.planning import Keeping, Key, Phase
from headrace.weights.meter import Meter
from headrace.weights.movement.block import Block
from headrace.weights.movement.residency import Residency
from headrace.weights.movement.shares import Shares

__all__ = ["CalledExperts"]


class CalledExperts:
    """Which of the blocks of one model that come when they are called were called, and which make room for others."""

    def __init__(self, blocks: Sequence[Block], shares: Shares, residency: Residency, meter: Meter) -> None:
        self._shares = shares
        self._residency = residency
        self._meter = meter
        self._layers = len({block.called[0] for block in blocks if block.called is not None})
        self._keeping: Keeping | None = None
        self._room = 0  # that it was made for
        self._layer = -1  # that is being called
        self._layer_call: set[Key] = set()  # those that this call has used
        self._forward: list[Block] = []  # as a forward has called them, and its backward has not come back to

    def begin_cycle(self) -> None:
        """A forward begins, or a backward that is not its forward's."""
        self._forward.clear()

    def note_use(self, block: Block) -> None:
        """One call of a layer is all that is called of it until one is called again, or another layer's."""
        key = block.called or (-1, -1)
        self._meter.experts_used(1)
        if key[0] != self._layer or key in self._layer_call:
            self._keeps.used(self._layer, [expert for _, expert in self._layer_call])
            self._layer, self._layer_call = key[0], set()
        self._layer_call.add(key)

    def follow(self, called: Sequence[Block], phase: Phase, *, gradients_follow: bool) -> Block | None:
        """These are visited. In a backward: the one that forward has called before them, which comes next unless
        nothing is computed with what it gave.
        """
        if phase is Phase.FORWARD and gradients_follow:
            self._forward += called
        elif phase is Phase.BACKWARD and self._forward and self._forward[-1] in called:
            self._forward.pop()
            return self._forward[-1] if self._forward else None
        return None

    def going(self, block: Block, keep: Sequence[Block]) -> Iterator[Block]:
        """Of those that are there, which are to make room for another one: as many as it takes, while the caller evicts
        each that is not in use.
        """
        held = {one.called: one for one in self._residency.present() if one.called is not None}
        held_bytes = sum(one.nbytes for one in held.values())
        limit_bytes = self._shares.called_bytes
        stay = {one.called for one in keep if one.called is not None}
        while held_bytes + block.nbytes > limit_bytes and not stay.issuperset(held):
            kept = stay | self._layer_call
            key = self._keeps.victim(self._layer, held, stay if kept.issuperset(held) else kept)
            yield held[key]
            if held[key].buffer is None:
                held_bytes -= held.pop(key).nbytes
            else:  # in use
                stay.add(key)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """What is loaded inside is an expert."""
        before = self._meter.onload_bytes
        yield
        self._meter.expert_bytes += self._meter.onload_bytes - before
        self._meter.expert_loads += self._meter.onload_bytes > before

    @property
    def _keeps(self) -> Keeping:
        room = max(1, self._shares.called_bytes // max(1, self._shares.largest_called_bytes))
        if self._keeping is None or room != self._room:
            self._keeping, self._room = Keeping(room, self._layers), room
        return self._keeping
