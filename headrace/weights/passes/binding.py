"""What do modules have in place of homes while they compute? Leaves of blocks, and the device's copies of buffers."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from headrace.weights.model.module_buffers import ModuleBuffers
from headrace.weights.movement.block import Block
from headrace.weights.movement.executor import Executor
from headrace.weights.passes.call import Progress

__all__ = ["PassBindings", "bind", "release"]

Bindable = Block | ModuleBuffers  # what has, for modules that compute, something in place of the user's own


def bind(blocks: Iterable[Bindable], *, adopts: bool = True) -> None:
    """One more user of each block: with the first one the modules' attributes become the leaves.

    `adopts`: parameters that the user has put in the place of homes are the homes from now on. Not in a backward, whose
    gradients are those of the homes that the forward had.
    """
    for block in blocks:
        block.users += 1
        if block.users == 1:
            block.bind(adopts=adopts)


def release(blocks: Iterable[Bindable]) -> None:
    """The inverse of `bind`."""
    for block in blocks:
        if block.users == 1:
            block.unbind()  # before it counts as done: an interrupt in between is made good by the next pass
        block.users -= 1


class PassBindings:
    """What is bound from the beginning of a pass, or of a backward, to its end: residents and buffers.

    And all blocks, in a forward without gradients where everything is there and nothing has to come or go: then the
    calls of layers do nothing.
    """

    def __init__(
        self,
        progress: Progress,
        blocks: Sequence[Block],
        residents: Sequence[Block],
        buffers: ModuleBuffers,
        executor: Executor,
    ) -> None:
        self._progress = progress
        self.blocks, self.residents, self.buffers = blocks, residents, buffers
        self._executor = executor
        self._bound: list[tuple[Bindable, ...]] = []  # of a forward, and of a backward within it

    def begin(self, *, forward_on: int = 0) -> None:
        """Residents come, and all are bound. `forward_on`: for a forward on that thread."""
        self._executor.bring_back(self.residents)
        everything = bool(forward_on) and self._executor.everything_is_here
        bound = *self.residents, self.buffers, *(self._executor.shares.whole_blocks if everything else ())
        bind(bound, adopts=bool(forward_on))
        self._bound.append(bound)
        if everything and torch.is_grad_enabled():
            for block in (*self.residents, *self._executor.shares.whole_blocks):
                block.may_be_saved = True
        self._progress.straight_for = forward_on if everything else 0

    def end(self) -> None:
        """Those of the last beginning are free again."""
        self._progress.straight_for = 0
        if self._bound:
            release(self._bound[-1])
            self._bound.pop()

    def reset(self) -> None:
        """Blocks are bound exactly for the calls under way, each with those of its visit; no longer straight."""
        calls = [call.blocks for call in self._progress.calls]
        self._progress.straight_for = 0
        del self._bound[1 if calls else 0 :]  # of a forward, while that is under way
        users: Counter[Bindable] = Counter(block for blocks in (*calls, *self._bound) for block in blocks)
        for block in (*self.blocks, *self.residents):
            block.lent = False
        everything: list[Bindable] = [*self.blocks, *self.residents, self.buffers]
        for bound in everything:
            if bound.users and not users[bound]:
                bound.unbind()
            bound.users = users[bound]
