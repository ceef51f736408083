"""How do gradients get into homes whose gradients somebody watches? As in any backward: autograd accumulates them.

So hooks fire as without headrace, in the order in which gradients came: those of a parameter, of several parameters
(`register_multi_grad_hook`), and of the AccumulateGrad node in autograd's graph (Horovod and Apex hook into it).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from headrace.runtime.autograd import runs_in_backward, tensor_use_count, without_overrides, without_transforms

_MARK = "headrace"


class _Arrival(torch.autograd.Function):
    """Passes one gradient on, and then those after it: autograd runs an accumulating node before other ready ones."""

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
        # Popped: autograd does not copy a gradient that nobody else holds, but makes it `home.grad`.
        return tokens[0], context.gradient.pop(), None, None


def accumulate_as_autograd(
    arrived: "Sequence[tuple[nn.Parameter, list[torch.Tensor]]]", before: Callable[[], None]
) -> None:
    """Gives each home the one gradient in its list, in this order, by a backward of its own. The lists are empty then.

    `before` is called within this backward, before each home's hooks.
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
    """Whether somebody keeps the node that accumulates the gradient of a parameter, which has to require one.

    It marks the node and asks for it again: autograd makes a new node if nobody kept the marked one.
    """
    _node_of(parameter).metadata[_MARK] = True
    return _MARK in _node_of(parameter).metadata


def is_saved(parameter: nn.Parameter) -> bool:
    """Whether autograd has saved a parameter, or a view of it, and still needs it for a backward."""
    with without_overrides():
        node = _node_of(parameter) if parameter.requires_grad else None  # exists once, and holds the parameter, too
        return tensor_use_count(parameter) > 1 + (node is not None)


def is_accumulated_itself(parameter: nn.Parameter) -> bool:
    """Whether the backward under way accumulates into this parameter itself, as a loss term uses it directly.

    Such a gradient may come at any time, and on another thread than the gradients of an accelerator.
    """
    return runs_in_backward(_node_of(parameter))


def _node_of(parameter: nn.Parameter) -> Any:
    """The node that accumulates a gradient. `torch.autograd.graph.get_gradient_edge` is slower, and homes notice it."""
    # Inference mode and function transforms have no such nodes, or others; with overrides a home waits for updates.
    with torch.inference_mode(False), torch.enable_grad(), without_transforms(), without_overrides():
        grad_fn: Any = torch.Tensor.view_as(parameter, parameter).grad_fn
        return grad_fn.next_functions[0][0]


def accumulate(home: nn.Parameter, gradient: torch.Tensor) -> None:
    """Sets the home's gradient, or adds to it, as autograd does when a gradient reaches a leaf."""
    if home.grad is None:
        if gradient.dtype != home.grad_dtype:
            home.grad_dtype = gradient.dtype
        home.grad = gradient
    elif gradient.layout == torch.strided != home.grad.layout:
        home.grad = gradient + home.grad  # sparse + dense is dense
    else:
        home.grad.add_(gradient)


def late_hooks(home: nn.Parameter) -> list[Any]:
    """The user's hooks that fire after a gradient has been accumulated."""
    return list((getattr(home, "_post_accumulate_grad_hooks", None) or {}).values())
