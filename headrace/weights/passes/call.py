"""What has one call of a managed module begun? Exactly that ends with the call, whatever happens."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from headrace.runtime.autograd import pop_hooks, saving_is_left_to_autograd
from headrace.weights.movement.block import Block
from headrace.weights.passes.handles import SavedTensors
from headrace.weights.passes.parameter_access import is_lending, lending_leaves
from headrace.weights.passes.site import Site, UnderWay

__all__ = ["Call", "MethodCall", "Passes"]


class Passes(UnderWay, Protocol):
    """What a call asks of the engine: to begin and end the pass and the visit that it is a part of."""

    def begin_pass(
        self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The outermost call begins. Its arguments, on the device."""

    def begin_method(self, call: "MethodCall") -> None:
        """A call of another method than `forward` becomes a pass."""

    def end_pass(self) -> None:
        """The outermost call ends."""

    def visit(self, call: "Call") -> None:
        """The blocks of the call's site come, and are bound."""

    def leave(self) -> None:
        """The innermost visit's call ends."""

    def saved_tensors(self, site: Site) -> SavedTensors:
        """Hooks for what autograd saves in a visit of the site."""


class Call:
    """One call of a managed module: what it has begun, so that exactly this is ended, whatever happens."""

    def __init__(self, engine: Passes, site: Site) -> None:
        self.site = site
        self.blocks: tuple[Block, ...] = ()  # bound until the call ends
        self.lent: list[Block] = []  # of modules that were asked for a parameter
        self.thread = threading.get_ident()
        self._engine = engine
        self._ends: list[Callable[[], object]] = []  # of what was begun, in that order

    def begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call is the outermost one. Returns its arguments, on the device."""
        engine = self._engine
        args, kwargs = engine.begin_pass(self.site, args, kwargs)
        self._ends.append(engine.end_pass)
        return args, kwargs

    def begin_visit(self) -> None:
        """Its blocks come, and what autograd saves of them becomes handles."""
        engine = self._engine
        engine.visit(self)
        self._ends.append(engine.leave)
        with_gradients = torch.is_grad_enabled() or len(engine.calls) == 1  # they may be switched on inside
        if torch.is_grad_enabled() and engine.bindings.straight_for == self.thread and saving_is_left_to_autograd():
            with_gradients = False  # autograd may save weights themselves: they stay
        self._take_part(with_gradients=with_gradients)

    def _take_part(self, *, with_gradients: bool, in_method: bool = False) -> None:
        """From here to its end the call computes with weights: homes are lent, and autograd saves handles."""
        engine = self._engine
        if not is_lending(engine.lending):
            lending = lending_leaves(engine.lending)
            self._ends.append(lending.end)
            lending.begin()
        if torch.is_autocast_enabled(engine.device.type) and torch.is_autocast_cache_enabled():
            # The cache would keep low-precision copies of the weights on the device, also of weights that changed.
            torch.set_autocast_cache_enabled(False)
            self._ends.append(partial(torch.set_autocast_cache_enabled, True))
        if with_gradients:
            engine.saved_tensors(self.site).push(in_method=in_method)
            self._ends.append(pop_hooks)

    def at_its_end(self, end: Callable[[], object]) -> None:
        """Something else has begun that ends with the call."""
        self._ends.append(end)

    def end(self, but: int = 0) -> None:
        """Ends what was begun, in reverse, `but` so many that came first; all of it, whatever is raised meanwhile."""
        if len(self._ends) > but:
            try:
                self._ends.pop()()
            finally:
                self.end(but)


class MethodCall(Call):
    """A call of another method than `forward`, such as `encode`, outside of any pass.

    It is a pass from where it asks a module for a weight or a buffer itself. A call of a module around layers is a pass
    of its own, also in here, and so this one's ends before it, and before an optimizer's step; the next weight begins
    another one.
    """

    def __init__(self, engine: Passes, site: Site, name: str) -> None:
        super().__init__(engine, site)
        self.name = f"{site.name}.{name}"
        self.used = False  # whether it has been a pass
        self.begun = False  # ... and is one now
        self._open = 0  # how many of `_ends` come before those of the pass

    def open(self) -> None:
        """The method is about to run. What nests with what it may open itself begins here."""
        self._take_part(with_gradients=torch.is_grad_enabled(), in_method=True)
        self._open = len(self._ends)

    def begin(self) -> None:
        """The method needs a weight or a buffer: a pass begins, unless one is under way."""
        if not self.begun:
            self._engine.begin_method(self)

    def begin_visit(self) -> None:
        """The visit of the pass that has just begun, which ends with it."""
        self.used = self.begun = True
        self._ends.append(self._engine.end_pass)
        self._engine.visit(self)
        self._ends.append(self._engine.leave)

    def pause(self) -> None:
        """Ends the pass, if one is under way: what the method calls next is no part of it."""
        if self.begun:
            self.begun = False
            self.end(self._open)

    def break_off(self) -> None:
        """Forgets the pass without ending it: the engine has undone it, after an exception."""
        self.begun = False
        del self._ends[self._open :]
