"""What does an expert compute with that is called with no tokens? With shapes: it need not come for that.

Where code loops over all experts of a layer, most calls are such ones. See docs/design/experts.md.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.runtime.autograd import make_subclass, tree_map_only, without_overrides
from headrace.runtime.tensors import tensors_in
from headrace.weights.model.slot import Slot
from headrace.weights.model.uses import Use, use_of
from headrace.weights.movement.block import Block

__all__ = ["IdleWeight", "is_idle"]


def is_idle(blocks: Sequence[Block], args: Any, kwargs: Any) -> bool:
    """Whether a call is one of an expert, with no tokens, and gives its weights no gradient."""
    if len(blocks) != 1 or blocks[0].called is None or blocks[0].compounds or blocks[0].users:
        return False
    given = list(tensors_in((args, kwargs)))
    if not given or any(tensor.numel() for tensor in given):
        return False
    with without_overrides():
        return not (torch.is_grad_enabled() and any(slot.home.requires_grad for slot in blocks[0].slots))


class IdleWeight(torch.Tensor):
    """A weight that is away. What is computed of it and of tensors without elements has no elements."""

    slot: Slot
    comes: Callable[[Slot], torch.Tensor]

    @classmethod
    def of(cls, slot: Slot, comes: Callable[[Slot], torch.Tensor]) -> "IdleWeight":
        """In the place of the slot's. `comes`: what lends it."""
        weight: IdleWeight = make_subclass(cls, slot.absent, False)
        weight.slot, weight.comes = slot, comes
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Its shape alone is used, or it comes after all."""
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        with without_overrides():
            if use_of(func) in (Use.ASK, Use.LOOK):
                return func(*args, **kwargs)
            if name in _COMPUTES and any(not tensor.numel() for tensor in tensors_in((args, kwargs))):
                shaped = tree_map_only(cls, lambda weight: weight.slot.absent, (args, kwargs))
                found = func(*shaped[0], **shaped[1])
                if not any(tensor.numel() for tensor in tensors_in(found)):
                    return found
            args, kwargs = tree_map_only(cls, lambda weight: weight.comes(weight.slot), (args, kwargs))
        return func(*args, **kwargs)


# What changes no tensor, and looks at no value before it computes.
# fmt: off
_COMPUTES = frozenset((
    "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "mul", "__mul__", "__rmul__",
    "add", "__add__", "__radd__", "layer_norm", "rms_norm",
))
# fmt: on
