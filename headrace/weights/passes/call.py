"""What is under way in an offloaded model? A pass, in one of a few states, and calls, each of them of a site.

A site is one module, tied to the blocks that it needs. While these are bound, modules have leaves in place of homes.
"""

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from threading import get_ident
from typing import Protocol

import torch
from torch import is_autocast_cache_enabled, is_autocast_enabled, is_grad_enabled, nn

from headrace.errors import StateError
from headrace.runtime.autograd import NO_TASK, backward_task, saving_is_left_to_autograd, without_overrides
from headrace.runtime.capture import before_write
from headrace.weights.model.module_buffers import ModuleBuffers
from headrace.weights.movement.block import Block
from headrace.weights.movement.common import CommonHomes
from headrace.weights.movement.executor import Executor
from headrace.weights.movement.flow import GradientFlow
from headrace.weights.movement.residency import Residency
from headrace.weights.passes.parameter_access import Lender, is_lending, waiting_for_homes

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


class PassState(Enum):
    """The state of a model's pass."""

    AT_REST = auto()  # modules have homes; nothing is left of any pass
    FORWARD = auto()  # an outermost call is under way
    BETWEEN = auto()  # a forward has ended, and its backward may follow, or another forward before it
    BACKWARD = auto()  # a backward is under way, maybe inside of a forward
    UNSETTLED = auto()  # the bookkeeping of an end is under way; a pass that finds this was cut short


_NEXT = {  # and UNSETTLED, which may follow any state, and comes between when a forward or a backward ends
    PassState.AT_REST: {PassState.FORWARD, PassState.BACKWARD},
    PassState.FORWARD: {PassState.BACKWARD},
    PassState.BETWEEN: {PassState.FORWARD, PassState.BACKWARD},
    PassState.BACKWARD: set(),
    PassState.UNSETTLED: {PassState.AT_REST, PassState.BETWEEN, PassState.FORWARD},
}


@dataclass(eq=False)
class Passes:
    """The passes of one model: its blocks, what moves them, and what is under way.

    A pass that ends in a way that the states do not foresee (an exception, Ctrl-C) is undone: the model is at rest.
    """

    device: torch.device
    blocks: list[Block]  # those that come and go
    residents: list[Block]
    residency: Residency
    executor: Executor
    gradients: GradientFlow
    buffers: ModuleBuffers
    common: CommonHomes | None = None

    def __post_init__(self) -> None:
        self.state = PassState.AT_REST  # only `becomes` changes it
        self.thread = 0  # the one that made the last outermost call, and waits while its backward is under way
        self.calls: list[Call] = []  # visits whose call is under way, outermost first
        self.methods: dict[int, MethodCall] = {}  # the innermost method call of each thread
        self.straight_for = 0  # the thread whose forward has everything bound: within it, calls are no visits
        self._process = os.getpid()
        self._bound: list[tuple[Bindable, ...]] = []  # what a forward has bound, and what a backward within it has
        self._updates = contextlib.ExitStack()  # holds, while homes are being updated, what makes others wait
        self._updating = False
        weakref.finalize(self, self._updates.close)
        self._over: set[int] = set()  # autograd's numbers of backwards that have nothing left to compute

    def all_blocks(self) -> list[Block]:
        """The blocks that come and go, and those that stay."""
        return [*self.blocks, *self.residents]

    def becomes(self, new: PassState) -> None:
        """Moves the pass on to another state. Raises StateError where that cannot follow the present one."""
        if new not in (self.state, PassState.UNSETTLED) and new not in _NEXT[self.state]:
            raise StateError(f"a pass that is {self.state.name} cannot become {new.name}")
        self.state = new

    def settle(self, new: PassState) -> None:
        """Moves the pass on to `new` at an end that may come in any state."""
        self.becomes(PassState.UNSETTLED)
        self.becomes(new)

    @property
    def in_backward(self) -> bool:
        """Whether this thread runs a backward now, so that what it calls may be a recomputation."""
        task = backward_task()
        return task != NO_TASK and task not in self._over

    @contextlib.contextmanager
    def hooks_of_homes(self) -> Iterator[Callable[[], None]]:
        """Inside, this thread's backward has only hooks of homes left to call: user code, as outside of a backward.

        Yields a function to call inside of a nested backward that does no more than call such hooks.
        """
        before, self._over = self._over, {*self._over, backward_task()}
        try:
            yield lambda: self._over.add(backward_task())
        finally:
            self._over = before

    @property
    def runs_hooks(self) -> bool:
        """Whether a backward is at its end, where hooks of homes are called. Ctrl-C may have left a note of one: the
        thread that ran it knows that it is over.
        """
        return bool(self._over) and (get_ident() != self.thread or backward_task() in self._over)

    @property
    def computes(self) -> bool:
        """Whether the model computes: modules look at parameters then to see what they are, not for their values."""
        return self.state in (PassState.FORWARD, PassState.BACKWARD)

    @property
    def in_call(self) -> bool:
        """Whether this thread is inside the call of a visit."""
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

    # from the beginning of a pass, or of a backward, to its end -------------------------------------------------------
    def bind_to_the_end(self, *, forward_on: int = 0) -> None:
        """Brings and binds residents and buffers. `forward_on`: the thread of a forward; 0: a backward begins.

        A forward for which everything is on the device, and nothing has to come or go, has all blocks bound as well:
        the calls of layers then bring nothing.
        """
        for block in self.all_blocks():
            if block.may_stay_at_home and block.model_writes is not False:  # what it writes is in the homes at once
                before_write(param.home for param in block.params)
        self.executor.bring_back(self.residents)
        everything = bool(forward_on) and self.executor.everything_is_here
        blocks = *self.residents, *(self.executor.shares.whole_blocks if everything else ())
        bound = *blocks, self.buffers
        bind(bound, adopts=bool(forward_on))
        self._bound.append(bound)
        if everything and is_grad_enabled():
            for block in blocks:
                block.may_be_saved = True
        self.straight_for = forward_on if everything else 0

    def release_at_the_end(self) -> None:
        """Releases what the last `bind_to_the_end` has bound."""
        self.straight_for = 0
        if self._bound:
            release(self._bound[-1])
            self._bound.pop()

    def reset_bound(self) -> None:
        """Leaves bound only what the calls under way and the forward around them need; all calls are visits."""
        calls = [call.blocks for call in self.calls]
        self.straight_for = 0
        del self._bound[1 if calls else 0 :]  # but for the forward's, while that is under way
        users: Counter[Bindable] = Counter(block for blocks in (*calls, *self._bound) for block in blocks)
        for block in self.all_blocks():
            block.lent = False
        everything: list[Bindable] = [*self.all_blocks(), self.buffers]
        for bound in everything:
            if bound.users and not users[bound]:
                bound.unbind()
            bound.users = users[bound]

    # updates of homes by optimizers -----------------------------------------------------------------------------------
    def updates_changed(self) -> None:
        """Updates began or ended. While any is under way, a torch function that takes a home waits for its update."""
        pending = False
        for block in self.all_blocks():
            if block.updates and block.being_updated:
                pending = True
        if pending and not self._updating:
            self._updates.enter_context(waiting_for_homes())
        elif self._updating and not pending:
            self._updates.close()
        self._updating = pending

    def wait_for_updates(self) -> None:
        """The host waits until no optimizer writes any home."""
        for block in self.all_blocks():
            block.wait_for_updates()
        self.updates_changed()


