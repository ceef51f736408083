"""How does a weight get a gradient if only some rows of it came? Each use of rows has one; their sum goes to the home.

Rows are those of a table (lookup.py), or single experts (expert_dispatch.py).
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.errors import StateError
from headrace.runtime.autograd import without_overrides
from headrace.weights.model.managed_param import REMOVED, ManagedParam
from headrace.weights.passes.backward import Backward

__all__ = ["RowGradients", "TakenRows"]


class RowGradients:
    """Takes the gradients of rows of one model's weights."""

    def __init__(self, backward: Backward, device: torch.device) -> None:
        self._backward = backward
        self._device = device
        self._of: dict[ManagedParam, _OfWeight] = {}

    def computed(
        self,
        param: ManagedParam,
        values: Callable[[], torch.Tensor],
        rows: torch.Tensor | Sequence[int],
        alone: Callable[[], bool],
        to_rows: Callable[..., torch.Tensor],
        *saved: torch.Tensor,
    ) -> torch.Tensor:
        """What `values` gives, computed from these rows of the weight. `rows` names each once.

        `to_rows(gradient, *saved)` makes the gradient of these rows from that of the values. `alone`: whether nothing
        but rows of the weight has gradients. If not, autograd gets the gradient of rows as one of the whole weight, and
        adds all up in its own order.
        """
        if not (torch.is_grad_enabled() and param.home.requires_grad):
            return values()
        param.prepare_leaf()
        of = self._of.get(param)
        if of is None:
            of = self._of[param] = _OfWeight(self._backward, param, self._device, alone)
        apply: Any = TakenRows.apply
        on_host = torch.as_tensor(rows, device="cpu")
        found: torch.Tensor = apply(param.leaf, of.sign, values, of, on_host, to_rows, *saved)
        return found

    def is_sign(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf of a graph is the `sign` of some weight, and no parameter."""
        return any(of.sign is leaf for of in self._of.values())


class _OfWeight:
    """The gradients of rows of one weight. `sign` tells when autograd has all of them: it is a leaf of one element,
    for which each use of rows has a gradient as well, and its hook is called when none is missing.
    """

    def __init__(
        self, backward: Backward, param: ManagedParam, device: torch.device, alone: Callable[[], bool]
    ) -> None:
        self._backward = backward
        self._param = param
        self._alone = alone
        self.sign = torch.zeros((), device=device, requires_grad=True)
        own = weakref.ref(self)  # a cycle through autograd's hooks is never collected
        register: Any = self.sign.register_post_accumulate_grad_hook
        register(lambda _: _complete(own()))

    def take(self, rows: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """Takes a gradient of rows, in backward. Returns what autograd itself is to add up for the weight: None, unless
        uses of the whole weight have gradients, too.
        """
        if self._param.on_gradient is None:
            raise StateError(REMOVED)
        with without_overrides():
            if not self._param.home.requires_grad:  # frozen since: autograd asks the same of its leaves
                return None
        if self._alone():
            self._backward.rows_ready(self._param, rows, gradient)
            return None
        whole = torch.zeros(self._param.layout.shape, dtype=gradient.dtype, device=gradient.device)
        return whole.index_copy(0, rows.to(gradient.device), gradient)

    def complete(self) -> None:
        """All uses of rows have given their gradients in one backward. Called by autograd, by the hook of `sign`."""
        self.sign.grad = None
        self._backward.rows_complete(self._param)


def _complete(gradients: _OfWeight | None) -> None:
    if gradients is not None:
        gradients.complete()


class TakenRows(torch.autograd.Function):
    """Saves what a plain run's operation in its place saves, and reads no weight in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        _leaf: torch.Tensor,
        _sign: torch.Tensor,
        values: Callable[[], torch.Tensor],
        gradients: _OfWeight,
        rows: torch.Tensor,
        to_rows: Callable[..., torch.Tensor],
        *saved: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.gradients, ctx.rows, ctx.to_rows = gradients, rows, to_rows
        return values()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = ctx.gradients.take(ctx.rows, ctx.to_rows(gradient, *ctx.saved_tensors))
        return whole, torch.zeros((), device=gradient.device), *(None for _ in ctx.needs_input_grad[2:])
