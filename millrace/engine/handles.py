"""What does autograd keep of a weight? A handle: where it lies in its block and which contents it had, but no bytes.

Active while a block's forward runs. Everything autograd saves of the blocks that the visit brought becomes a handle;
everything else goes on to the hooks that were on top before (checkpointing, activation offload, a user's own), because
only the innermost hooks are called. Any unpack tells the engine that the backward of this site has begun.

Weights that another visit brought, and residents, go on to such hooks too: a checkpoint counts what it is given, and
its recomputation, in which fewer modules are visits, must give it the same. Without such hooks they become handles.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from millrace.engine.block import Block
from millrace.engine.residency import Residency
from millrace.engine.slot import Slot, Token
from millrace.errors import WeightChangedError

__all__ = ["Handle", "SavedTensors"]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Handle(NamedTuple):
    """A view of a weight that autograd saved, without its memory."""

    block: Block
    slot: Slot
    token: Token
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements of dtype from the start of the buffer


class _Saved(NamedTuple):
    """A tensor that is no weight, and its version: hooks bypass autograd's own check."""

    tensor: torch.Tensor
    version: int


class _Outer(NamedTuple):
    """What the hooks outside ours made of a tensor."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class SavedTensors:
    """The saved-tensor hooks of one visit.

    `brought` tells whether the visit brought a block; `on_unpack` makes the site's blocks present, `require` one block.
    """

    def __init__(
        self,
        residency: Residency,
        device: torch.device,
        brought: Callable[[Block], bool],
        on_unpack: Callable[[], None],
        require: Callable[[Block], None],
    ) -> None:
        self._residency = residency
        self._device = device
        self._brought_here = brought
        self._on_unpack = on_unpack
        self._require = require
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # hooks that are not ours
        self._enclosing: SavedTensors | None = None  # of the visit around this one, where no other hooks are between

    def push(self) -> None:
        """From now on autograd saves through these hooks."""
        self._outer = _top_hooks(True)
        enclosing = getattr(self._outer[0], "__self__", None) if self._outer is not None else None
        if isinstance(enclosing, SavedTensors):
            self._enclosing, self._outer = enclosing, enclosing._outer
        _push_hooks(self._pack, self._unpack)

    @staticmethod
    def pop() -> None:
        """The hooks that were on top before are again."""
        _pop_hooks()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.device == self._device and tensor.layout == torch.strided:
            block = self._residency.block_of(tensor)
            if block is not None and (self._outer is None or self._brought(block)):
                return _handle_of(block, tensor)
        if self._outer is not None:
            return _Outer(self._outer[0](tensor), self._outer[1])
        return _Saved(tensor, tensor._version)

    def _brought(self, block: Block) -> bool:
        return self._brought_here(block) or (self._enclosing is not None and self._enclosing._brought(block))

    def _unpack(self, packed: Any) -> torch.Tensor:
        self._on_unpack()
        if isinstance(packed, Handle):
            self._require(packed.block)
            return _weight(packed)
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        saved: _Saved = packed
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a"
                f" tensor of shape {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected version"
                f" {saved.version}"
            )
        return saved.tensor


def _handle_of(block: Block, tensor: torch.Tensor) -> Handle:
    offset = int(tensor.storage_offset())
    index = bisect_right(block.slot_offsets, offset * tensor.element_size()) - 1
    slot = block.slots_by_offset[index]
    return Handle(block, slot, slot.loaded_token, tensor.dtype, tensor.size(), tensor.stride(), offset)


def _weight(handle: Handle) -> torch.Tensor:
    """The weight as it was saved. Raises WeightChangedError when its home has other contents now."""
    slot = handle.slot
    if slot.token != handle.token:
        raise WeightChangedError(
            f"parameter {slot.name!r} was modified in place after forward used it and before backward did (version"
            f" {slot.token[0]}; expected version {handle.token[0]}); run backward before optimizer.step() and the like"
        )
    if handle.block.buffer is None:
        raise WeightChangedError(f"block {handle.block.name!r} is not present")
    weight = torch.empty(0, dtype=handle.dtype, device=handle.block.buffer.device)
    weight.set_(handle.block.buffer.untyped_storage(), handle.offset, handle.size, handle.stride)
    return weight
