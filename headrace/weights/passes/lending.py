"""Who gets a leaf without a call of its module? What computes with a home, or asks a module for one, during a pass.

See weights/passes/stray.py for how such uses come here.
"""

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from headrace.planning import Phase
from headrace.runtime.tensors import tensors_in
from headrace.weights.model.slot import Slot
from headrace.weights.model.uses import Use
from headrace.weights.movement.block import Block
from headrace.weights.movement.executor import Executor
from headrace.weights.movement.residency import Residency
from headrace.weights.passes.binding import bind, release
from headrace.weights.passes.call import Call, MethodCall
from headrace.weights.passes.idle import IdleWeight
from headrace.weights.passes.state import Progress

__all__ = ["Lending"]


class Lending:
    """Lends the leaves of one model. `calls`: those under way, outermost first; `methods`: of each thread."""

    def __init__(
        self,
        executor: Executor,
        residency: Residency,
        calls: Sequence[Call],
        progress: Progress,
        methods: Mapping[int, MethodCall],
    ) -> None:
        self._methods = methods
        self._progress = progress
        self._executor = executor
        self._residency = residency
        self._calls = calls
        self._blocks: dict[Slot, Block] = {}
        self._lent_in_backward: list[Block] = []  # to what is computed again
        self._idle: list[Block] = []  # experts that are called with no tokens

    def add(self, block: Block) -> None:
        """From now on the block's leaves are lent, too."""
        self._blocks.update(dict.fromkeys(block.slots, block))

    def lend(self, slot: Slot, use: Use, beside: Collection[torch.device]) -> torch.Tensor | None:
        """A module uses a home that no call of its own module brought: a visit as long as the computation.

        A method other than `forward` has homes as its caller has them, outside of its pass, where it does not use them
        with what is on the device: it may update, average or save weights.
        """
        block = self._blocks.get(slot)
        method = None if block is None or self._progress.in_backward else self._methods.get(threading.get_ident())
        if block is None or not (method or self._in_call() or self._progress.in_backward):
            return None
        if use is Use.LOOK:
            return slot.leaf
        if method is not None and (not self._calls or self._calls[-1] is method):
            if slot.leaf.device not in beside:
                method.pause()
                return None
            method.begin()
        if use is Use.WRITE:  # as the user would, from outside
            slot.touch()
            return None
        _follow_training(block, slot)
        self._bring(block)
        bind((block,))
        return slot.leaf

    def take_back(self, slot: Slot, result: Any) -> None:
        """The computation is over. Where it gave a view, the block stays as if a module had been asked for it."""
        block = self._blocks[slot]
        if block.users == 1 and any(self._residency.block_of(tensor) is block for tensor in tensors_in(result)):
            self._lend_on(block)
        else:
            release((block,))

    def lend_for_call(self, slot: Slot) -> torch.Tensor | None:
        """A module is asked for a parameter of a block that no visit brought: a visit until the innermost call ends.

        Or until its memory is needed, see `Block.may_be_taken_back`. In backward, what is computed again runs with
        gradients on; hooks run with gradients off, and see homes as user code does.
        """
        block = self._blocks.get(slot)
        if block is None or not (self.computes or self.begin_method()):
            return None
        if block in self._idle:
            return IdleWeight.of(slot, self._lent_after_all)
        return self._leaf_for_call(slot)

    def _lent_after_all(self, slot: Slot) -> torch.Tensor:
        self._idle = [block for block in self._idle if block is not self._blocks[slot]]
        return self._leaf_for_call(slot)

    def _leaf_for_call(self, slot: Slot) -> torch.Tensor:
        block = self._blocks[slot]
        _follow_training(block, slot)
        lent = not block.users
        self._bring(block)
        if lent:
            bind((block,))
            self._lend_on(block)
        return slot.leaf

    @contextlib.contextmanager
    def idle(self, block: Block) -> Iterator[None]:
        """Inside, an expert is called with no tokens."""
        self._idle.append(block)
        try:
            yield
        finally:
            self._idle = [one for one in self._idle if one is not block]

    def is_idle(self, blocks: Sequence[Block]) -> bool:
        """Whether they are of such a call."""
        return bool(self._idle) and all(block in self._idle for block in blocks)

    def begin_method(self) -> bool:
        """A module is asked for a weight or a buffer outside of any pass. Whether a method has become one by that."""
        method = None if self._progress.in_backward else self._methods.get(threading.get_ident())
        if method is None:
            return False
        method.begin()
        return True

    def end_of_visit(self) -> None:
        """Backward goes on to another block, or ends: what was lent in between comes back."""
        lent, self._lent_in_backward = self._lent_in_backward, []
        for block in lent:
            block.take_back()

    def forget(self) -> None:
        """Nothing is lent any more: all blocks were unbound."""
        self._lent_in_backward.clear()
        self._idle.clear()

    @property
    def computes(self) -> bool:
        """Whether this thread computes with the model's weights now, and nobody's hooks do."""
        return self._in_call() or (self._progress.in_backward and torch.is_grad_enabled())

    def _in_call(self) -> bool:
        return bool(self._calls) and self._calls[-1].thread == threading.get_ident()

    def _bring(self, block: Block) -> None:
        if not block.users:
            self._executor.visit((block,), Phase.BACKWARD if self._progress.in_backward else Phase.FORWARD, block.name)
            if block.row_bytes:
                self._executor.travels_whole(block)
        else:  # a home may have been written to while the block was bound
            self._executor.bring(block)
            self._residency.arrive(block)

    def _lend_on(self, block: Block) -> None:
        """Until the innermost call ends, or in backward the visit."""
        block.lent = True
        (self._calls[-1].lent if self._calls else self._lent_in_backward).append(block)


def _follow_training(block: Block, slot: Slot) -> None:
    """All of a weight is used, whose experts get gradients one by one in other calls; it may be trained only now."""
    slot.follow_requires_grad()
    if block.experts is not None and torch.is_grad_enabled() and slot.home.requires_grad:
        block.trains_whole = True
