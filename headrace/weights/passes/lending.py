"""Who gets a leaf without a call of its module? Code that computes with a home, or asks for one, during a pass.

See weights/passes/parameter_access.py for how such uses come here.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from headrace.planning import Phase
from headrace.runtime.autograd import without_overrides
from headrace.runtime.tensors import tensors_in
from headrace.weights.model.home import AliasHome
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.model.uses import Use
from headrace.weights.movement.block import Block
from headrace.weights.passes.call import MethodCall, Passes, bind


class Lending:
    """Lends the leaves of one model. `begin_method` makes a method's call a pass, unless it is one."""

    def __init__(self, passes: Passes, begin_method: Callable[[MethodCall], None]) -> None:
        self.passes = passes
        self._begin_method = begin_method
        self._blocks: dict[ManagedParam, Block] = {}
        self._lent_in_backward: list[Block] = []  # lent outside of any call

    def add(self, block: Block) -> None:
        """Has the block's leaves lent, too."""
        self._blocks.update(dict.fromkeys(block.params, block))

    def lend_to_function(self, param: ManagedParam, use: Use, beside: Collection[torch.device]) -> torch.Tensor | None:
        """The leaf for a home that a torch function takes with no call of its module; None: the home itself is used.

        A method other than `forward` uses homes themselves, outside of its pass, unless it uses them with tensors on
        the device: it may update, average or save weights.
        """
        block = self._blocks.get(param)
        passes = self.passes
        method = None if block is None else self._method()
        if block is None or not (method or passes.in_call or passes.in_backward):
            return None
        if use is Use.LOOK:
            return param.leaf
        if method is not None and (not passes.calls or passes.calls[-1] is method):
            if param.leaf.device not in beside:
                method.pause()
                return None
            self._begin_method(method)
        if use is Use.WRITE:  # the home is written to, as by the user from outside
            param.touch()
            return None
        return self._lend(block, param)

    def lend_to_module(self, param: ManagedParam) -> torch.Tensor | None:
        """The leaf for a home that a module is asked for, of a block that no visit brought; None: it gives the home.

        In backward, recomputation runs with gradients on, and gets leaves. Hooks run with gradients off, and get homes,
        as user code does.
        """
        block = self._blocks.get(param)
        if block is None or not (self.computes or self.begin_method()):
            return None
        return self._lend(block, param)

    def _lend(self, block: Block, param: ManagedParam) -> torch.Tensor:
        """Brings the block, and returns the leaf. The block stays until the innermost call ends or, in backward, the
        present visit; or until its memory is needed (`Block.may_be_taken_back`).
        """
        param.prepare_leaf()
        if block.experts is not None and torch.is_grad_enabled() and param.home.requires_grad:
            block.trains_whole = True  # its experts get gradients one by one in other calls
        if block.users:  # a home may have been written to while the block was bound
            self.passes.executor.bring_back([block])
            return param.leaf
        self.passes.executor.visit((block,), Phase.BACKWARD if self.passes.in_backward else Phase.FORWARD, block.name)
        if block.row_bytes:
            self.passes.executor.let_travel_whole(block)
        bind((block,))
        block.lent = True
        calls = self.passes.calls
        (calls[-1].lent if calls else self._lent_in_backward).append(block)
        return param.leaf

    def begin_method(self) -> bool:
        """Makes a pass of this thread's method, which asks a module for a weight or buffer. Returns whether it did."""
        method = self._method()
        if method is None:
            return False
        self._begin_method(method)
        return True

    def _method(self) -> MethodCall | None:
        """The method that this thread calls; None if it calls none, or runs a backward."""
        return None if self.passes.in_backward else self.passes.methods.get(threading.get_ident())

    def end_of_visit(self) -> None:
        """Backward goes on to another block, or ends: blocks that were lent in between go back."""
        lent, self._lent_in_backward = self._lent_in_backward, []
        for block in lent:
            block.take_back()

    @property
    def computes(self) -> bool:
        """Whether this thread computes with the model's weights now, and nobody's hooks do."""
        return self.passes.in_call or (self.passes.in_backward and torch.is_grad_enabled())


def is_idle(blocks: Sequence[Block], args: Any, kwargs: Any) -> bool:
    """Whether a call of an expert has no tokens, and gives its weights no gradient: the expert need not come for it.

    Where code loops over all experts of a layer, this holds for most calls. See docs/design/experts.md.
    """
    (block,) = blocks
    if block.users or any(isinstance(param.home, AliasHome) for param in block.params):
        return False
    given = list(tensors_in((args, kwargs)))
    if not given or any(tensor.numel() for tensor in given):
        return False
    with without_overrides():
        if block.buffer is not None and not block.is_current:
            return False
        return not (torch.is_grad_enabled() and any(param.home.requires_grad for param in block.params))
