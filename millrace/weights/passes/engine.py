"""What happens at a visit? The engine: calls of managed modules, backward, gradients, and what follows from errors.

Forward: a site's call makes its blocks present, binds their leaves, and packs what autograd saves into handles.
Backward needs no hooks on modules: the first unpack of anything that a site saved is the beginning of its backward.
See docs/design/engine.md.
"""

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from millrace.errors import StateError
from millrace.planning import Phase
from millrace.runtime.autograd import EndOfBackward, in_backward, without_overrides
from millrace.runtime.tensors import tensors_in
from millrace.runtime.threads import on_own_thread
from millrace.weights.model.module_buffers import ModuleBuffers
from millrace.weights.model.slot import REMOVED, Slot
from millrace.weights.movement.block import Block, Presence
from millrace.weights.movement.executor import Executor
from millrace.weights.movement.gradients import Gradients
from millrace.weights.movement.residency import Residency
from millrace.weights.passes.call import Bindable, Call, bind, release
from millrace.weights.passes.handles import SavedTensors, pop_left_over, saving_is_left_to_autograd
from millrace.weights.passes.handover import Handover
from millrace.weights.passes.lending import Lending
from millrace.weights.passes.process import OwnProcess
from millrace.weights.passes.site import Site
from millrace.weights.passes.state import PassState
from millrace.weights.passes.stray import lending_leaves, stop_lending, waiting_for_homes

__all__ = ["Engine"]

_WATCHED = "_millrace_watched"  # attribute of tensors whose gradient announces the backward of a site


