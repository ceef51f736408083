"""How are experts trained that come one by one? Each that a call uses gives a gradient, which goes to the host alone.

A plain run's gradient is that of all experts, with zeros for those that no token went to. See docs/design/experts.md.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.runtime.autograd import without_overrides
from headrace.runtime.tensors import tensors_in
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.executor import Executor
from headrace.weights.passes.backward import Backward
from headrace.weights.passes.row_gradients import RowGradients

__all__ = ["ExpertGradients"]

_MARK = "headrace_whole"


class _Use:
    """Stands for a call that trains all of a block, and lives as long as the call's graph does."""


class ExpertGradients:
    """Gradients of the experts of one model. `one_by_one`: whether they may leave the device expert by expert."""

    def __init__(
        self, backward: Backward, executor: Executor, row_gradients: RowGradients, *, one_by_one: bool
    ) -> None:
        self._backward = backward
        self._executor = executor
        self._row_gradients = row_gradients
        self._one_by_one = one_by_one
        self._whole: dict[Block, weakref.WeakSet[_Use]] = {}
        # Blocks of which a call used more than single experts, and how many backwards had ended then.
        self._known_whole: dict[Block, int] = {}

    def trains(self, block: Block) -> bool:
        """Whether a call of the block's module now is part of a pass in which a weight of the block gets a gradient."""
        with without_overrides():
            follows = torch.is_grad_enabled() or self._executor.gradients_follow
            return follows and any(param.home.requires_grad for param in block.params)

    def note_whole(self, block: Block) -> None:
        """Notes that a call used more of the block than single experts."""
        self._known_whole.setdefault(block, self._backward.ended if torch.is_grad_enabled() else -1)

    def is_known_whole(self, block: Block) -> bool:
        """Whether calls are known to use more of the block than single experts.

        What a call has noted counts once the next backward has ended: a checkpoint that recomputes the call in that
        backward must do as the call did.
        """
        since = self._known_whole.get(block)
        return since is not None and since < self._backward.ended

    def comes_whole(self, block: Block, used: int) -> bool:
        """Whether a call that trains the block and uses so many of its experts is better done with all of them.

        The answer depends on nothing that changes between forward and a checkpoint's recomputation, which must do as
        forward did.
        """
        if block.trains_whole:
            self.note_whole(block)
        if not self._one_by_one or self.is_known_whole(block):
            return True
        count = 0 if block.experts is None else block.experts.count
        if 2 * used > count and self._executor.slices.has_room_for_all_of(block):
            return True
        with without_overrides():
            self._executor.evict(block)  # a plan may have brought it
        return block.presence is not Presence.ABSENT

    def came_whole(self, block: Block, output: Any) -> None:
        """Notes that a call of the block's module has computed `output` with all experts."""
        if block.experts is not None and torch.is_grad_enabled():
            for tensor in tensors_in(output):
                node: Any = tensor.grad_fn
                if node is not None:
                    use = node.metadata[_MARK] = _Use()
                    self._whole.setdefault(block, weakref.WeakSet()).add(use)

    def one(self, block: Block, param: ManagedParam, expert: int, values: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One expert's weight, which `values` gives; its gradient goes to the host as one row."""
        return self._part(block, param, values, [expert], _as_row)

    def several(
        self,
        block: Block,
        param: ManagedParam,
        used: Sequence[int],
        numbers: torch.Tensor,
        values: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """A copy of the weight of expert `used[number]` for each of the numbers: shape (*numbers.shape, ...).

        `values` gives the copies, on the device.
        """

        def to_rows(gradient: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            rows = gradient.new_zeros(len(used), *gradient.shape[numbers.dim() :])
            return rows.index_put_((numbers,), gradient, accumulate=True)

        return self._part(block, param, values, used, to_rows, numbers)

    def bank(
        self, block: Block, param: ManagedParam, used: Sequence[int], places: Sequence[int], weights: torch.Tensor
    ) -> torch.Tensor:
        """A weight in which the used experts are at these places: shape (places and more, ...).

        The places are saved for backward: a checkpoint may recompute with other places, and saves those.
        """
        return self._part(block, param, lambda: weights, used, _rows_at, torch.tensor(places, device="cpu"))

    def _part(
        self,
        block: Block,
        param: ManagedParam,
        values: Callable[[], torch.Tensor],
        experts: Sequence[int],
        to_rows: Callable[..., torch.Tensor],
        *saved: torch.Tensor,
    ) -> torch.Tensor:
        def alone() -> bool:
            return not block.trains_whole and not self._whole.get(block)

        with without_overrides():
            return self._row_gradients.computed(param, values, experts, alone, to_rows, *saved)


def _rows_at(gradient: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return gradient.index_select(0, places.to(gradient.device))


def _as_row(gradient: torch.Tensor) -> torch.Tensor:
    return gradient[None]
