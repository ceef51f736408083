"""How do gradients get into homes whose gradients somebody watches? As in any backward: autograd accumulates them.

Hooks of a parameter, of several (`register_multi_grad_hook`) and of the node of autograd's graph that accumulates its
gradient (AccumulateGrad; Horovod and Apex hook into it) fire so as without us, in the order in which gradients came.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headrace.runtime.autograd import runs_in_backward, tensor_use_count, without_overrides, without_transforms

__all__ = ["accumulate", "accumulate_as_autograd", "is_accumulated_itself", "is_saved", "late_hooks", "node_is_kept"]

_MARK = "headrace"


class _Arrival(torch.autograd.Function):
    """One gradient, and then those after it: a node that accumulates comes before any other that is ready."""

    @staticmethod
    def forward(
        context: Any,
        later: torch.Tensor,
        home: nn.Parameter,
        gradient: list[torch.Tensor],
        before: Callable[[], None],
    ) -> torch.Tensor:
        context.gradient, context.before = gradient, before
        return later.view_as(later)

    @staticmethod
    def backward(context: Any, *tokens: Any) -> Any:
        context.before()
        # Popped: what nobody else has becomes `home.grad` uncopied.
        return tokens[0], context.gradient.pop(), None, None


def accumulate_as_autograd(
    arrived: "Sequence[tuple[nn.Parameter, list[torch.Tensor]]]", before: Callable[[], None]
) -> None:
    """Homes get the gradients that the lists hold, one each, in this order; the lists are empty then.

    `before` is called within this backward, before hooks are.
    """
    if not arrived:
        return
    for home, held in arrived:
        if home.grad is None and held[0].dtype != home.grad_dtype:
            home.grad_dtype = held[0].dtype
    with torch.enable_grad():
        token = torch.zeros((), device="cpu", requires_grad=True)
        for home, held in reversed(arrived):
            token = _Arrival.apply(token, home, held, before)  # type: ignore[no-untyped-call]
    token.backward()


def node_is_kept(parameter: nn.Parameter) -> bool:
    """Whether somebody keeps the node that accumulates the gradient of a parameter, which requires one.

    A node that nobody keeps is made anew.
    """
    _node_of(parameter).metadata[_MARK] = True
    return _MARK in _node_of(parameter).metadata


def is_saved(parameter: nn.Parameter) -> bool:
    """Whether autograd has saved a parameter, or a view of it, and still needs it for a backward."""
    with without_overrides():
        node = _node_of(parameter) if parameter.requires_grad else None  # of which there is one, and which has it
        return tensor_use_count(parameter) > 1 + (node is not None)


def is_accumulated_itself(parameter: nn.Parameter) -> bool:
    """Whether the backward under way has a gradient of its own for a parameter: of a loss term that uses it directly.

    Such a gradient comes at any time and on another thread than those of an accelerator.
    """
    return runs_in_backward(_node_of(parameter))


def _node_of(parameter: nn.Parameter) -> Any:
    """As `torch.autograd.graph.get_gradient_edge`, which is slower, and which homes take notice of."""
    # In inference mode and function transforms there are no nodes, or other ones; homes wait for updates.
    with torch.inference_mode(False), torch.enable_grad(), without_transforms(), without_overrides():
        grad_fn: Any = torch.Tensor.view_as(parameter, parameter).grad_fn
        return grad_fn.next_functions[0][0]


def accumulate(home: nn.Parameter, gradient: torch.Tensor) -> None:
    """What autograd does with a gradient that reaches a leaf: it is set or added."""
    if home.grad is None:
        if gradient.dtype != home.grad_dtype:
            home.grad_dtype = gradient.dtype
        home.grad = gradient
    elif gradient.layout == torch.strided != home.grad.layout:
        home.grad = gradient + home.grad  # dense and sparse
    else:
        home.grad.add_(gradient)


def late_hooks(home: nn.Parameter) -> list[Any]:
    """The user's own, that fire when a gradient has been accumulated."""
    return list((getattr(home, "_post_accumulate_grad_hooks", None) or {}).values())