class Engine:
    """Runs the visits of one offloaded model."""

    def __init__(
        self,
        device: torch.device,
        blocks: Sequence[Block],
        residents: Sequence[Block],
        residency: Residency,
        executor: Executor,
        gradients: Gradients,
        buffers: ModuleBuffers,
    ) -> None:
        self.device = device
        self.blocks = list(blocks)
        self.residents = list(residents)
        self.buffers = buffers
        self._buffer_bytes = 0  # of those: taken off the budget for blocks already
        self.before_call: Callable[[], None] = lambda: None  # the outermost call is about to begin
        self._residency = residency
        self._executor = executor
        self._gradients = gradients
        self.calls: list[Call] = []  # visits whose call is under way, outermost first
        self.lending = Lending(executor, residency, self.calls)
        self._handover = Handover(device, residency)
        self._state = PassState.AT_REST
        self.everything_is_bound = False  # for the whole pass, or backward, that is under way
        self.straight_for = 0  # the thread whose pass has everything bound: within it, calls are no visits
        self._giving: object = None  # the block that gives gradients
        self._claims: dict[str, int] = {}  # the thread whose outermost call is under way
        self._ending: Callable[[], EndOfBackward | None] = lambda: None  # gone when autograd is done with a backward
        self._pass_thread = 0  # which thread made the last outermost call, and so waits while its backward is under way
        self._backward_site: Site | None = None  # whose backward is under way
        self._backward: object | None = None  # the one under way
        self._recomputing = contextlib.ExitStack()  # while a backward is under way: functions may be called again in it
        self._guard = contextlib.ExitStack()  # while homes are being updated
        self._guarded = False
        self._released = False
        weakref.finalize(self, self._guard.close)
        self.process = OwnProcess()
        self._settling = threading.RLock()  # a backward that raised may end on autograd's thread, during the next pass
        for block in (*blocks, *residents):
            self._adopt(block)

    @property
    def state(self) -> PassState:
        """What is under way."""
        return self._state

    @state.setter
    def state(self, new: PassState) -> None:
        if new is not self._state and not self._state.may_become(new):
            raise StateError(f"a pass that is {self._state.name} cannot become {new.name}")
        self._state = new

    def _adopt(self, block: Block) -> None:
        """The gradients of a block come here."""
        with without_overrides():  # a leaf that is away
            for slot in block.slots:
                slot.on_gradient = self._gradient_ready
                slot.follow_requires_grad()
        self.lending.add(block)

    def check_resident(self, what: str, nbytes: int) -> None:
        """Raises BudgetError when what came later and stays leaves no room beside it for the largest block."""
        largest = max(self.blocks, key=lambda block: block.nbytes, default=None)
        if largest is not None:
            self._residency.check_resident(what, nbytes, largest)

    def buffers_are_budgeted(self) -> None:
        """The budget for blocks is what buffers leave of it, as they are now."""
        self._buffer_bytes = self.buffers.nbytes

    def _follow_buffers(self) -> None:
        """Buffers of modules that came later leave less of the budget to blocks."""
        grown_bytes = self.buffers.nbytes - self._buffer_bytes
        if grown_bytes:
            self.check_resident("buffers of modules", grown_bytes)
            self._buffer_bytes += grown_bytes
            self._residency.shrink(grown_bytes)
            self._executor.replan()

    def add_resident(self, block: Block) -> None:
        """A block that came with a change of the model stays on the device from the next pass on."""
        self.residents.append(block)
        self._adopt(block)
        self._executor.bring(block)
        self._executor.replan()

    # calls ------------------------------------------------------------------------------------------------------------
    def call(self, site: Site, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A managed module was called. Outermost calls begin a pass over the model; calls of sites are visits."""
        self.process.check()
        recomputing = in_backward()
        if not recomputing:
            self._claim()
        outermost = not self.calls and not recomputing
        if not outermost and not self._is_visit(site):
            return forward(*args, **kwargs)
        call = Call(self, site)
        try:
            if outermost:
                args, kwargs = call.begin_pass(args, kwargs)
            elif not self.calls:  # a hook of backward may call the model, too
                args, kwargs = self._handover.inputs(args, kwargs)
            call.begin_visit()
            output = self._handover.output(forward(*args, **kwargs), outermost=outermost)
            call.end()
        except BaseException:
            try:
                call.end()
            finally:
                if outermost:  # an interrupt may have hit the bookkeeping itself: nothing may seem to be under way
                    self._recover()
                    self._claims.clear()
            raise
        if torch.is_grad_enabled():
            self._watch_output(site, output)
        return output

    def _claim(self) -> None:
        """Passes of one model follow each other. Raises StateError where another thread's is under way."""
        this = threading.get_ident()
        owner = self._claims.setdefault("pass", this)  # in one go, whatever other threads do
        if owner == this and self._backward is not None and self._ending() is not None:
            owner = self._pass_thread
        if owner != this:
            if self._claims["pass"] == this:
                self._claims.clear()
            raise StateError(
                f"the model is computing on thread {owner} and was called on thread {this}; blocks come and go for one"
                " pass at a time: hold a threading.Lock from forward to the end of backward, or offload a copy for each"
            )

    def _is_visit(self, site: Site) -> bool:
        """Whether a call inside another one brings blocks of its own.

        Recomputation must pack exactly what forward packed (a checkpoint counts), so it decides as forward did: a
        module inside a layer is no visit if the layer is bound, whether by its call or by its backward.
        """
        if not site.blocks:
            # An enclosing module is a visit so that what it borrows goes back when it ends. A reentrant checkpoint
            # recomputes with no hooks on top, so its calls push ours.
            return site.encloses or (not self.calls and in_backward() and saving_is_left_to_autograd())
        if not site.main and all(block.users for block in site.blocks):  # as Site.is_inside, on whatever thread
            return False
        called = {block for call in self.calls for block in call.blocks}
        return not called.issuperset(site.blocks)

    def _watch_output(self, site: Site, output: Any) -> None:
        """The gradient of an output comes before any unpack of the site: an early word that its backward begins.

        Not the gradient of a tensor that another site made and this one hands on (T5's position bias).
        """
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None and not hasattr(tensor, _WATCHED):
                setattr(tensor, _WATCHED, True)
                tensor.register_hook(lambda _gradient: self.begin_backward_of(site))

    def release_everything(self) -> None:
        """Homes are bound everywhere; nothing is under way, and nothing will be."""
        self._recover()
        self.buffers.release()
        self._released = True

    # backward ---------------------------------------------------------------------------------------------------------
    def begin_backward_of(self, site: Site) -> None:
        """Something of the site's forward is needed by backward: its blocks come, and those of the last site may go."""
        if site is self._backward_site or not in_backward():
            return
        if self._released:
            raise StateError(REMOVED)
        self._expect_end_of_backward()
        if not site.blocks:
            return
        with without_overrides():
            self._gradients.leave_block()
            last, self._backward_site = self._backward_site, None
            if last is not None:
                release(last.blocks)
            self.lending.end_of_visit()
            self._executor.visit(site.blocks, Phase.BACKWARD, site.name)
            bind(site.blocks)
            self._backward_site = site

    def require(self, block: Block) -> None:
        """Backward needs a block that its site did not bring."""
        if block.presence in (Presence.ABSENT, Presence.RESERVED):
            with without_overrides():
                self._executor.visit((block,), Phase.BACKWARD, block.name)
        elif block.presence is Presence.ARRIVING and block.stale:  # what comes may be of neither contents
            with without_overrides():
                self._executor.bring(block)
        self._residency.arrive(block)

    def _gradient_ready(self, slot: Slot) -> None:
        self._expect_end_of_backward()  # a block that saves nothing is never unpacked
        with without_overrides():
            if self._executor.everything_fits and slot.unit is not self._giving:
                self._giving = slot.unit
                self._gradients.leave_block()
            self._gradients.take(slot)

    def _expect_end_of_backward(self) -> None:
        """Once for the outermost backward: nested ones (reentrant checkpoints) end inside of it."""
        if self._backward is None:
            self._gradients.abandon()  # what is left of a backward whose end was interrupted
            self._backward_site = None
            backward = object()
            end = EndOfBackward(functools.partial(self.end_of_backward, backward))
            end.queue()
            self._backward, self._ending = backward, weakref.ref(end)
            self.state = PassState.BACKWARD
            self._executor.begin_backward()
            if self._executor.everything_fits:  # autograd itself may have saved what homes no longer hold
                self._bring(self.blocks)
            self._begin_residents()
            self.updates_changed()
            self._recomputing.enter_context(lending_leaves(self.lending))

    def end_of_backward(self, backward: object, *, completed: bool) -> None:
        """Backward returned, or raised: homes are bound again; gradients are delivered, or dropped.

        Autograd may let go of a backward that raised on any thread. On one of ours, which what is done here waits for,
        nothing is done: the next look or pass finds that it is over.
        """
        if not completed and on_own_thread():
            return
        with self._settling:
            if backward is not self._backward:
                return
            try:
                self._finish_backward(completed=completed)
            except BaseException:
                if not self.calls:
                    self._recover()
                raise

    def wait_until_free(self) -> None:
        """The host may read and write all homes: no copy reads them, no optimizer writes them."""
        for block in (*self.blocks, *self.residents):
            block.wait_until_free()

    def wait_for_updates(self) -> None:
        """The host waits until no optimizer writes any home."""
        for block in (*self.blocks, *self.residents):
            block.wait_for_updates()
        self.updates_changed()

    def updates_changed(self) -> None:
        """Updates began or ended: while there are any, torch functions that take a home wait for its own."""
        pending = any(block.being_updated for block in (*self.blocks, *self.residents))
        if pending and not self._guarded:
            self._guard.enter_context(waiting_for_homes(Slot.wait_for_updates))
        elif self._guarded and not pending:
            self._guard.close()
        self._guarded = pending

    def settle(self, *, updates: bool = True) -> None:
        """The user looks at the model: a backward that raised is over, even if autograd's thread still holds it.

        With `updates`, the user also sees what every optimizer step has done.
        """
        if updates and not self.state.computes:
            self.wait_for_updates()
        over = self._backward is not None and not in_backward() and threading.get_ident() == self._pass_thread
        if over and self.process.is_this:
            self._recover()

    def _finish_backward(self, *, completed: bool) -> None:
        self._recomputing.close()
        self._backward = None
        self.state = PassState.ENDING
        if self._backward_site is not None:
            release(self._backward_site.blocks)
            self._backward_site = None
        self.lending.end_of_visit()
        self._release_standing()
        if completed:
            self._gradients.leave_block()
            self._executor.end_cycle()
            self._gradients.deliver()
            self.updates_changed()
        else:
            self._executor.abandon_cycle()
            self._drop_gradients()
            self._bind_for_calls()  # an interrupt may have struck between a release and its note
        self.state = PassState.FORWARD if self.calls else PassState.AT_REST

    def _bind_for_calls(self) -> None:
        """Blocks are bound exactly for the calls under way."""
        users: Counter[Bindable] = Counter(block for call in self.calls for block in call.blocks)
        if self.calls:
            users.update(self._standing())
        self._everything_is_bound(bool(self.calls) and self._executor.everything_is_here)
        for block in (*self.blocks, *self.residents):
            block.lent = False
        everything: list[Bindable] = [*self.blocks, *self.residents, self.buffers]
        for bound in everything:
            if bound.users and not users[bound]:
                bound.unbind()
            bound.users = users[bound]

    def _drop_gradients(self) -> None:
        """What an unfinished backward computed, also where autograd had set it and an interrupt kept it from us."""
        with without_overrides():
            for block in (*self.blocks, *self.residents):
                for slot in block.slots:
                    slot.leaf.grad = None
        self._gradients.abandon()

    # passes -----------------------------------------------------------------------------------------------------------
    def begin_pass(
        self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The outermost call: residents are renewed and bound, inputs come to the device."""
        if self.state is not PassState.AT_REST or not self._residency.intact:
            self._recover()
        self.state = PassState.FORWARD
        self._pass_thread = threading.get_ident()
        self.before_call()
        self._follow_buffers()
        if torch.is_grad_enabled():
            self._gradients.prepare([*self.residents, *self.blocks])
        self._executor.begin_pass(site.name, visits_are_needed=not saving_is_left_to_autograd())
        self._begin_residents()
        if self.autograd_saves_weights():
            for block in (*self.blocks, *self.residents):
                block.saved_by_autograd = True
        return self._handover.inputs(args, kwargs)

    def end_pass(self) -> None:
        """The outermost call ends: what its copies read of homes has been read, so homes may be written."""
        self.state = PassState.BETWEEN
        self._release_standing()
        self._executor.end_pass()
        self._residency.wait_for_consumed_reads()
        if not torch.is_grad_enabled():  # no backward follows
            self.state = PassState.AT_REST
        self._claims.clear()

    def _recover(self) -> None:
        """After an interrupt amid bookkeeping, or a backward that raised: nothing stays bound or pending."""
        with self._settling:
            self._state = PassState.BETWEEN
            self.calls.clear()
            self._backward_site = None
            pop_left_over(self._residency)
            stop_lending(self.lending)
            self.lending.forget()
            self._bind_for_calls()
            if self._backward is not None:
                self._backward = None
                self._executor.abandon_cycle()
            self._residency.mend((*self.blocks, *self.residents))
            self._drop_gradients()
            self._state = PassState.AT_REST

    def _begin_residents(self) -> None:
        self._bring(self.residents)
        bind(self._standing())
        self._everything_is_bound(self._executor.everything_is_here)

    def _bring(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._executor.bring(block)
            self._residency.arrive(block)

    def _standing(self) -> tuple[Bindable, ...]:
        """What is bound from the beginning of a pass to its end."""
        if self._executor.everything_is_here:
            return (*self.residents, self.buffers, *self.blocks)
        return (*self.residents, self.buffers)

    def _everything_is_bound(self, is_bound: bool) -> None:
        self.everything_is_bound = is_bound
        self.straight_for = self._pass_thread if is_bound and self.state is PassState.FORWARD else 0

    def _release_standing(self) -> None:
        self._everything_is_bound(False)
        release(self._standing())

    def autograd_saves_weights(self) -> bool:
        """Whether a visit leaves it to autograd to save weights: their memory stays, and nobody else saves."""
        return self._executor.everything_fits and saving_is_left_to_autograd()

    def saved_tensors(self, site: Site) -> SavedTensors:
        """Hooks for what autograd saves in a visit of the site."""
        return SavedTensors(self._residency, self.device, lambda: self.begin_backward_of(site), self.require)

    def visit(self, call: Call) -> None:
        """A site's call, or its recomputation, makes its blocks present."""
        site = call.site
        with without_overrides():  # a look at a home is our own
            if in_backward():
                self.begin_backward_of(site)
            elif site.blocks:
                self._executor.visit(site.blocks, Phase.FORWARD, site.name)
            self.calls.append(call)
            call.hold(site.blocks)

    def leave(self) -> None:
        """The innermost visit's call ends."""
        with without_overrides():
            call = self.calls.pop()
            release(call.blocks)
            for block in call.lent:
                block.take_back()
