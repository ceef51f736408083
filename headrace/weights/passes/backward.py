"""What does a backward do with weights? Blocks come for the sites that it reaches, gradients leave, and it ends once.

Modules have no hooks for this: a site's backward begins with the gradient of the site's output, or with the first
unpack of a tensor that the site saved. Autograd says when the whole backward is over.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.config import counted
from headrace.errors import StateError
from headrace.planning import Phase
from headrace.runtime.autograd import (
    EndOfBackward,
    backward_task,
    grad_of,
    sequence_number,
    unseen,
    without_overrides,
)
from headrace.runtime.tensors import tensors_in
from headrace.runtime.threads import on_headrace_thread
from headrace.weights.model.home import Leaf
from headrace.weights.model.managed_param import REMOVED, ManagedParam
from headrace.weights.movement.batch_sums import BatchSums
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.gradients import refuse_graph, sum_of_rows
from headrace.weights.passes.call import Passes, PassState, Site, bind, release
from headrace.weights.passes.lending import Lending
from headrace.weights.passes.parameter_access import lending_leaves

WATCHED = "_headrace_watched"  # on outputs whose gradient announces a site's backward: the number of their node


class Backward:
    """The backward of one model, while one is under way: the outermost, within which others may be nested.

    `recover` undoes all that is under way in the model.
    """

    def __init__(self, passes: Passes, lending: Lending, recover: Callable[[], None]) -> None:
        self.passes = passes
        self._residency, self._executor, self._gradients = passes.residency, passes.executor, passes.gradients
        self._lending = lending
        self._recover = recover
        self.site: Site | None = None  # the site that backward is at
        self._bound: tuple[Block, ...] = ()  # for that site; none while the whole model is on the device, to stay
        self.task: int | None = None  # autograd's number of the outermost backward under way; None: there is none
        self._end: Callable[[], EndOfBackward | None] = lambda: None  # gives None once autograd has let go of the end
        self._computing_again = contextlib.ExitStack()  # until backward ends, lends leaves to what is recomputed
        # Weights with which a user's autograd Function computes now, and the Function's name.
        self._in_function: dict[ManagedParam, str] = {}
        # Gradients of rows that are not complete yet, also by autograd's number of the backward: a nested backward adds
        # up its own.
        self._of_rows: dict[tuple[ManagedParam, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._nested: list[ManagedParam] = []  # parameters that got gradients from nested backwards
        self.checks_gradients = True  # until a graph leads to a leaf, or the first backward that is no mistake
        self._cut_off: list[ManagedParam] = []  # trained parameters of the last call, if its result leads to no leaf
        self.settling = threading.RLock()  # a backward that raised may end on autograd's thread, in the next pass
        self.refused = False  # whether the model has been let go of
        self.batch_sums: BatchSums | None = None  # takes the gradients while several micro-batches go together
        # The hook of all leaves. It holds this object weakly: a cycle through autograd's hooks is never collected.
        self.on_gradient = functools.partial(_take_gradient, weakref.ref(self))

    @property
    def is_held(self) -> bool:
        """Whether a backward is under way, and autograd still holds it."""
        return self.task is not None and self._end() is not None

    def watch_output(self, site: Site, output: Any) -> None:
        """Watches a site's output, whose gradient comes before any unpack and so announces the site's backward.

        A tensor that another site made and this one only hands on (T5's position bias) goes on announcing the other
        site's backward, unless this site has written to it.
        """
        for tensor in tensors_in(output):
            if tensor.grad_fn is None:
                continue
            node = sequence_number(tensor.grad_fn)
            if getattr(tensor, WATCHED, None) != node:
                setattr(tensor, WATCHED, node)
                tensor.register_hook(functools.partial(_reach, self, site))

    def note_result(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Called with what an outermost call took and gave: notes whether its backward can lead to a parameter.

        A tensor that is only handed on leads nowhere by rights; so do results for which the module had other tensors in
        the place of its parameters (`torch.func.functional_call`).
        """
        if not self.checks_gradients:
            return
        given = {tensor.grad_fn for tensor in tensors_in(inputs)}
        made = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn not in given]
        if any(map(_leads_to_a_leaf, made)):
            self.checks_gradients = False
        elif any(made):
            its_own = set(map(id, module.parameters()))
            params = [param for block in self.passes.all_blocks() for param in block.params]
            self._cut_off = [one for one in params if one.home.requires_grad and id(one.home) in its_own]

    def reach(self, site: Site) -> None:
        """Backward needs something of the site's forward: the site's blocks come, and the last site's may go."""
        if site is self.site or not self.passes.in_backward:
            return
        self.begin()
        if not site.blocks:
            return
        with without_overrides():
            self._gradients.leave_block()
            bound, self._bound, self.site = self._bound, (), None
            release(bound)
            self._lending.end_of_visit()
            if self.batch_sums is not None:
                self.batch_sums.reach(site.blocks)  # before loads ahead: it is needed first
            if not self._executor.are_here(site.blocks):
                self._executor.visit(site.blocks, Phase.BACKWARD, site.name)
                bind(site.blocks, adopts=False)
                self._bound = site.blocks
            self.site = site

    def require(self, block: Block) -> None:
        """Brings a block of which an unpack hook needs a weight, if the site has not brought it; compute waits for the
        block. Called by autograd, on the thread of the device. Raises StateError once the model has been let go of.
        """
        if self.refused:
            raise StateError(REMOVED)
        if block.presence in (Presence.ABSENT, Presence.RESERVED):
            with without_overrides():
                self._executor.visit((block,), Phase.BACKWARD, block.name)
        elif block.presence is Presence.ARRIVING and not block.is_current:  # the copy may mix contents
            with without_overrides():
                self._executor.bring(block)
        self._residency.arrive(block)

    def note_function(self, param: ManagedParam, function: Any) -> None:
        """Notes that a user's autograd Function has unpacked a weight. Not a checkpoint's: it computes with copies."""
        if function.name() == "CheckpointFunctionBackward":
            return

        @unseen
        def over(*_: object) -> None:
            hook.remove()
            self._in_function.pop(param, None)

        self._in_function[param] = function.name()
        hook = function.register_hook(over)

    def rows_ready(self, param: ManagedParam, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Takes a gradient of some rows of a table, or of some experts, each named once. More may follow."""
        self.begin()
        refuse_graph(param, gradient)
        self._of_rows.setdefault((param, backward_task()), []).append((rows, gradient))

    def rows_complete(self, param: ManagedParam) -> None:
        """Makes one gradient of all that rows_ready() took, as if whole tables had been added up. No more follow."""
        parts = self._of_rows.pop((param, backward_task()), None)
        if parts:
            with without_overrides():
                self.checks_gradients = False
                rows, gradients = sum_of_rows(parts)
                (self.batch_sums or self._gradients).take(param, *gradients, rows=rows)

    def begin(self) -> None:
        """Begins the outermost backward, unless it has begun. Nested backwards (of reentrant checkpoints) are a part of
        it, and end before it.
        """
        if self.task is not None:
            return
        if self.refused:
            raise StateError(REMOVED)
        self._abandon_gradients()  # left over from a backward whose end was interrupted
        self.site, self._bound = None, ()
        self._in_function.clear()
        task = backward_task()
        end = EndOfBackward(functools.partial(self._ended, task))
        end.queue()
        self._end, self.task = weakref.ref(end), task
        self.passes.becomes(PassState.BACKWARD)
        self._residency.pass_begins()
        with without_overrides():
            self._executor.begin_backward()
        self.passes.bind_to_the_end()
        self.passes.updates_changed()
        self._computing_again.enter_context(lending_leaves(self._lending))

    def _ended(self, task: int, *, completed: bool) -> None:
        """A backward has returned or raised: modules get their homes back; gradients are delivered or dropped.

        Called by autograd: on the thread that ends the backward or, after an exception, on any thread. On a thread of
        headrace's own it does nothing, as it would wait for that very thread: the next look or pass finds that the
        backward is over.
        """
        if not completed and on_headrace_thread():
            return
        with self.settling:
            if task != self.task:
                return
            try:
                self._finish(completed=completed)
            except BaseException:
                if self.passes.calls:
                    self.passes.settle(PassState.FORWARD)
                else:
                    self._recover()
                raise
            if completed and self.checks_gradients and not self.passes.calls:  # not `autograd.grad` within a forward
                self._check_gradients()

    def _check_gradients(self) -> None:
        """Called when a backward has ended, and none has had a gradient so far. Raises StateError if the last call had
        parameters that require gradients, and its result led to none (nor did that of another rank). Otherwise
        nothing is checked any more.
        """
        params, self._cut_off = self._cut_off, []
        trained = [] if any(param.home.grad is not None for param in params) else [param.name for param in params]
        self.checks_gradients = bool(trained)
        if trained:
            them = counted(len(trained), "trained parameter")
            raise StateError(
                f"backward() went through the model, and reached none of its {them} (such as {trained[0]!r}): they"
                " would never change. Something between them and the loss is detached,"
                " or was computed without gradients; with reentrant checkpoints, inputs need gradients"
                " (model.enable_input_require_grads()). If it is meant so, pass check_gradients=False to offload()"
            )

    def _finish(self, *, completed: bool) -> None:
        """Unbinds blocks, ends the cycle, and delivers gradients or drops them, in that order."""
        self._computing_again.close()
        self._forget_nested()
        self.task = None
        bound, self._bound, self.site = self._bound, (), None
        release(bound)
        self._lending.end_of_visit()
        self.passes.release_at_the_end()
        if completed:
            self._gradients.leave_block()
            self._executor.end_cycle()
            self._residency.wait_for_consumed_reads()  # no gradient waits for reads of frozen blocks
        else:
            self._executor.abandon_cycle()
            self.drop_gradients()
        going_on = [call for call in self.passes.calls if not call.recomputes]
        if not completed or len(going_on) < len(self.passes.calls):
            # An interrupt, which a hook may have caught, struck before a recomputation's call was ended, or between a
            # release and its note.
            self.passes.calls[:] = going_on
            self.passes.reset_bound()
        self.passes.settle(PassState.FORWARD if self.passes.calls else PassState.AT_REST)
        if completed:
            with self.passes.hooks_of_homes() as in_hooks:
                self._gradients.deliver(in_hooks)
            self.passes.updates_changed()

    def _forget_nested(self) -> None:
        for param in self._nested:
            param.leaf.got_nested_gradient = None
        self._nested.clear()

    def forget(self) -> None:
        """Called when the model is put at rest: drops what is left of a backward that `_finish` has not ended."""
        self.site, self._bound = None, ()
        self._forget_nested()
        if self.task is not None:
            self.task = None
            self._executor.abandon_cycle()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drops an unfinished backward's gradients, also those that an interrupt left on the leaves."""
        with without_overrides():
            for block in self.passes.all_blocks():
                for param in block.params:
                    param.leaf.grad = None
        self._abandon_gradients()

    def _abandon_gradients(self) -> None:
        self._of_rows.clear()
        self._gradients.abandon()


def _leads_to_a_leaf(node: Any) -> bool:
    """Whether backward from this node of a graph leads to the leaf of a weight, if nothing limits it (`inputs=`)."""
    seen, rest = set(), [node]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        if isinstance(getattr(node, "variable", None), Leaf):
            return True
        seen.add(node)
        rest.extend(following for following, _ in node.next_functions)
    return False


@unseen
def _reach(backward: Backward, site: Site, _gradient: torch.Tensor) -> None:
    """The hook of a site's output. Called by autograd, on the thread of the device."""
    backward.reach(site)


@unseen
def _take_gradient(backward: "weakref.ref[Backward]", leaf: Leaf) -> None:
    """Takes a leaf's gradient, complete as far as is known. Called by autograd, on the thread of the device."""
    self, param = backward(), leaf.owner()
    if self is None or param is None or param.on_gradient is None:  # the model was let go of
        return
    if self.task is None:
        self.begin()  # unannounced: a block that saves nothing is never unpacked
    if param in self._in_function:
        raise StateError(
            f"{self._in_function[param]} calls backward() for parameter {param.name!r}, which it has saved: that"
            " gradient leaves the device, and is no `.grad` of what it saved; use torch.autograd.grad(output,"
            " [..., weight]) there, and return that"
        )
    with without_overrides():
        if not param.home.requires_grad:  # frozen since forward: autograd, too, asks its leaves now
            grad_of.__set__(leaf, None)
            return
        gradient = grad_of.__get__(leaf)
        grad_of.__set__(leaf, None)
        if gradient is None:
            return
        if gradient.requires_grad:
            refuse_graph(param, gradient)
        self.checks_gradients = False
        (self.batch_sums or self._gradients).take(param, gradient)
    if backward_task() != self.task and leaf.got_nested_gradient is None:
        leaf.got_nested_gradient = param.name
        self._nested.append(param)
