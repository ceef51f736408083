"""How does a step go through several micro-batches? Together, so that each weight comes once; else one by one."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from headrace.activation_offloading import ActivationOffloading
from headrace.weights.movement.flow import GradientFlow
from headrace.weights.movement.gradients import Gradients
from headrace.weights.passes.attachment import Attachment
from headrace.weights.passes.engine import Engine
from headrace.weights.passes.graph_segments import CannotCutError
from headrace.weights.passes.layer_major import LayerMajor
from headrace.weights.passes.module_states import ModuleStates

T = TypeVar("T")


class MicroBatches:
    """Forward and backward of several micro-batches of one model."""

    def __init__(
        self,
        engine: Engine,
        gradients: GradientFlow,
        attachment: Attachment,
        activations: ActivationOffloading | None,
    ) -> None:
        self._engine = engine
        self._gradients = gradients
        self._attachment = attachment
        self._activations = activations
        self._meter = gradients.meter
        # Loss functions whose micro-batches have gone together: what modules note need not be looked at again.
        self._goes_together: set[object] = set()
        # Of loss functions and so many micro-batches, as was found out.
        self._why_in_a_loop: dict[tuple[object, int], str] = {}

    def compute(
        self, batches: Sequence[T], together: int, loss_function: Callable[[T], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Losses, detached; `together` micro-batches go through a block at once."""
        firsts = range(0, len(batches), together)
        groups = [self._group(batches[first : first + together], first, loss_function) for first in firsts]
        return [loss for group in groups for loss in group]

    def _group(
        self, batches: Sequence[T], first: int, loss_function: Callable[[T], torch.Tensor]
    ) -> list[torch.Tensor]:
        """`first`: the number of the first of them."""
        computations = [partial(_loss_of, loss_function, batch, first + at) for at, batch in enumerate(batches)]
        known = _code_of(loss_function)
        why = self._why_in_a_loop.get((known, len(batches))) or self._why_not_now()
        if why is None and len(batches) > 1:
            states = None if known in self._goes_together else ModuleStates(self._attachment.modules())
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

    def _together(
        self,
        batches: Sequence[Any],
        computations: Sequence[Callable[[], torch.Tensor]],
        states: ModuleStates | None,
    ) -> list[torch.Tensor]:
        """`states`: what modules have noted before, for a loss function that is new."""
        gradients: Any = self._gradients  # those of one process
        together = LayerMajor(self._engine, gradients, states)
        activations = self._activations
        in_forward = contextlib.nullcontext() if activations is None else activations.together(batches)
        in_backward = contextlib.nullcontext() if activations is None else activations.one_backward()
        return together.run(computations, in_forward, in_backward)

    def _why_not_now(self) -> str | None:
        if not isinstance(self._gradients, Gradients):
            return "ranks average the gradients of each backward"
        watched = self._gradients.watched(self._engine.passes.all_blocks())
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
