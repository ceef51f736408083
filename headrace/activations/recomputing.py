"""What does a checkpoint keep for backward, and what does it compute again? headrace chooses, by seconds and bytes.

At first everything is computed again, as in any checkpoint, and each product of matrices, convolution and attention is
timed. From then on those that the choice keeps are activations, which stay or leave as planned. A checkpoint goes by
the same choice in its forward and when it computes again.
"""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.activations.choices import Measured, ValueKind
from headrace.activations.saving import Forward, forward_below
from headrace.activations.selective import outside_the_checkpoint
from headrace.activations.trace import shape_text
from headrace.runtime.autograd import DispatchMode, is_costly, tree_flatten, tree_unflatten

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the integers of as many bytes


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For `torch.utils.checkpoint`: headrace chooses what a checkpoint keeps, and what it recomputes in backward.

    Write `checkpoint(layer, x, use_reentrant=False, context_fn=headrace.checkpoint_contexts)`, or, for transformers and
    TRL, `gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": headrace.checkpoint_contexts}`. It takes
    effect in a model whose activations are offloaded; elsewhere, and in compiled code, everything is recomputed.

    In the first two steps everything is recomputed, and products of matrices, convolutions and attention are timed.
    From then on, those that take the longest for their bytes are kept: as many as fit in the `device_memory` of the
    activations, and beside them as many as leave and come back while the model computes. Always recomputed are random
    operations, those that autograd does not see (as within a `torch.autograd.Function`), and values that something
    writes to, or may write to because they outlive the checkpoint's forward, as its outputs do. The report says what
    was chosen, and why. Results stay the same bit for bit.
    """
    forward = forward_below()
    if forward is None or forward.trace.is_over:
        return nullcontext(), nullcontext()
    region = _Region(forward)
    return _Recording(region), _Recomputing(region)


class _Value:
    """What a costly operation gave in forward."""

    __slots__ = ("kept", "kind", "operation", "outlives", "structure", "to_time")

    def __init__(self, operation: Any, kind: ValueKind) -> None:
        self.operation = operation  # as of `_operation`
        self.kind = kind
        self.to_time = False  # it is timed when it is computed again
        self.outlives = False  # where it is timed: something held its memory when the checkpoint's forward was over
        self.kept: list[tuple[bool, Any]] = []  # its parts: whether that is a tensor, and what stands for it
        self.structure: Any = None  # how they make up the value


class _Region:
    """One call of a checkpoint, with its choice."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.values: list[_Value] = []
        self._choice = forward.choices.now
        self._places: Counter[Any] = Counter()
        self._storages: list[tuple[_Value, StorageWeakRef]] = []  # of the values that are timed

    def computed(self, operator: Any, args: Any, given: Any) -> None:
        """Called in forward, when a costly operation has given that."""
        forward = self.forward
        value = _Value(_operation(operator, args), (without_numbers(forward.name), operator, self._places[operator]))
        self.values.append(value)
        self._places[operator] += 1
        with outside_the_checkpoint():
            if not any(forward.takes(each) for each in _tensors(given)):
                return
            value.to_time = forward.choices.measures
            if value.to_time:
                self._storages += [(value, StorageWeakRef(each.untyped_storage())) for each in _tensors(given)]
            index = forward.computed[value.kind]
            forward.computed[value.kind] += 1
            if self._choice is not None and self._choice.keeps(value.kind, index):
                parts, value.structure = tree_flatten(given)
                tensors = [isinstance(part, torch.Tensor) for part in parts]
                value.kept = [
                    (is_tensor, forward.pack(part.detach()) if is_tensor else part)
                    for is_tensor, part in zip(tensors, parts, strict=True)
                ]

    def forward_ended(self) -> None:
        """Called in forward, when the function that is checkpointed has returned."""
        for value, storage in self._storages:
            value.outlives |= not storage.expired()
        self._storages.clear()

    def give(self, value: _Value, compute: Callable[[], Any]) -> Any:
        """The kept value, which is let go of: a second backward computes it again, as any that was written to."""
        kept, value.kept = value.kept, []
        if any(is_tensor and part.is_stale for is_tensor, part in kept):
            return compute()
        with outside_the_checkpoint():
            parts = [self.forward.unpack(part) if is_tensor else part for is_tensor, part in kept]
            return tree_unflatten(parts, value.structure)


class _Recording(DispatchMode):  # type: ignore[misc]
    """Sees the operations of a forward."""

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self._region = region

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = operator(*args, **kwargs)
        if _may_be_kept(operator, types, args, kwargs):
            self._region.computed(operator, args, given)
        return given

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._region.forward_ended()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled code runs as compiled; what it computes is not seen


class _Recomputing(DispatchMode):  # type: ignore[misc]
    """Sees the operations when they are computed again, gives what was kept, and measures in a first step."""

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self._region = region
        self._begin()

    def _begin(self) -> None:
        self._place = 0  # among the values of the region; -1 if other operations came than in forward
        self._watched: list[tuple[Measured, torch.Tensor, int, torch.Tensor]] = []

    def __enter__(self) -> Any:
        self._begin()
        return super().__enter__()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _may_be_kept(operator, types, args, kwargs):
            return operator(*args, **kwargs)
        value, compute = self._next(_operation(operator, args)), partial(operator, *args, **kwargs)
        if value is not None and value.kept:
            return self._region.give(value, compute)
        return self._measured(value, compute) if value is not None and value.to_time else compute()

    def _next(self, operation: Any) -> _Value | None:
        values = self._region.values
        if not 0 <= self._place < len(values) or values[self._place].operation != operation:
            self._place = -1
            return None
        self._place += 1
        return values[self._place - 1]

    def _measured(self, value: _Value, compute: Callable[[], Any]) -> Any:
        lanes, measured = self._region.forward.lanes, self._region.forward.trace.measured
        begun = lanes.tick()
        given = compute()
        done = lanes.tick()
        value.to_time = False
        tensors = _tensors(given)
        known = measured.setdefault(value.kind, Measured(shape=shape_text(tensors[0].dtype, tensors[0].shape)))
        known.count += 1
        known.nbytes += sum(each.nbytes for each in tensors)
        if not known.is_timed:
            known.spans.append((begun, done))
        known.changes |= value.outlives
        with outside_the_checkpoint():
            aliases = [each.detach() for each in tensors]
            self._watched += [(known, each, each._version, _sum(each)) for each in aliases]
        return given

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        with outside_the_checkpoint():
            for known, tensor, version, was in self._watched:
                # Kernels of other libraries write without raising the version.
                known.changed.append((_sum(tensor) != was) | (tensor._version != version))
        self._watched.clear()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def _may_be_kept(operator: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation is costly, and autograd sees it.

    What a function computes without gradients it may keep for its next call, so that operations are missing when it is
    computed again. Where operations with gradients are missing, PyTorch's checkpoint raises.
    """
    return is_costly(operator, types, args, kwargs) and torch.is_grad_enabled() and any(map(_wants_gradient, args))


def _wants_gradient(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.requires_grad


def _operation(operator: Any, args: Any) -> Any:
    """What tells an operation from others: itself, and what is known of the tensors that it is given."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return operator, [(each.shape, each.dtype, each.requires_grad) for each in tensors]


def _tensors(given: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(given)[0] if isinstance(each, torch.Tensor)]


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of its bits: another one, almost surely, once something has written to the tensor."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_BITS[real.itemsize]).sum(dtype=torch.int64)


@cache
def without_numbers(name: str) -> str:
    """A module's name, the same for all layers of a list."""
    return re.sub(r"\d+", "*", name)
