"""How does a weight get a gradient if only some rows of it came? Each use of rows has one; their sum goes to the home.

Rows are those of a table (lookup.py), or experts that come one by one (expert_dispatch.py). See docs/design/experts.md.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from headrace.errors import StateError
from headrace.runtime.autograd import without_overrides
from headrace.runtime.tensors import tensors_in
from headrace.weights.model.managed_param import REMOVED, ManagedParam
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.gradients import Gradients
from headrace.weights.passes.backward import Backward
from headrace.weights.passes.handles import unpack_of_checkpoint

_MARK, _WAYS = "headrace_whole", "headrace_ways"


class _Use:
    """Stands for a call that trains all of a block, and lives as long as the call's graph does."""


class _Way:
    """How experts of a block came to a call: `whole`, or those in `experts` one by one; None: nobody read which.

    A checkpoint that computes the call again matches what is saved by its order, and so must bring experts as the call
    did. It holds this while it may recompute.
    """

    def __init__(self, experts: Sequence[int] | None, *, whole: bool) -> None:
        self.experts, self.whole = experts, whole


class RowGradients:
    """Takes the gradients of rows of one model's weights.

    Each expert that a call uses gives a gradient, which goes to the host alone. A plain run's gradient is that of all
    experts, with zeros for those that no token went to.
    """

    def __init__(self, backward: Backward) -> None:
        self._backward = backward
        self._executor = backward.passes.executor
        # Whether gradients may leave the device expert by expert. Ranks average whole ones.
        self._one_by_one = isinstance(backward.passes.gradients, Gradients)
        self._whole: dict[Block, weakref.WeakSet[_Use]] = {}
        self._ways: dict[Block, weakref.WeakSet[_Way]] = {}
        self._known_whole: set[Block] = set()  # blocks of which a call used more than single experts
        self._signs: dict[ManagedParam, torch.Tensor] = {}  # see `_sign_of`

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
        with without_overrides():
            if not (torch.is_grad_enabled() and param.home.requires_grad):
                return values()
            param.prepare_leaf()
            if param not in self._signs:
                self._signs[param] = self._sign_of(param)
            apply: Any = TakenRows.apply
            take = partial(self._take, param, alone, torch.as_tensor(rows, device="cpu"))
            found: torch.Tensor = apply(param.leaf, self._signs[param], values, take, to_rows, *saved)
            return found

    def is_sign(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf of a graph is the sign of some weight, and no parameter."""
        return any(sign is leaf for sign in self._signs.values())

    def _sign_of(self, param: ManagedParam) -> torch.Tensor:
        """A leaf of one element, which tells when autograd has all gradients of rows of the weight: each use of rows
        gives it a gradient as well, and its hook is called when none is missing.
        """
        sign = torch.zeros((), device=self._backward.passes.device, requires_grad=True)
        backward, weight = weakref.ref(self._backward), weakref.ref(param)  # no cycle: autograd's hooks would keep it

        def complete(sign: torch.Tensor) -> None:
            sign.grad = None
            present, of = backward(), weight()
            if present is not None and of is not None:
                present.rows_complete(of)

        register: Any = sign.register_post_accumulate_grad_hook
        register(complete)
        return sign

    def _take(
        self, param: ManagedParam, alone: Callable[[], bool], rows: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Takes a gradient of rows, in backward. Returns what autograd itself is to add up for the weight: None, unless
        uses of the whole weight have gradients, too.
        """
        if param.on_gradient is None:
            raise StateError(REMOVED)
        with without_overrides():
            if not param.home.requires_grad:  # frozen since: autograd asks the same of its leaves
                return None
        if alone():
            self._backward.rows_ready(param, rows, gradient)
            return None
        whole = torch.zeros(param.layout.shape, dtype=gradient.dtype, device=gradient.device)
        return whole.index_copy(0, rows.to(gradient.device), gradient)

    # experts ----------------------------------------------------------------------------------------------------------
    def trains(self, block: Block) -> bool:
        """Whether a call of the block's module now is part of a pass in which a weight of the block gets a gradient."""
        with without_overrides():
            follows = torch.is_grad_enabled() or self._executor.gradients_follow
            return follows and any(param.home.requires_grad for param in block.params)

    def note_whole(self, block: Block) -> None:
        """Notes that a call used more of the block than single experts."""
        self._known_whole.add(block)

    def is_known_whole(self, block: Block) -> bool:
        """Whether calls are known to use more of the block than single experts, and no checkpoint has to bring these
        one by one again.
        """
        return block in self._known_whole and not self.went_in_parts(block)

    def went_in_parts(self, block: Block) -> bool:
        """Whether a checkpoint may compute a call again to which experts of the block came one by one."""
        return any(not way.whole for way in self._ways.get(block, ()))

    def comes_whole(self, block: Block, used: Sequence[int]) -> bool:
        """Whether a call that uses these experts of the block is to have all of them. If not, and the call trains them,
        the block is away afterwards.

        In training, a call that a checkpoint may compute again decides for all calls with the same experts (see _Way).
        """
        ways = list(self._ways.get(block, ())) if torch.is_grad_enabled() else []
        for way in ways:
            if way.experts == used:
                return way.whole
        if any(way.experts is None for way in ways):
            return True
        if not self.trains(block):
            return block.presence is not Presence.ABSENT
        if block.trains_whole:
            self.note_whole(block)
        if not self._one_by_one or block in self._known_whole:
            return True
        count = 0 if block.experts is None else block.experts.count
        if 2 * len(used) > count and self._executor.slices.has_room_for_all_of(block):
            return True
        with without_overrides():
            self._executor.evict(block)  # a plan may have brought it
        return block.presence is not Presence.ABSENT

    def note_way(self, block: Block, used: Sequence[int] | None, output: Any, *, whole: bool) -> None:
        """Notes how experts came to a call of the block's module that has computed `output`."""
        if block.experts is None or not torch.is_grad_enabled():
            return
        nodes: list[Any] = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        if not nodes:
            return
        unpack = unpack_of_checkpoint()
        if unpack is not None:  # not on the output's node: the output may be dropped, and the rest be computed again
            way = _Way(used, whole=whole)
            unpack.__dict__.setdefault(_WAYS, []).append(way)
            self._ways.setdefault(block, weakref.WeakSet()).add(way)
        for node in nodes if whole else ():
            use = node.metadata[_MARK] = _Use()
            self._whole.setdefault(block, weakref.WeakSet()).add(use)

    def alone(self, block: Block) -> bool:
        """Whether nothing but single experts of the block has gradients, see `computed`."""
        return not block.trains_whole and not self._whole.get(block)


class TakenRows(torch.autograd.Function):
    """Saves what a plain run's operation in its place saves, and reads no weight in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        _leaf: torch.Tensor,
        _sign: torch.Tensor,
        values: Callable[[], torch.Tensor],
        take: Callable[[torch.Tensor], torch.Tensor | None],
        to_rows: Callable[..., torch.Tensor],
        *saved: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.take, ctx.to_rows = take, to_rows
        return values()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        whole = ctx.take(ctx.to_rows(gradient, *ctx.saved_tensors))
        return whole, torch.zeros((), device=gradient.device), *(None for _ in ctx.needs_input_grad[2:])
