"""What is under way in an offloaded model? A pass, in one of few states, and calls, each of a site: one module that is
tied to the blocks that it needs.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from enum import Enum, auto
from threading import get_ident
from typing import Protocol

import torch
from torch import is_autocast_cache_enabled, is_autocast_enabled, is_grad_enabled, nn

from headrace.errors import StateError
from headrace.runtime.autograd import NO_TASK, backward_task, saving_is_left_to_autograd, without_overrides
from headrace.weights.movement.block import Block
from headrace.weights.passes.parameter_access import Lender, is_lending

__all__ = ["Call", "Companion", "MethodCall", "PassState", "Progress", "Site"]


class PassState(Enum):
    """What is under way."""

    AT_REST = auto()  # modules have homes; nothing is left of any pass
    FORWARD = auto()  # an outermost call
    BETWEEN = auto()  # a forward has ended, and its backward may follow, or another forward before it
    BACKWARD = auto()  # ... maybe inside of a forward
    BROKEN_OFF = auto()  # what was under way is being undone


_NEXT = {
    PassState.AT_REST: {PassState.FORWARD, PassState.BACKWARD},
    PassState.FORWARD: {PassState.BETWEEN, PassState.BACKWARD},
    PassState.BETWEEN: {PassState.AT_REST, PassState.FORWARD, PassState.BACKWARD},
    PassState.BACKWARD: {PassState.AT_REST, PassState.FORWARD},
    PassState.BROKEN_OFF: {PassState.AT_REST},
}


class Progress:
    """What is under way in one model.

    What ends in another way than the states foresee (an exception, Ctrl-C) is undone, and the model is at rest.
    """

    def __init__(self) -> None:
        self.state = PassState.AT_REST
        self.thread = 0  # which made the last outermost call, and waits while its backward is under way
        self.calls: list[Call] = []  # visits whose call is under way, outermost first
        self.methods: dict[int, MethodCall] = {}  # the innermost of each thread, outside of passes
        self.straight_for = 0  # the thread whose forward has everything bound: within it, calls are no visits
        self._process = os.getpid()
        self._over: set[int] = set()  # autograd's numbers of backwards that have nothing left to compute

    def becomes(self, new: PassState) -> None:
        """The pass goes on. Raises StateError where it cannot go on so."""
        if new is not self.state and new not in _NEXT[self.state]:
            raise StateError(f"a pass that is {self.state.name} cannot become {new.name}")
        self.state = new

    @property
    def in_backward(self) -> bool:
        """Whether this thread runs a backward now, and what it calls may be computed again."""
        task = backward_task()
        return task != NO_TASK and task not in self._over

    @contextlib.contextmanager
    def hooks_of_homes(self) -> Iterator[Callable[[], None]]:
        """The backward that this thread runs is over but for hooks, which are user code as outside of it.

        Gives what to call in another backward, within it, that does no more than call them.
        """
        before, self._over = self._over, {*self._over, backward_task()}
        try:
            yield lambda: self._over.add(backward_task())
        finally:
            self._over = before

    @property
    def runs_hooks(self) -> bool:
        """Whether a backward is at its end, and hooks of homes are called."""
        return bool(self._over)

    @property
    def computes(self) -> bool:
        """Whether the model computes: modules that look at parameters only ask what they are."""
        return self.state in (PassState.FORWARD, PassState.BACKWARD)

    @property
    def in_call(self) -> bool:
        """Whether this thread is in a visit's call."""
        return bool(self.calls) and self.calls[-1].thread == get_ident()

    @property
    def is_of_this_process(self) -> bool:
        """Whether the calling process offloaded the model, and was not forked from one that did."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """Raises StateError in a process that was forked from the one that offloaded the model: it can only look."""
        if os.getpid() != self._process:
            raise StateError(
                f"process {self._process} offloaded this model, and this one was forked from it: it can read parameters"
                " and state_dict(), not compute; compute in that process, or load the model here"
            )


class Call:
    """One call of a managed module: what it has begun, so that exactly this is ended, whatever happens."""

    def __init__(self, site: "Site") -> None:
        self.site = site
        self.blocks: tuple[Block, ...] = ()  # bound until the call ends
        self.lent: list[Block] = []  # of modules that were asked for a parameter
        self.thread = get_ident()
        self.ends: list[Callable[[], object]] = []  # of what was begun, in that order

    def end(self, but: int = 0) -> None:
        """Ends what was begun, in reverse, `but` so many that came first; all of it, whatever is raised meanwhile."""
        if len(self.ends) > but:
            try:
                self.ends.pop()()
            finally:
                self.end(but)


class MethodCall(Call):
    """A call of another method than `forward`, such as `encode`, outside of any pass.

    It is a pass from where it asks a module for a weight or a buffer itself. A call of a module around layers is a pass
    of its own, also in here, and so this one's ends before it, and before an optimizer's step; the next weight begins
    another one.
    """

    def __init__(self, site: "Site", name: str) -> None:
        super().__init__(site)
        self.name = f"{site.name}.{name}"
        self.used = False  # whether it has been a pass
        self.begun = False  # ... and is one now
        self._open = 0  # how many of `ends` come before those of the pass

    def opened(self) -> None:
        """What has begun until now nests with what the method may open itself, and outlasts a pass."""
        self._open = len(self.ends)

    def pause(self) -> None:
        """Ends the pass, if one is under way: what the method calls next is no part of it."""
        if self.begun:
            self.begun = False
            self.end(self._open)

    def break_off(self) -> None:
        """Forgets the pass without ending it: the engine has undone it, after an exception."""
        self.begun = False
        del self.ends[self._open :]


class Companion(Protocol):
    """Who offloaded a model, and lives as long as the model does: the handle."""

    def convert(self, model: nn.Module, convert: Callable[[], object]) -> None:
        """The model gets other dtypes by `convert`."""


class Site:
    """One managed module.

    `lender`: of the model's leaves. `blocks` must be present while it computes. `main`: its call is the usual way to
    them (a layer). A site that is not `main` has no blocks, or belongs to a module inside of a layer, whose call does
    nothing of its own unless the module is called alone. `encloses`: some site with main=True is inside it.
    """

    def __init__(
        self,
        progress: "Progress",
        lender: Lender,
        device: torch.device,
        name: str,
        blocks: tuple[Block, ...],
        *,
        main: bool,
        encloses: bool,
        table: Block | None = None,
        all_experts: "Site | None" = None,
        adapts: bool = False,
    ) -> None:
        self._progress, self._lender = progress, lender
        self.device = device
        self.name = name
        self.blocks = blocks
        self.main = main
        self._may_be_inside = bool(blocks) and not main
        self.may_be_idle = len(blocks) == 1 and blocks[0].called is not None
        self.encloses = encloses
        self.table = table  # in which the module looks rows up, which alone travel
        self.all_experts = all_experts  # of a module of experts that travel one by one: of a call that needs all
        self.adapts = adapts  # the module adapts weights of experts, see passes/adapted_experts.py
        self.companion: Companion | None = None  # of a whole model: what lives as long as it does
        self.compiled_by: weakref.ref[nn.Module] | None = None  # what torch.compile made around it, until it is called

    def is_inside(self) -> bool:
        """Whether a call does nothing of its own: of a module inside of one whose visit, on this thread, brought all of
        its blocks, or inside of a pass that has all blocks of the model bound. Most calls are such ones.
        """
        progress = self._progress
        if progress.straight_for == get_ident():
            return not self.main or (not is_grad_enabled() and self.needs_no_visit())
        calls = progress.calls
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
        return is_lending(self._lender)
