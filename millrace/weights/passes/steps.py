"""What happens when any optimizer steps? Homes that it writes are free before, and known to have changed after."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from millrace.runtime.autograd import without_overrides
from millrace.runtime.process_wide import ProcessWide
from millrace.runtime.tensors import parameters_of
from millrace.weights.meter import Meter
from millrace.weights.model.home import Home
from millrace.weights.model.slot import Slot
from millrace.weights.movement.executor import Executor
from millrace.weights.passes.engine import Engine
from millrace.weights.passes.stray import homes_as_they_are

__all__ = ["OptimizerSteps"]

Optimizer = torch.optim.Optimizer


class OptimizerSteps:
    """The steps that concern one offloaded model, from `watch()` to `unwatch()`.

    `waits_by_itself` says of an optimizer that it waits for each block when it comes to it, `skipped` that it has just
    left everything as it was because gradients were not finite, `not_finite` how many of its steps took such ones:
    of all, for which it may wait, or of those that are over.
    """

    _watching: ClassVar["weakref.WeakSet[OptimizerSteps]"] = weakref.WeakSet()

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        meter: Meter,
        *,
        waits_by_itself: Callable[[Optimizer], bool],
        skipped: Callable[[Optimizer], bool],
        not_finite: Callable[[Optimizer, bool], int],
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._meter = meter
        self._waits_by_itself = waits_by_itself
        self._skipped = skipped
        self._not_finite = not_finite
        self._leave_hooks: Callable[[], None] = lambda: None
        self._within_step = contextlib.ExitStack()
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # and counted before

    def watch(self) -> None:
        """From now on."""
        self._watching.add(self)
        self._leave_hooks = _hooks.use(self)

    def unwatch(self) -> None:
        """From now on no more."""
        self._watching.discard(self)
        self._leave_hooks()

    def not_finite_steps(self, *, wait: bool) -> int:
        """Steps since the last `reset` that took gradients that were not finite; `wait`: for updates under way."""
        return sum(self._not_finite(optimizer, wait) - before for optimizer, before in list(self._seen.items()))

    def reset(self) -> None:
        """Counts anew."""
        for optimizer in list(self._seen):
            self._seen[optimizer] = self._not_finite(optimizer, True)

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
        """No copy may be reading homes that are written, and those of a checkpoint move to where writes are kept."""
        slots = self._slots_of(optimizer)
        if slots and optimizer not in self._seen:
            self._seen[optimizer] = self._not_finite(optimizer, True)
        with without_overrides():  # a look at a gradient would wait for updates that use it
            written = {id(slot) for slot in slots if slot.home.grad is not None}
        for block in (*self._engine.blocks, *self._engine.residents):
            if any(id(slot) in written for slot in block.slots):
                block.make_writable()
                block.keep_leaf_writes()
        self._within_step.close()  # of one that raised
        if slots and self._engine.progress.computes:  # a step within a forward computes on the host, as any other
            self._within_step.enter_context(homes_as_they_are())
        if slots and not self._waits_by_itself(optimizer):
            self._engine.wait_until_free()

    def _after(self, optimizer: Optimizer) -> None:
        """Fused optimizers leave no trace of their writes."""
        self._within_step.close()
        slots = self._slots_of(optimizer)
        for slot in slots:
            slot.changed_untraced()
        if slots:
            self._meter.steps += 1
            self._meter.skipped_steps += self._skipped(optimizer)
            self._engine.updates.changed()
            self._executor.homes_changed()

    def _slots_of(self, optimizer: Optimizer) -> list[Slot]:
        held = {id(parameter) for parameter in parameters_of(optimizer) if isinstance(parameter, Home)}
        blocks = (*self._engine.blocks, *self._engine.residents)
        return [slot for block in blocks for slot in block.slots if id(slot.home) in held]


def _register() -> Callable[[], None]:
    before = register_optimizer_step_pre_hook(OptimizerSteps.before_any)
    after = register_optimizer_step_post_hook(OptimizerSteps.after_any)

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


_hooks = ProcessWide(_register, anywhere=False)
