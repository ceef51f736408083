"""What happens at a visit? The engine: calls of managed modules, passes, and what follows from errors.

In forward, a site's call makes its blocks present, binds their leaves, and packs what autograd saves into handles.
See backward.py for what backward does with these, and docs/design/engine.md.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from headrace.errors import BudgetError, StateError
from headrace.memory.ledger import Tier
from headrace.planning import Phase
from headrace.runtime.autograd import innermost_transform, pop_hooks, saving_is_left_to_autograd, without_overrides
from headrace.runtime.device import is_capturing
from headrace.runtime.fibers import calling_thread
from headrace.runtime.pending import StateHolder
from headrace.runtime.tensors import tensors_in
from headrace.weights.movement.batch_sums import BatchSums
from headrace.weights.movement.block import Block
from headrace.weights.movement.optimizer_state import OptimizerStates
from headrace.weights.movement.room import Room
from headrace.weights.passes.backward import Backward
from headrace.weights.passes.call import Call, MethodCall, Passes, PassState, Site, bind, release
from headrace.weights.passes.expert_dispatch import ExpertDispatch
from headrace.weights.passes.graph_segments import in_one_backward
from headrace.weights.passes.handles import SavedTensors, pop_left_over
from headrace.weights.passes.handover import handed_out, to_device
from headrace.weights.passes.lending import Lending, is_idle
from headrace.weights.passes.lookup import Lookups
from headrace.weights.passes.parameter_access import is_lending, lending_leaves, stop_lending
from headrace.weights.passes.row_gradients import RowGradients


class Together(Protocol):
    """Several micro-batches that take turns at blocks."""

    def arrive(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The micro-batch that computes calls a site with blocks. Waits for its turn, and returns its arguments."""

    def note_use(self, *blocks: Block) -> None:
        """Notes that the micro-batch that computes uses these blocks, or parts of them."""


class _Loan:
    """Device memory that an optimizer has, as long as it has it."""


