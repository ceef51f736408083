"""Which blocks does a module need when it is called? A site ties one module to its blocks."""

import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import is_autocast_cache_enabled, is_autocast_enabled, is_grad_enabled, nn

from headrace.runtime.autograd import saving_is_left_to_autograd, without_overrides
from headrace.weights.movement.block import Block
from headrace.weights.passes.binding import PassBindings
from headrace.weights.passes.parameter_access import Lender, is_lending

__all__ = ["Companion", "Site", "UnderWay"]


class Companion(Protocol):
    """Who offloaded a model, and lives as long as the model does: the handle."""

    def convert(self, model: nn.Module, convert: Callable[[], object]) -> None:
        """The model gets other dtypes by `convert`."""


class UnderWay(Protocol):
    """What a site asks about the pass that is under way; the engine answers."""

    device: torch.device
    bindings: PassBindings
    calls: list[Any]  # visits under way, outermost first: each has the `thread` of its call

    @property
    def lending(self) -> Lender:
        """What lends parameters outside of their module's call."""


class Site:
    """One managed module.

    `blocks` must be present while it computes. `main`: its call is the usual way to them (a layer). A site that is not
    `main` has no blocks, or belongs to a module inside of a layer, whose call does nothing of its own unless the module
    is called alone. `encloses`: some site with main=True is inside it.
    """

    def __init__(
        self,
        under_way: UnderWay,
        name: str,
        blocks: tuple[Block, ...],
        *,
        main: bool,
        encloses: bool,
        table: Block | None = None,
        all_experts: "Site | None" = None,
        adapts: bool = False,
    ) -> None:
        self._under_way = under_way
        self.name = name
        self.blocks = blocks
        self.main = main
        self._may_be_inside = bool(blocks) and not main
        self.may_be_idle = len(blocks) == 1 and blocks[0].called is not None
        self.encloses = encloses
        self.table = table  # in which the module looks rows up, which alone travel
        self.all_experts = all_experts  # of a module of experts that travel one by one: of a call that needs all
        self.adapts = adapts  # the module adapts weights of experts, see passes/adapted_experts.py
        self.device = under_way.device
        self.companion: Companion | None = None  # of a whole model: what lives as long as it does
        self.compiled_by: weakref.ref[nn.Module] | None = None  # what torch.compile made around it, until it is called

    def is_inside(self) -> bool:
        """Whether a call does nothing of its own: of a module inside of one whose visit, on this thread, brought all of
        its blocks, or inside of a pass that has all blocks of the model bound. Most calls are such ones.
        """
        under_way = self._under_way
        if under_way.bindings.straight_for == get_ident():
            return not self.main or (not is_grad_enabled() and self.needs_no_visit())
        calls = under_way.calls
        if not calls or not self._may_be_inside or calls[-1].thread != get_ident():
            return False
        for block in self.blocks:  # noqa: SIM110  # a generator would cost more than all the rest
            if not block.users:
                return False
        return True

    def needs_no_visit(self) -> bool:
        """Whether the call of a layer, on the thread of a forward that has all blocks bound, has nothing to bring or to
        keep from autograd. With gradients its output is to be watched all the same.
        """
        if is_autocast_cache_enabled() and is_autocast_enabled(self.device.type):
            return False  # a cache that would keep copies of weights
        if is_grad_enabled() and not saving_is_left_to_autograd():
            return False
        with without_overrides():
            for block in self.blocks:
                if block.look() != block.loaded:
                    return False
        return is_lending(self._under_way.lending)