class Call:
    """One call of a managed module. It records what it has begun, so that just this is ended, whatever happens."""

    def __init__(self, site: "Site", *, recomputes: bool = False) -> None:
        self.site = site
        self.recomputes = recomputes  # whether a backward makes it
        self.blocks: tuple[Block, ...] = ()  # bound until the call ends
        self.lent: list[Block] = []  # blocks that came without a call of their module; they go back when this one ends
        self.thread = get_ident()
        self.ends: list[Callable[[], object]] = []  # each ends one thing that was begun; in the order of beginning

    def end(self, but: int = 0) -> None:
        """Ends what was begun, in reverse order, except the first `but` things, whatever is raised meanwhile."""
        while len(self.ends) > but:
            try:
                self.ends.pop()()
            except BaseException:
                self.end(but)
                raise


class MethodCall(Call):
    """A call of another method than `forward`, such as `encode`, outside of any pass.

    It becomes a pass when it asks a module for a weight or a buffer itself. That pass ends before the method calls a
    module around layers, whose call is a pass of its own, and before an optimizer's step; the next weight that the
    method asks for begins another pass.
    """

    def __init__(self, site: "Site", name: str) -> None:
        super().__init__(site)
        self.name = f"{site.name}.{name}"
        self.used = False  # whether it has been a pass
        self.begun = False  # whether it is a pass now
        self._open = 0  # how many entries of `ends` come before those of the pass

    def opened(self) -> None:
        """Notes that what has begun until now outlasts the method's passes, and nests with what the method opens."""
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
    """The object that offloaded a model, and lives as long as the model does: the handle."""

    def convert(self, model: nn.Module, convert: Callable[[], object]) -> None:
        """Converts the model to other dtypes by a call of `convert`."""


@dataclass(eq=False)
class Site:
    """One managed module of the model of these `passes`."""

    passes: Passes
    lender: Lender  # lends the model's leaves
    name: str
    blocks: tuple[Block, ...]  # they must be present while the module computes
    # Whether calling this module is what brings `blocks` (a layer's). Otherwise they are those of the layer around it,
    # whose call has brought them already; they are brought here only if the module is called by itself.
    main: bool
    encloses: bool  # whether a `main` site lies below this one, as below the whole model
    table: Block | None = None  # the table in which the module looks rows up; only its rows travel
    all_experts: "Site | None" = None  # for calls that need all of the module's experts, which travel one by one
    adapts: bool = False  # whether the module adapts weights of experts, see passes/expert_dispatch.py
    companion: Companion | None = None  # at a whole model: what lives as long as the model
    compiled_by: "weakref.ref[nn.Module] | None" = None  # torch.compile's module around it, until the call

    def __post_init__(self) -> None:
        self._may_be_inside = not self.main and (bool(self.blocks) or not self.encloses)
        self.may_be_idle = len(self.blocks) == 1 and self.blocks[0].expert_key is not None

    def is_inside(self) -> bool:
        """Whether a call of the module has nothing to do, like most: a visit on this thread has brought all of the
        module's blocks, or the pass has all blocks of the model bound.
        """
        passes = self.passes
        if passes.straight_for == get_ident():
            return not self.main or (not is_grad_enabled() and self.needs_no_visit())
        calls = passes.calls
        if not calls or not self._may_be_inside or calls[-1].thread != get_ident():
            return False
        for block in self.blocks:  # noqa: SIM110  # a generator would cost more than all the rest
            if not block.users:
                return False
        return True

    def needs_no_visit(self) -> bool:
        """Whether a layer's call has nothing to bring, nor to keep from autograd. Asked on the thread of a forward that
        has all blocks bound. With gradients, the call's output is still to be watched.
        """
        if is_autocast_cache_enabled() and is_autocast_enabled(self.passes.device.type):
            return False  # the cache would keep copies of weights
        if is_grad_enabled() and not saving_is_left_to_autograd():
            return False
        with without_overrides():
            for block in self.blocks:
                if block.look() != block.loaded_generation:
                    return False
        return is_lending(self.lender)
