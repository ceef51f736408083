"""What does autograd keep of a weight? A handle: where it lies in its block and which contents it had, but no bytes.

Of experts that came one by one, it keeps which they were, and how they lay in a slot. Those that are gone by backward
are brought again then, as blocks are.

Active while a block's forward runs. Everything autograd saves that lies in a block's buffer becomes a handle;
everything else goes on to the hooks that were on top before (checkpointing, activation offload, a user's own), because
only the innermost hooks are called. Any unpack tells the engine that the backward of this site has begun.

A checkpoint around the visit is told of weights, too: it counts what forward and recomputation save, and a call that
was a visit in forward may be none in recomputation, because its block is there already.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from headrace.errors import BudgetError, WeightChangedError
from headrace.memory.buffers import SAVED, saved_view
from headrace.runtime.autograd import (
    FunctionNode,
    check_version,
    has_storage,
    is_wrapper,
    neg_view,
    pop_hooks,
    push_hooks,
    running_node,
    top_hooks,
    unseen,
    without_overrides,
)
from headrace.weights.model.managed_param import ManagedParam, Token
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.slices import Slices
from headrace.weights.passes.backward import Backward
from headrace.weights.passes.call import Site


class WeightHandle(NamedTuple):
    """A view of a weight that autograd saved, without its memory."""

    block: Block
    param: ManagedParam
    token: Token
    leaf_version: int  # counts what the model itself writes to the weight in forward
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements of dtype from the start of the buffer
    conjugated: bool  # whether the bytes are those of the conjugate
    negated: bool  # whether the bytes are those of the negative
    recompute: "Callable[[Any], Any] | None"  # the unpack hook of a checkpoint around, which computes again first


class SavedExperts(NamedTuple):
    """A view of one expert's weight, or of one weight of all experts in a bank, without the memory."""

    block: Block
    param: ManagedParam
    token: Token
    experts: dict[int, int]  # numbers of experts, by the slot of the bank
    bank_slots: int  # the slots of the bank up to its end, and that of the last expert; 0: any slot will do
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # bytes from the start of the slot, or of the bank
    recompute: "Callable[[Any], Any] | None"  # the unpack hook of a checkpoint around, which computes again first

    def weight(self, slices: Slices) -> torch.Tensor:
        """The view, on the device; experts that are gone are brought. An unpack hook calls this in backward.

        Raises BudgetError if it matters in which slots experts are and the bank has too few.
        """
        with without_overrides():
            bank = slices.bank_of(self.block, len(self.experts))
            if bank.slots < self.bank_slots:
                raise BudgetError(
                    f"backward needs experts of {self.block.name!r} in {self.bank_slots} slots, as forward had them,"
                    f" and there are {bank.slots} since more of the model stays on the device; run backward before"
                    " adapters are added or anything else changes what stays, or raise device_memory"
                )
            in_slots = list(self.experts) if self.bank_slots else None
            slots = slices.bring(self.block, bank, list(self.experts.values()), slots=in_slots)
            first = 0 if self.bank_slots else slots[0]
            for slot in slots:
                slices.arrive(bank, slot)
            weight = torch.empty(0, dtype=self.dtype, device=bank.buffer.device)
            begin = (first * slices.slot_bytes + self.offset) // self.dtype.itemsize
            return weight.set_(bank.buffer.untyped_storage(), begin, self.size, self.stride)


class _Saved(NamedTuple):
    """A tensor that is no weight, and its version: hooks bypass autograd's own check."""

    tensor: torch.Tensor
    version: int


