"""What do modules have in place of homes while they compute? Leaves of blocks, and the device's copies of buffers."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from headrace.weights.model.module_buffers import ModuleBuffers
from headrace.weights.movement.block import Block
from headrace.weights.movement.executor import Executor
from headrace.weights.passes.call import Progress

__all__ = ["PassBindings", "bind", "release"]

Bindable = Block | ModuleBuffers  # both put something in the place of the user's own tensors


def bind(blocks: Iterable[Bindable], *, adopts: bool = True) -> None:
    """Counts one more user of each block. With the first user, the modules' attributes become the block's leaves.

    With `adopts`, parameters that the user has put in the place of homes become the homes. A backward does not adopt:
    its gradients are those of the homes that forward had.
    """
    for block in blocks:
        block.users += 1
        if block.users == 1:
            block.bind(adopts=adopts)


def release(blocks: Iterable[Bindable]) -> None:
    """The inverse of `bind`."""
    for block in blocks:
        if block.users == 1:
            block.unbind()  # before the count: the next pass makes good an interrupt in between
        block.users -= 1


class PassBindings:
    """What is bound from the beginning of a pass, or of a backward, to its end: residents and buffers.

    A forward for which everything is on the device, and nothing has to come or go, has all blocks bound as well: the
    calls of layers then bring nothing.
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
        self._bound: list[tuple[Bindable, ...]] = []  # what a forward has bound, and what a backward within it has

    def begin(self, *, forward_on: int = 0) -> None:
        """Brings and binds what is bound to the end. `forward_on`: the thread of a forward; 0: a backward begins."""
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
        """Releases what the last begin() has bound."""
        self._progress.straight_for = 0
        if self._bound:
            release(self._bound[-1])
            self._bound.pop()

    def reset(self) -> None:
        """Leaves just that bound which the calls under way, and the forward around them, need; all calls are visits."""
        calls = [call.blocks for call in self._progress.calls]
        self._progress.straight_for = 0
        del self._bound[1 if calls else 0 :]  # but for the forward's, while that is under way
        users: Counter[Bindable] = Counter(block for blocks in (*calls, *self._bound) for block in blocks)
        for block in (*self.blocks, *self.residents):
            block.lent = False
        everything: list[Bindable] = [*self.blocks, *self.residents, self.buffers]
        for bound in everything:
            if bound.users and not users[bound]:
                bound.unbind()
            bound.users = users[bound]
