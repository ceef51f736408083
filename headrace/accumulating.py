"""How does a step go through several micro-batches? The part of the handle that lets each weight come once."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from headrace.activation_offloading import ActivationOffloading
from headrace.errors import StateError
from headrace.memory.ledger import Ledger
from headrace.runtime.lanes import Lanes
from headrace.weights.meter import Meter
from headrace.weights.movement.averaging import AveragedGradients
from headrace.weights.movement.gradients import Gradients
from headrace.weights.passes.attachment import Attachment
from headrace.weights.passes.engine import Engine
from headrace.weights.passes.layer_major import LayerMajor
from headrace.weights.passes.module_states import ModuleStates
from headrace.weights.passes.stretches import CannotCutError

__all__ = ["Accumulating"]

T = TypeVar("T")


class Accumulating:
    """Forward and backward of several micro-batches."""

    _attachment: Attachment | None
    _engine: Engine
    activations: ActivationOffloading | None
    _gradients: Any
    _lanes: Lanes
    _ledger: Ledger
    _meter: Meter
    _goes_together: set[object]  # loss functions for which modules note nothing
    _why_in_a_loop: dict[tuple[object, int], str]  # of loss functions and so many micro-batches, as was found out

    def _check_between_passes(self, what: str) -> None:
        raise NotImplementedError

    def forward_backward(
        self, micro_batches: Iterable[T], loss_function: Callable[[T], torch.Tensor], *, together: int | None = None
    ) -> list[torch.Tensor]:
        """Gradients of `sum(loss_function(batch) for batch in micro_batches)`: the losses, detached, one for each.

        `loss_function` calls the model and returns a tensor with one element, such as
        `lambda batch: model(**batch).loss / len(batches)`. Losses and gradients have the same bits as after

            for batch in micro_batches:
                loss_function(batch).backward()

        but in forward and in backward, each block computes all micro-batches before the next block comes. So weights
        cross each link once for all of them, and a block's gradient leaves once. What autograd saves is kept for all
        micro-batches at once: use gradient checkpointing, `activations`, or both; or give `together`: how many go
        through a block at once, such as `headrace.plan(...).method.together`. The next group follows when one is done.

        Each `loss_function(batch)` runs on a thread of its own, one at a time. The first micro-batch draws the same
        random numbers (dropout, from PyTorch's default generators) as in the loop; the others draw different ones, from
        the same distribution. If a model cannot be cut between blocks, or keeps something that other micro-batches
        would see, the loop is used instead, and a warning says so: then `loss_function` is called again for
        micro-batches that it was called for before. Variables of its own, through which it shares something among
        micro-batches, are not noticed.

        Raises ValueError if there is no micro-batch or no loss, StateError within a pass, and whatever `loss_function`
        raises; gradients are then those of the groups of `together` micro-batches that were done before.
        """
        self._check_between_passes("forward_backward()")
        attachment = self._attachment
        if attachment is None:
            raise StateError("forward_backward() was called after remove(); call the model")
        batches = list(micro_batches)
        if not batches:
            raise ValueError("micro_batches is empty; give at least one")
        if together is not None and (not isinstance(together, int) or together < 1):
            raise ValueError(
                f"together={together!r}; give how many micro-batches go through a block at once, at least 1"
            )
        count = together or len(batches)
        firsts = range(0, len(batches), count)
        groups = [self._group(attachment, batches[first : first + count], first, loss_function) for first in firsts]
        return [loss for group in groups for loss in group]

    def _group(
        self, attachment: Attachment, batches: list[T], first: int, loss_function: Callable[[T], torch.Tensor]
    ) -> list[torch.Tensor]:
        """`first`: the number of the first of them."""
        computations = [partial(_loss_of, loss_function, batch, first + at) for at, batch in enumerate(batches)]
        known = _code_of(loss_function)
        why = self._why_in_a_loop.get((known, len(batches))) or self._why_not_now()
        if why is None and len(batches) > 1:
            states = None if known in self._goes_together else ModuleStates(attachment.modules())
            try:
                losses = self._together(batches, computations, states)
            except CannotCutError as error:
                self._why_in_a_loop[known, len(batches)] = why = str(error)
                if states is not None:
                    states.restore()
            else:
                self._goes_together.add(known)
                self._meter.micro_batches_together += len(losses)
                return losses
        if why is not None:
            self._meter.micro_batches_in_turn += len(batches)
            warnings.warn(
                f"micro-batches go through this model one after the other: {why}. Results are the same; weights move"
                " once for each",
                RuntimeWarning,
                stacklevel=2,
            )
        return [_in_turn(compute) for compute in computations]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """With `mesh`: a backward inside it averages nothing over the ranks; the next one outside averages all.

        Like DistributedDataParallel's `no_sync`. Parameters' `grad` does not change; each rank keeps its own sums on
        its host. `zero_grad()` and `p.grad = None` discard them; `p.grad.zero_()` does not, where it finds None.
        Raises StateError without `mesh`.
        """
        gradients = self._gradients
        if not isinstance(gradients, AveragedGradients):
            raise StateError("no_sync() is for a model on several ranks; give headrace.offload(model, mesh=mesh)")
        before, gradients.synchronises = gradients.synchronises, False
        try:
            yield
        finally:
            gradients.synchronises = before

    def _together(
        self,
        batches: Sequence[Any],
        computations: Sequence[Callable[[], torch.Tensor]],
        states: ModuleStates | None,
    ) -> list[torch.Tensor]:
        """`states`: what modules have noted before, for a loss function that is new."""
        together = LayerMajor(self._engine, self._gradients, self._lanes, self._ledger, self._meter, states)
        activations = self.activations
        in_forward = contextlib.nullcontext() if activations is None else activations.together(batches)
        in_backward = contextlib.nullcontext() if activations is None else activations.one_backward()
        return together.run(computations, in_forward, in_backward)

    def _why_not_now(self) -> str | None:
        if not isinstance(self._gradients, Gradients):
            return "ranks average the gradients of each backward"
        watched = self._gradients.watched([*self._engine.blocks, *self._engine.residents])
        return None if watched is None else f"hooks of parameter {watched!r} see each gradient"


def _code_of(loss_function: Any) -> object:
    """The same for functions that are made anew with each step."""
    while isinstance(loss_function, partial):
        loss_function = loss_function.func
    return getattr(loss_function, "__code__", type(loss_function))


def _loss_of(loss_function: Callable[[T], torch.Tensor], batch: T, number: int) -> torch.Tensor:
    loss = loss_function(batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        is_what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss))
        raise ValueError(
            f"loss_function returned {is_what} for micro-batch {number}; it has to return the loss: a tensor with one"
            " element, computed with gradients on"
        )
    return loss


def _in_turn(compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    loss = compute()
    loss.backward()
    return loss.detach()
