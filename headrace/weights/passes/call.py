"""What has one call of a managed module begun? Exactly that ends with the call, whatever happens."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headrace.weights.movement.block import Block
from headrace.weights.passes.binding import bind
from headrace.weights.passes.site import Site
from headrace.weights.passes.stray import is_lending, lending_leaves

if TYPE_CHECKING:
    from headrace.weights.passes.engine import Engine

__all__ = ["Call"]


class Call:
    """One call of a managed module: what it has begun, so that exactly this is ended, whatever happens."""

    def __init__(self, engine: "Engine", site: Site) -> None:
        self.site = site
        self.blocks: tuple[Block, ...] = ()  # bound until the call ends
        self.lent: list[Block] = []  # of modules that were asked for a parameter
        self.thread = threading.get_ident()
        self._engine = engine
        self._ends: list[Callable[[], object]] = []  # of what was begun, in that order

    def begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """It is the outermost call."""
        engine = self._engine
        args, kwargs = engine.begin_pass(self.site, args, kwargs)
        self._ends.append(engine.end_pass)
        return args, kwargs

    def begin_visit(self) -> None:
        """Its blocks come, and what autograd saves of them becomes handles."""
        engine = self._engine
        engine.visit(self)
        self._ends.append(engine.leave)
        if not is_lending(engine.lending):
            lending = lending_leaves(engine.lending)
            self._ends.append(lending.end)
            lending.begin()
        if torch.is_autocast_enabled(engine.device.type) and torch.is_autocast_cache_enabled():
            # The cache would keep low-precision copies of the weights on the device, also of weights that changed.
            torch.set_autocast_cache_enabled(False)
            self._ends.append(partial(torch.set_autocast_cache_enabled, True))
        if torch.is_grad_enabled() or len(engine.calls) == 1:  # gradients may be switched on inside
            saved = engine.saved_tensors(self.site)
            saved.push()
            self._ends.append(saved.pop)

    def at_its_end(self, end: Callable[[], object]) -> None:
        """Something else has begun that ends with it."""
        self._ends.append(end)

    def hold(self, blocks: Sequence[Block]) -> None:
        """These blocks stay bound until the call ends."""
        bind(blocks)
        self.blocks = (*self.blocks, *blocks)

    def end(self) -> None:
        """Ends what was begun, in reverse; all of it, whatever is raised meanwhile."""
        if self._ends:
            try:
                self._ends.pop()()
            finally:
                self.end()