class _Outer(NamedTuple):
    """What the hooks outside ours made of a tensor."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class _Wrapper(NamedTuple):
    """A tensor of a class of its own, which wraps other tensors."""

    kind: Any
    inner: dict[str, Any]  # packed
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """The saved-tensor hooks of one visit of a site."""

    def __init__(self, backward: Backward, site: Site) -> None:
        self._addresses = backward.passes.residency.addresses
        self._slices = backward.passes.executor.slices
        self._backward = backward
        self._site = site
        self.in_method = False  # whether these hooks were pushed before the pass began, and outlast it
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # hooks that are not ours
        self._checkpoint: Callable[..., Any] | None = None  # pack hook of a checkpoint, which counts
        self._recompute: Callable[..., Any] | None = None  # its unpack hook, which computes again

    def push(self, *, in_method: bool) -> None:
        """From now on autograd saves through these hooks, until they are popped. `in_method`: they outlast the pass."""
        self.in_method = in_method
        self._outer = top_hooks(True)
        if self._outer is not None:
            pack: Any = self._outer[0]
            enclosing = getattr(pack, "__self__", None)
            if isinstance(enclosing, SavedTensors):  # of the visit around this one: straight to the hooks outside it
                self._outer, self._checkpoint = enclosing._outer, enclosing._checkpoint
                self._recompute = enclosing._recompute
            elif getattr(pack, "__module__", "") == torch.utils.checkpoint.__name__:
                self._checkpoint, self._recompute = self._outer
        push_hooks(self._pack, self._unpack)

    @unseen
    def _pack(self, tensor: torch.Tensor) -> Any:
        packed: WeightHandle | SavedExperts | _Wrapper | None
        if type(tensor) is torch.Tensor or not is_wrapper(tensor):
            address = tensor.data_ptr() if has_storage(tensor) else -1
            near = self._addresses.first <= address < self._addresses.last or not address
            packed = self._pack_weight(tensor) if near or self._slices.travel else None
        else:
            packed = self._pack_wrapper(tensor)
        if packed is not None:
            if self._checkpoint is not None:
                self._checkpoint(tensor)
            return packed
        if self._outer is not None:
            return _Outer(self._outer[0](tensor), self._outer[1])
        # Detached: an output that is saved by the very node that made it would keep the graph alive for good.
        return _Saved(tensor.detach(), tensor._version)

    def _pack_weight(self, tensor: torch.Tensor) -> WeightHandle | SavedExperts | None:
        """The handle of a tensor that lies in a block, or in a bank of experts; None for any other."""
        block = self._addresses.block_of(tensor)
        if block is not None:
            dtype, offset = tensor.dtype, tensor.storage_offset()
            param = block.params_by_offset[bisect_right(block.param_offsets, offset * dtype.itemsize) - 1]
            return WeightHandle(
                block,
                param,
                param.loaded_token,
                param.leaf._version,
                dtype,
                tensor.size(),
                tensor.stride(),
                int(offset),
                tensor.is_conj(),
                tensor.is_neg(),
                self._recompute,
            )
        may_be_in_bank = self._slices.travel and has_storage(tensor)
        return _saved_experts_of(self._slices, tensor, self._recompute) if may_be_in_bank else None

    def _pack_wrapper(self, wrapper: Any) -> "_Wrapper | None":
        """A wrapper around tensors of which some lie in a block; None for any other."""
        names, context = wrapper.__tensor_flatten__()
        inner: dict[str, Any] = {}
        for name in names:
            part = getattr(wrapper, name)
            if not isinstance(part, torch.Tensor):  # a DTensor's mesh
                inner[name] = part
                continue
            packed: WeightHandle | SavedExperts | _Wrapper | None
            packed = self._pack_wrapper(part) if is_wrapper(part) else self._pack_weight(part)
            inner[name] = _Saved(part.detach(), part._version) if packed is None else packed
        if not any(isinstance(packed, WeightHandle | SavedExperts | _Wrapper) for packed in inner.values()):
            return None
        return _Wrapper(type(wrapper), inner, context, wrapper.size(), wrapper.stride())

    @unseen
    def _unpack(self, packed: Any) -> torch.Tensor:
        backward, site = self._backward, self._site
        if backward.site is not site:
            backward.reach(site)
        if isinstance(packed, _Saved):
            if packed.tensor._version != packed.version:
                check_version(packed.tensor, packed.version)
            return packed.tensor
        if isinstance(packed, WeightHandle | SavedExperts):
            if packed.recompute is not None:
                _compute_again(packed.recompute)
                backward.reach(site)
            param = packed.param
            if isinstance(packed, SavedExperts):
                check_unchanged(param, packed.token)
                return packed.weight(self._slices)
            if packed.block.presence is not Presence.PRESENT:
                backward.require(packed.block)
            if param.leaf.requires_grad:
                node = running_node()
                if isinstance(node, FunctionNode):
                    backward.note_function(param, node)
            token, leaf = packed.token, param.leaf
            with without_overrides():
                version = param.home._version
            if (version, param.untraced_changes, param.data_number) != token:
                check_unchanged(param, token)
            if leaf._version != packed.leaf_version:
                _refuse_own_write(packed)
            buffer = packed.block.buffer
            if buffer is None:
                raise WeightChangedError(f"block {packed.block.name!r} is not present")
            saved, view = buffer.__dict__.get(SAVED), (packed.dtype, packed.size, packed.stride, packed.offset)
            weight = None if saved is None else saved.get(view)
            if weight is None:
                weight = saved_view(buffer, view)
            if packed.conjugated:
                weight = weight.conj()
            return neg_view(weight) if packed.negated else weight
        if isinstance(packed, _Outer):
            return packed.unpack(packed.packed)
        wrapped: _Wrapper = packed
        kinds = WeightHandle | SavedExperts | _Wrapper | _Saved
        inner = {name: self._unpack(part) if isinstance(part, kinds) else part for name, part in wrapped.inner.items()}
        wrapper: torch.Tensor
        wrapper = wrapped.kind.__tensor_unflatten__(inner, wrapped.context, wrapped.size, wrapped.stride)
        return wrapper


def unpack_of_checkpoint() -> Any:
    """The unpack hook of the checkpoint in which this thread computes, also if a visit within it has hooks of its own;
    None: there is no checkpoint. Autograd holds the hook as long as the checkpoint may compute again.
    """
    hooks = top_hooks(True)
    if hooks is None:
        return None
    of_visit = getattr(hooks[0], "__self__", None)
    if isinstance(of_visit, SavedTensors):
        return of_visit._recompute
    return hooks[1] if getattr(hooks[0], "__module__", "") == torch.utils.checkpoint.__name__ else None


def _saved_experts_of(
    slices: Slices, tensor: torch.Tensor, recompute: "Callable[[Any], Any] | None"
) -> SavedExperts | None:
    """What to keep of a tensor that lies in a bank; None for any other."""
    place = slices.place_of(tensor)
    if place is None:
        return None
    bank, begin = place
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    nbytes = (last + 1) * tensor.itemsize
    is_bank = nbytes > slices.slot_bytes
    if is_bank and bank.in_call is not None:
        block, slots = bank.in_call
        held, offset, at = bank.experts_in(slots), begin, begin
    else:
        number, at = divmod(begin, slices.slot_bytes)
        held, offset = bank.experts_in([number]), at
        if not held:
            return None
        block = slices.block_of(held[number])
    parts = slices.slice_parts_of(block)
    index = bisect_right([part.offset for part in parts], at) - 1
    param = block.params[index]
    experts = {number: key[1] for number, key in held.items()}
    return SavedExperts(
        block,
        param,
        param.token,
        experts,
        max([-(-(begin + nbytes) // slices.slot_bytes), *(slot + 1 for slot in experts)]) if is_bank else 0,
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        offset,
        recompute,
    )


def pop_left_over(backward: Backward) -> None:
    """Takes off the hooks of visits of this model that an interrupt kept from ending."""
    while (hooks := top_hooks(True)) is not None:
        owner: Any = getattr(hooks[0], "__self__", None)
        if not isinstance(owner, SavedTensors) or owner._backward is not backward or owner.in_method:
            return
        pop_hooks()


class _ComputedAgainError(Exception):
    """Keeps a checkpoint that has computed again from handing out a tensor: the weight is here already."""


class _Nothing:
    """What a checkpoint is asked for, to have it compute again and do no more."""

    @property
    def handles(self) -> Any:
        """What the checkpoint reads first after it has computed again."""
        raise _ComputedAgainError


_NOTHING = _Nothing()


def _compute_again(unpack: Callable[[Any], Any]) -> None:
    """Has a checkpoint compute again, as it does for any saved tensor, once for each backward. What modules write in
    forward, such as BatchNorm's statistics, is then written once more, as in a plain run.

    Its unpack hook (torch.utils.checkpoint._checkpoint_hook) recomputes, then reads `holder.handles`. Raising there
    stops it before it hands out a tensor.
    """
    with contextlib.suppress(_ComputedAgainError):
        unpack(_NOTHING)


def check_unchanged(param: ManagedParam, before: Token) -> None:
    """Raises WeightChangedError if the parameter's home has other contents now than those of `before`."""
    with without_overrides():  # a look at a home is our own
        now = param.token
    if now == before:
        return
    if now == before._replace(data_number=now.data_number):
        raise WeightChangedError(
            f"parameter {param.name!r} was given other data (p.data = t) after forward used it and before backward did,"
            " which needs the data of before; run backward before that"
        )
    raise WeightChangedError(
        f"parameter {param.name!r} was modified in place after forward used it and before backward did (version"
        f" {now.version}; expected version {before.version}); run backward before optimizer.step() and the like"
    )


def _refuse_own_write(handle: WeightHandle) -> None:
    param = handle.param
    raise WeightChangedError(
        f"parameter {param.name!r} was modified in place by the model itself after forward had used it (version"
        f" {param.leaf._version}; expected version {handle.leaf_version}); use it after the change, or a clone of it"
    )