class Engine:
    """Runs the visits of one offloaded model, `name`."""

    def __init__(self, name: str, passes: Passes) -> None:
        self.name = name
        self.passes = passes
        self._residency, self._executor = passes.residency, passes.executor
        self._buffer_bytes = 0  # the bytes of modules' buffers that have been taken off the budget for blocks
        self.before_call: Callable[[], None] = lambda: None  # called when a pass begins; set by `Attachment`
        self.lending = Lending(passes, self._begin_method)
        self._lent: list[tuple[weakref.ref[torch.Tensor], int]] = []  # device memory of optimizers, and its bytes
        self._states = OptimizerStates(self._residency.ledger)
        self._claims: dict[str, int] = {}  # under "pass", the thread whose outermost call is under way
        self.backward = Backward(passes, self.lending, self._recover)
        self.row_gradients = RowGradients(self.backward)
        self.lookups = Lookups(self.lending, self.row_gradients)
        self.experts = ExpertDispatch(self.lending, self.row_gradients, self.call)
        self.room: Room | None = None  # for what needs host memory, where blocks can move to disk
        self.together: Together | None = None  # several micro-batches, whose forwards are under way
        for block in passes.all_blocks():
            self._adopt(block)

    def _adopt(self, block: Block) -> None:
        """Lends a block's leaves, and takes their gradients, from now on."""
        block.manager = self
        with without_overrides():  # a leaf may be away
            for param in block.params:
                param.on_gradient = self.backward.on_gradient
                param.prepare_leaf()
        self.lending.add(block)

    def check_resident(self, what: str, nbytes: int) -> None:
        """Raises BudgetError if what was added later, and stays, leaves no room for the largest block."""
        whole = [block for block in self.passes.blocks if not block.travels_in_parts]
        largest = max(whole, key=lambda block: block.nbytes, default=None)
        if largest is not None:
            self._residency.check_resident(what, nbytes, largest)

    def _take_off_budget(self, what: str, nbytes: int) -> None:
        """Lowers the blocks' budget by bytes that stay. Raises BudgetError as `check_resident` does."""
        self.check_resident(what, nbytes)
        self._residency.shrink(nbytes)
        self._executor.replan()

    def note_buffers_budgeted(self) -> None:
        """Notes how many bytes modules' buffers take. The budget for blocks has been made without these bytes."""
        self._buffer_bytes = self.passes.buffers.nbytes

    def _follow_buffers(self) -> None:
        """Lowers the blocks' budget by the bytes of buffers that came later."""
        grown_bytes = self.passes.buffers.nbytes - self._buffer_bytes
        if grown_bytes:
            self._buffer_bytes += grown_bytes  # first: Ctrl-C must not let them be taken off twice
            try:
                self._take_off_budget("buffers of modules", grown_bytes)
            except BudgetError:
                self._buffer_bytes -= grown_bytes
                raise

    def lend_device_memory(self, nbytes: int) -> torch.Tensor:
        """Called by optimizers: see `runtime.pending.Manager`."""
        freed_bytes = sum(size for memory, size in self._lent if memory() is None)
        self._lent = [(memory, size) for memory, size in self._lent if memory() is not None]
        self._residency.shrink(-freed_bytes)
        self._take_off_budget('an optimizer\'s updates on the device (update="device")', nbytes)
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.passes.device)
        except torch.OutOfMemoryError:
            self._residency.shrink(-nbytes)
            raise
        memory.headrace_loan = loan = _Loan()  # type: ignore[attr-defined]  # which ends with the memory
        self._residency.ledger.book(loan, Tier.DEVICE, "optimizer", nbytes)
        self._lent.append((weakref.ref(memory), nbytes))
        return memory

    def hold_state(self, holder: StateHolder, nbytes: Callable[[], int]) -> None:
        """Called by optimizers: see `runtime.pending.Manager`."""
        with without_overrides():
            self._states.hold(holder, nbytes, self._make_room)

    def _make_room(self, nbytes: int) -> None:
        """Moves own blocks to disk until host memory has room for `nbytes`, or no more can go."""
        if self.room is not None and not self.passes.computes:
            self.passes.wait_for_updates()
            self.room.make_room(nbytes)

    def _take_back_device_memory(self) -> None:
        """Ends all loans. The memory is empty from then on, and an optimizer's next step asks for other."""
        if any(memory() is not None for memory, _ in self._lent):
            torch.accelerator.synchronize(self.passes.device)  # updates may be in it
        for lent, nbytes in self._lent:
            memory = lent()
            if memory is not None:
                memory.untyped_storage().resize_(0)
                del memory.headrace_loan  # type: ignore[attr-defined]
            self._residency.shrink(-nbytes)
        self._lent = []

    # a budget that other models have as well --------------------------------------------------------------------------
    @property
    def device_bytes(self) -> int:
        """See `memory.shared_budget.Member`, here and below."""
        return self._residency.device_bytes

    @property
    def computes_on(self) -> int | None:
        # A hook of its backward may call another model, on autograd's thread, while the backward waits.
        computes = self.passes.computes and not self.passes.in_backward
        return self._claims.get("pass", self.passes.thread if computes else None)

    @property
    def movable_host_bytes(self) -> int:
        return 0 if self.room is None else self.room.movable_bytes

    def give_way_on_host(self, nbytes: int) -> None:
        with without_overrides(), contextlib.suppress(BudgetError):  # of this model, and another one asks
            self._make_room(nbytes)

    def give_way(self, nbytes: int) -> None:
        with without_overrides():
            self._residency.give_way(nbytes)

    def sleep(self, *, disk: str | os.PathLike[str] | None = None) -> None:
        """`disk`: the model's, to which blocks and its optimizers' state move from host memory. None: they stay."""
        self.passes.wait_for_updates()
        with without_overrides():
            self._executor.sleep(computes=self.passes.computes)
        self.passes.buffers.sleep()
        self._take_back_device_memory()
        if disk is not None and self.room is not None:
            self._states.sleep(disk)
            with without_overrides():
                self.room.sleep()

    def wake(self) -> None:
        """Brings back what `sleep` took, as far as there is room; copies may be under way then."""
        self._claim()
        try:
            self._states.wake()
            with without_overrides():
                self._residency.pass_begins()
                if self.room is not None:
                    self.room.wake()
                for block in self.passes.residents:
                    self._executor.bring(block)
                self._executor.load_ahead()
        finally:
            self._residency.pass_ends()
            self._claims.clear()

    def add_resident(self, block: Block) -> None:
        """Takes in a block that came with a change of the model: it stays on the device from the next pass on."""
        self.passes.residents.append(block)
        self._adopt(block)
        self._executor.bring(block)
        self._executor.replan()

    # calls ------------------------------------------------------------------------------------------------------------
    def call(
        self,
        site: Site,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the call of a managed module. An outermost call begins a pass; a call that needs blocks is a visit."""
        self.passes.check_process()
        call, outermost = Call(site, recomputes=self.passes.in_backward), False
        try:
            if not call.recomputes:
                self._claim()
                if site.encloses:
                    self.pause_method()
                outermost = not self.passes.calls and self.together is None
            if not outermost and not self._is_visit(site):
                return forward(*args, **kwargs)
            if self.passes.calls and site.may_be_idle and is_idle(site.blocks, args, kwargs):
                bind(site.blocks)  # the leaves may be away: their shapes are enough
                try:
                    return forward(*args, **kwargs)
                finally:
                    release(site.blocks)
            if outermost:
                self._begin_pass(site.name)
                call.ends.append(self.end_pass)
            if not self.passes.calls:  # hooks of backward may call the model, too, as may micro-batches that take turns
                args, kwargs = to_device(self.passes.device, args, kwargs)
            if self.together is not None and site.blocks:
                args, kwargs = self.together.arrive(call, args, kwargs)
            outer = outermost or (self.together is not None and not self.passes.calls)
            self._begin_visit(call)
            output = handed_out(self._residency.addresses, forward(*args, **kwargs), outermost=outer)
            call.end()
        except BaseException:
            try:
                if outermost:
                    self._executor.abandon_cycle()  # no more loads: the exception's frames keep memory
                call.end()
            finally:
                if outermost:  # an interrupt may have hit the bookkeeping itself: nothing may seem to be under way
                    self._recover()
                # Not in a fiber, where `forward_together` ends the claim, which is that of the thread around the fiber.
                if not self.passes.calls and self._claims.get("pass") == call.thread:
                    self._claims.clear()
            raise
        if torch.is_grad_enabled():
            self.backward.watch_output(site, output)
            if outer:
                self.backward.note_result(module, (args, kwargs), output)
        return output

    def call_method(
        self,
        site: Site,
        module: nn.Module,
        name: str,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a method of a managed module other than `forward`: with inputs on the device, it finds weights there."""
        this, passes = threading.get_ident(), self.passes
        inside = passes.in_call or passes.in_backward or self.together is not None or innermost_transform() is not None
        if inside or not any(one.device == passes.device for one in tensors_in((args, kwargs))):
            return method(*args, **kwargs)
        call, around = MethodCall(site, name), passes.methods.get(this)
        try:
            self.passes.methods[this] = call
            self._enter(call, with_gradients=torch.is_grad_enabled(), in_method=True)
            call.opened()
            output = method(*args, **kwargs)
            if call.used:
                output = handed_out(self._residency.addresses, output, outermost=True)
            call.end()
        except BaseException:
            try:
                call.end()
            finally:
                if call.begun:
                    self._recover()
                    self._claims.clear()
            raise
        finally:
            self.passes.methods.pop(this, None)
            if around is not None:
                self.passes.methods[this] = around
        if call.used and torch.is_grad_enabled():
            self.backward.watch_output(site, output)
            self.backward.note_result(module, (args, kwargs), output)
        return output

    def _begin_method(self, call: MethodCall) -> None:
        """A method needs a weight or a buffer: it becomes a pass, unless it is one."""
        if call.begun:
            return
        self.passes.check_process()
        self._claim()
        try:
            self._begin_pass(call.name)
            call.used = call.begun = True
            call.ends.append(self.end_pass)
            self._visit(call)
        except BaseException:
            self._recover()
            self._claims.clear()
            raise

    def pause_method(self) -> bool:
        """Ends the pass of this thread's method, if it is in one. Returns whether a method is under way."""
        method = self.passes.methods.get(threading.get_ident())
        if method is not None and self.passes.calls and self.passes.calls[-1] is method:
            method.pause()
        return method is not None

    def note_use(self, *blocks: Block) -> None:
        """Notes that parts of these blocks are used, in a call that may be no visit."""
        if self.together is not None:
            self.together.note_use(*blocks)

    def _claim(self) -> None:
        """Claims the model for this thread's pass. Raises StateError if another thread's pass is under way.

        A backward that autograd still holds belongs to the thread of its forward, even though no pass has the claim.
        """
        this, is_first = calling_thread(), not self._claims
        owner = self._claims.setdefault("pass", this)  # one operation, which other threads cannot divide
        if owner == this and self.backward.is_held:
            owner = self.passes.thread
        if owner != this:
            if self._claims["pass"] == this:
                self._claims.clear()
            raise StateError(
                f"the model is computing on thread {owner} and was called on thread {this}; blocks come and go for one"
                " pass at a time: hold a threading.Lock from forward to the end of backward, or offload a copy for each"
            )
        if is_first:
            try:
                self._residency.check_turn()  # only now: of two that begin at once, each finds the other's claim
            except BaseException:
                self._claims.clear()
                raise

    def _is_visit(self, site: Site) -> bool:
        """Whether a call inside another one brings blocks of its own.

        Recomputation must pack exactly what forward packed (a checkpoint counts), so it decides as forward did: a
        module inside a layer is no visit if the layer is bound, whether by its call or by its backward.
        """
        if not site.blocks:
            # An enclosing module is a visit so that what it borrows goes back when it ends. A reentrant checkpoint
            # recomputes with no hooks on top, so its calls push ours.
            return site.encloses or (not self.passes.calls and self.passes.in_backward and saving_is_left_to_autograd())
        if not site.main and all(block.users for block in site.blocks):  # as in Site.is_inside, but on any thread
            return False
        missing = list(site.blocks)
        for call in self.passes.calls:
            for block in call.blocks:
                if block in missing:
                    missing.remove(block)
        return bool(missing)

    def release_everything(self) -> None:
        """Ends all that is under way, with homes bound everywhere."""
        self._recover()
        self._take_back_device_memory()
        self.passes.buffers.release()

    # updates ----------------------------------------------------------------------------------------------------------
    def wait_until_free(self) -> None:
        """Waits until the host may read and write all homes: no copy reads them, no optimizer writes them."""
        for block in self.passes.all_blocks():
            block.wait_until_free()

    def quiesce(self, *, updates: bool = True) -> None:
        """Before the user looks at the model: ends a backward that raised, even if autograd's thread still holds it.

        With `updates`, waits for what optimizer steps still write, unless the model computes.
        """
        if updates and not self.passes.computes:
            self.passes.wait_for_updates()
        over = calling_thread() == self.passes.thread and not self.passes.in_backward
        if over and self.passes.is_of_this_process:
            with self.backward.settling:  # autograd's thread may be amid that end
                if self.backward.task is not None:
                    self._recover()

    # passes -----------------------------------------------------------------------------------------------------------
    def _begin_pass(self, name: str) -> None:
        """Begins a pass: renews and binds residents. Raises StateError while a CUDA graph is captured."""
        if is_capturing(self.passes.device):
            raise StateError(
                f"{name!r} cannot be captured in a CUDA graph while its model is offloaded, because a replay would copy"
                " weights into memory that others have by then; run it without graphs, or handle.remove() first"
            )
        if self.passes.state not in (PassState.AT_REST, PassState.BETWEEN) or self._residency.changing:
            self._recover()
        self._residency.pass_begins()
        if self.room is not None:
            with without_overrides():
                self.room.wake()
        self.passes.becomes(PassState.FORWARD)
        self.passes.thread = calling_thread()
        self.before_call()
        self._follow_buffers()
        if self.passes.common is not None:
            self.passes.common.begin_pass(with_gradients=torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self.passes.gradients.prepare([*self.passes.residents, *self.passes.blocks])
        with without_overrides():  # what looks at homes here is our own
            self._executor.begin_pass(name)
            self.passes.bind_to_the_end(forward_on=self.passes.thread)
            if self.passes.common is not None and torch.is_grad_enabled():
                buffers, synchronises = self.passes.buffers.common(), self.passes.gradients.synchronises
                self.passes.common.give_buffers(buffers, synchronises=synchronises)

    def forward_together(self, together: Together, count: int, forward: Callable[[], None]) -> None:
        """Runs a pass in which `forward` calls the model for `count` micro-batches, which take turns at blocks."""
        self.passes.check_process()
        self._claim()
        lending = lending_leaves(self.lending)
        try:
            self._begin_pass(f"{count} micro-batches")
            try:
                with lending:
                    self.together = together
                    forward()
            finally:
                self.together = None
                self.end_pass()
        except BaseException:
            self.together = None
            self._recover()
            self._claims.clear()
            raise

    def backward_together(self, batch_sums: BatchSums, backward: Callable[[], None]) -> None:
        """Runs one backward that consists of those that `backward` calls; gradients go to `batch_sums`."""

        def run() -> None:
            self.backward.begin()
            backward()

        self.backward.batch_sums = batch_sums
        try:
            in_one_backward(run)
        except BaseException:
            batch_sums.abandon()
            raise
        finally:
            self.backward.batch_sums = None

    def end_pass(self) -> None:
        """Ends a pass once its copies have read the homes, which may then be written."""
        self.passes.becomes(PassState.UNSETTLED)  # and remains so if something interrupts this
        with without_overrides():
            self.passes.release_at_the_end()
            self._executor.end_pass()  # which looks at homes: a method around the pass may go on, and lend leaves
        self._residency.wait_for_consumed_reads()
        self.passes.settle(PassState.BETWEEN if torch.is_grad_enabled() else PassState.AT_REST)
        self._claims.clear()

    def _recover(self) -> None:
        """Puts the model at rest, whatever was cut short.

        `Call.end` ends a call whose bookkeeping is whole, and `Backward._finish` ends a backward that autograd has let
        go of. This does for both what they may have left undone, after an interrupt amid bookkeeping or a backward that
        raised, so each step may repeat what was done already. The order: calls go first, as blocks are bound for calls;
        blocks are unbound before any loses its buffer, as homes get what the model wrote to leaves; gradients go last.
        """
        if self.backward.refused:  # nothing is left: the model was let go of amid this pass, as the process ended
            return
        with self.backward.settling:
            self.passes.becomes(PassState.UNSETTLED)
            self.passes.calls.clear()
            self._executor.slices.put_back_weights()
            pop_left_over(self.backward)
            stop_lending(self.lending)
            for method in list(self.passes.methods.values()):  # these go on, around what is undone
                method.break_off()
                lending_leaves(self.lending).begin()
            self.passes.reset_bound()
            self.lending.end_of_visit()  # forgets what was lent
            self._residency.mend(self.passes.all_blocks(), self._executor.slices.held_bytes)
            self.backward.forget()
            self.passes.settle(PassState.AT_REST)

    def _begin_visit(self, call: Call) -> None:
        """Brings the call's blocks; what autograd saves of them becomes handles."""
        self._visit(call)
        with_gradients = torch.is_grad_enabled() or len(self.passes.calls) == 1  # gradients may be switched on inside
        if torch.is_grad_enabled() and self.passes.straight_for == call.thread and saving_is_left_to_autograd():
            with_gradients = False  # autograd may save weights themselves: they stay
        self._enter(call, with_gradients=with_gradients)

    def _visit(self, call: Call) -> None:
        """A site's call, or its recomputation, makes its blocks present until it ends."""
        site = call.site
        with without_overrides():  # what looks at homes here is our own
            if call.recomputes:
                self.backward.reach(site)
            elif site.blocks:
                self._executor.visit(site.blocks, Phase.FORWARD, site.name)
            self.passes.calls.append(call)
            bind(site.blocks)
            call.blocks = site.blocks
        call.ends.append(self._leave)

    def _leave(self) -> None:
        """Ends the innermost visit."""
        with without_overrides():
            call = self.passes.calls.pop()
            release(call.blocks)
            for block in call.lent:
                block.take_back()

    def _enter(self, call: Call, *, with_gradients: bool, in_method: bool = False) -> None:
        """From now on to the end of the call, homes are lent, and autograd saves handles of weights."""
        if not is_lending(self.lending):
            lending = lending_leaves(self.lending)
            call.ends.append(lending.end)
            lending.begin()
        if torch.is_autocast_enabled(self.passes.device.type) and torch.is_autocast_cache_enabled():
            # The cache would keep low-precision copies of the weights on the device, also of weights that changed.
            torch.set_autocast_cache_enabled(False)
            call.ends.append(partial(torch.set_autocast_cache_enabled, True))
        if with_gradients:
            saved = SavedTensors(self.backward, call.site)
            saved.push(in_method=in_method)
            call.ends.append(pop_hooks)
