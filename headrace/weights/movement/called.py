"""When do experts come that are modules of their own? When they are called, and in backward just before.

See docs/design/experts.md. They are blocks as others are, but in no plan: which ones a pass calls is not known.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.planning import Keeping, Key, Phase
from headrace.weights.meter import Meter
from headrace.weights.movement.block import Block
from headrace.weights.movement.residency import Residency

if TYPE_CHECKING:
    from headrace.weights.movement.executor import Executor

__all__ = ["CalledExperts"]

_LEAST = 2  # one comes while another computes


class CalledExperts:
    """The blocks of one model that come when they are called."""

    def __init__(self, blocks: Sequence[Block], executor: "Executor", residency: Residency, meter: Meter) -> None:
        self._executor = executor
        self._residency = residency
        self._meter = meter
        self._blocks = {block.called: block for block in blocks if block.called is not None}
        self._largest_bytes = max((block.nbytes for block in self._blocks.values()), default=0)
        self._all_bytes = sum(block.nbytes for block in self._blocks.values())
        self._keeping: Keeping | None = None
        self._room = 0  # that it was made for
        self._layer = -1  # that is being called
        self._layer_call: set[Key] = set()  # those that this call has used
        self._forward: list[Block] = []  # as a forward has called them, and its backward has not come back to

    @property
    def least_bytes(self) -> int:
        """What they need of the budget."""
        return min(_LEAST * self._largest_bytes, self._all_bytes)

    @property
    def bytes_wanted(self) -> int:
        """What they may take of it: all that other blocks leave."""
        if not self._blocks:
            return 0
        room_bytes = self._residency.streaming_budget_bytes - self._executor.bytes_beside_experts
        return min(max(room_bytes - self._executor.slices.bytes_wanted, self.least_bytes), self._all_bytes)

    def begin_cycle(self) -> None:
        """A forward begins, or a backward that is not its forward's."""
        self._forward.clear()

    def visit(self, blocks: tuple[Block, ...], phase: Phase, name: str) -> None:
        """Makes these present, and in backward submits the one that is needed next."""
        called = [block for block in blocks if block.called is not None]
        if len(called) < len(blocks):  # it shares weights
            self._executor.visit(tuple(block for block in blocks if block.called is None), phase, name)
        for block in called:
            self._note_use(block)
            with self._counting():
                self._executor.bring(block, blocks)
        if phase is Phase.FORWARD and self._executor.gradients_follow:
            self._forward += called
        elif phase is Phase.BACKWARD and self._forward and self._forward[-1] in called:
            self._forward.pop()
            if self._forward:
                self._bring_ahead(self._forward[-1], blocks)
        for block in called:
            self._residency.arrive(block)

    def make_room(self, block: Block, keep: Sequence[Block]) -> None:
        """Of those that are there as many go as it takes for another one, as long as they are not in use."""
        held = {one.called: one for one in self._residency.present() if one.called is not None}
        held_bytes = sum(one.nbytes for one in held.values())
        limit_bytes = self.bytes_wanted
        stay = {one.called for one in keep if one.called is not None}
        while held_bytes + block.nbytes > limit_bytes and not stay.issuperset(held):
            kept = stay | self._layer_call
            key = self._keeps.victim(self._layer, held, stay if kept.issuperset(held) else kept)
            self._executor.evict(held[key])
            if held[key].buffer is None:
                held_bytes -= held.pop(key).nbytes
            else:  # in use
                stay.add(key)

    def _bring_ahead(self, block: Block, keep: Sequence[Block]) -> None:
        """A forward has called it: its backward comes next, unless nothing is computed with what it gave."""
        if block.buffer is None:
            self.make_room(block, keep)
        with self._counting():
            self._executor.prefetch(block)

    def _note_use(self, block: Block) -> None:
        """One call of a layer is all that is called of it until one is called again, or another layer's."""
        key = block.called or (-1, -1)
        self._meter.experts_used(1)
        if key[0] != self._layer or key in self._layer_call:
            self._keeps.used(self._layer, [expert for _, expert in self._layer_call])
            self._layer, self._layer_call = key[0], set()
        self._layer_call.add(key)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        before = self._meter.onload_bytes
        yield
        self._meter.expert_bytes += self._meter.onload_bytes - before
        self._meter.expert_loads += self._meter.onload_bytes > before

    @property
    def _keeps(self) -> Keeping:
        room = max(1, self.bytes_wanted // max(1, self._largest_bytes))
        if self._keeping is None or room != self._room:
            self._keeping, self._room = Keeping(room, len({layer for layer, _ in self._blocks})), room
        return self._keeping
