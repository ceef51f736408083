"""What happens when any optimizer steps? Homes that it writes are free before, and known to have changed after."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from headrace.errors import StateError
from headrace.runtime.autograd import without_overrides
from headrace.runtime.capture import before_write, is_ours
from headrace.runtime.process_wide import hooked
from headrace.runtime.tensors import parameters_of
from headrace.weights.meter import Meter
from headrace.weights.model.home import Home
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.common import CommonHomes
from headrace.weights.passes.engine import Engine
from headrace.weights.passes.parameter_access import homes_as_they_are

Optimizer = Any  # a torch.optim.Optimizer; one of ours has more


class OptimizerSteps:
    """The steps that concern one offloaded model, from `watch()` to `unwatch()`."""

    _watching: ClassVar["weakref.WeakSet[OptimizerSteps]"] = weakref.WeakSet()

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine = engine
        self._passes = engine.passes
        self._meter = meter
        self._leave_hooks: Callable[[], None] = lambda: None
        self._within_step = contextlib.ExitStack()
        # Each optimizer's count at the last reset, or before its first step here.
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Begins to watch optimizers' steps."""
        self._watching.add(self)
        self._leave_hooks = _hooks.use(self)

    def unwatch(self) -> None:
        """Stops watching optimizers' steps."""
        self._watching.discard(self)
        self._leave_hooks()

    def not_finite_steps(self, *, wait: bool) -> int:
        """How many steps since `reset` took gradients that were not finite. `wait`: waits for updates under way."""
        return sum(_not_finite(one, wait=wait) - before for one, before in list(self._seen.items()))

    def reset(self) -> None:
        """Sets the count of not_finite_steps() to 0."""
        for optimizer in list(self._seen):
            self._seen[optimizer] = _not_finite(optimizer, wait=True)

    @classmethod
    def before_any(cls, optimizer: Optimizer, *_: Any) -> None:
        """Some optimizer is about to step."""
        for steps in list(cls._watching):
            steps._before(optimizer)

    @classmethod
    def after_any(cls, optimizer: Optimizer, *_: Any) -> None:
        """Some optimizer has stepped."""
        for steps in list(cls._watching):
            steps._after(optimizer)

    def _before(self, optimizer: Optimizer) -> None:
        """Waits until no copy reads homes that will be written. Those in a checkpoint move to where writes are kept."""
        params, common = self._params_of(optimizer), self._passes.common
        if params and optimizer not in self._seen:
            self._seen[optimizer] = _not_finite(optimizer, wait=True)
        with without_overrides():  # a look at a gradient would wait for updates that use it
            written = {id(param) for param in params if param.home.grad is not None}
        blocks = [one for one in self._passes.all_blocks() if any(id(param) in written for param in one.params)]
        for block in blocks:
            if common is None:
                block.make_writable()
            block.keep_leaf_writes()
        self._within_step.close()  # of a step that raised
        in_method = bool(params) and self._engine.pause_method()
        if in_method or (params and self._passes.computes):  # the step computes on the host, as any other
            self._within_step.enter_context(homes_as_they_are())
        if params and not (is_ours(optimizer) and optimizer.overlaps):  # which waits for each block when it comes to it
            self._engine.wait_until_free()
        if params and common is not None:
            self._meet_other_ranks(optimizer, common, params)
            for block in blocks:
                block.make_writable()  # with the contents that all ranks have agreed on
        if not is_ours(optimizer):  # the step may be broken off, and nothing is called after it then
            for param in params:
                param.changed_untraced()

    def _after(self, optimizer: Optimizer) -> None:
        """Notes that homes were written: fused optimizers leave no trace of it."""
        self._within_step.close()
        params, common = self._params_of(optimizer), self._passes.common
        unwritten = [] if common is None else common.unwritten()
        # Optimizers of ours leave traces, and so what they wrote past memory is known to be in the files.
        in_files = [one for one in self._passes.all_blocks() if is_ours(optimizer) and one.in_files]
        for param in params:
            param.changed_untraced()
        for block in in_files:
            block.note_flushed()
        if params and common is not None:
            common.still_unwritten(unwritten)  # before anything is fetched
        if params:
            self._meter.steps += 1
            self._meter.skipped_steps += is_ours(optimizer) and optimizer.last_step_skipped
            self._passes.updates_changed()
            self._passes.executor.homes_changed()

    def _meet_other_ranks(self, optimizer: Optimizer, common: CommonHomes, params: Sequence[ManagedParam]) -> None:
        """Waits until no rank reads homes, or saves those to be updated, and all ranks see the same contents."""
        if not is_ours(optimizer):
            name = type(optimizer).__name__
            raise StateError(
                f"{name} would step on every rank, on weights of which the node has one copy; use an optimizer of"
                f" headrace.optim, such as headrace.optim.{name}, whose work and state the ranks share"
            )
        for block in self._passes.all_blocks():
            block.wait_for_reads()
        before_write(param.home for param in params)  # by other ranks, which know of no capture here
        common.agree(f"{type(optimizer).__name__}.step()")

    def _params_of(self, optimizer: Optimizer) -> list[ManagedParam]:
        held = {id(parameter) for parameter in parameters_of(optimizer) if isinstance(parameter, Home)}
        return [param for block in self._passes.all_blocks() for param in block.params if id(param.home) in held]


def _not_finite(optimizer: Optimizer, *, wait: bool) -> int:
    """How many steps took gradients that were not finite. `wait`: waits for steps under way, too."""
    return optimizer.count_not_finite_steps(wait=wait) if is_ours(optimizer) else 0


_hooks = hooked(
    lambda: (
        register_optimizer_step_pre_hook(OptimizerSteps.before_any),
        register_optimizer_step_post_hook(OptimizerSteps.after_any),
    )
)
