"""Where do gradients lie on the host? In memory made before backward, as locking pages would stall it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.memory.arena import aligned
from headrace.memory.buffers import references_beside
from headrace.memory.disk import Mapping
from headrace.memory.shared import Common
from headrace.runtime.autograd import data_of
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.rest.tiers import DiskGradients, GradientMemory


class HostGradient:
    """The memory of one parameter's `home.grad`, which is reused after `zero_grad(set_to_none=True)`.

    A user may keep a gradient beyond that (`saved = p.grad`). Then the memory is theirs, and new memory replaces it.
    """

    def __init__(
        self,
        param: ManagedParam,
        dtype: torch.dtype,
        memory: GradientMemory,
        offset: int,
        make: Callable[[int], GradientMemory],
    ) -> None:
        self.dtype = dtype
        self.next: torch.Tensor | None = None  # the tensor that `fresh` gives, once `make_next` has made it
        self.disk: DiskGradients | None = None  # where it rests on disk; None: it is in host memory, or has no bytes
        self._nbytes = param.home.numel() * dtype.itemsize
        self._layout = param.layout.shape, strides_of(param)
        self._make = make  # makes more memory, in whatever tier has room
        self._param = param  # its `kept_gradient` is made once, and each gradient is a tensor over the same storage
        self._address = 0  # where this memory lies
        # Places on disk that the user has or had: extents are not freed, so places are reused.
        self._others: list[tuple[GradientMemory, int, StorageWeakRef]] = []
        self._lie_in(memory, offset)

    def make_next(self) -> None:
        """Makes the tensor that `fresh` gives next, if there is none: in other memory, if somebody has the last one.

        `kept_gradient` and what it gives are our only tensors with that storage: any other reference to it is the
        user's (see runtime/holders.py).
        """
        if self.next is not None:
            return
        if not self._nbytes:
            self.next = torch.empty(self._layout[0], dtype=self.dtype, device="cpu")
            return
        kept = self._param.kept_gradient
        if kept is not None and references_beside(kept):
            self._move(StorageWeakRef(kept.untyped_storage()))
            kept = None
        if kept is None or kept.data_ptr() != self._address:  # the user moved it to memory that processes share
            kept = self._memory.tensor(self._offset, self._nbytes, self.dtype).as_strided_(*self._layout)
            self._param.kept_gradient, self._address = kept, kept.data_ptr()
        self.next = data_of.__get__(kept)

    def fresh(self) -> torch.Tensor:
        """A tensor of the home's shape and strides, in memory that nobody refers to. Its contents are arbitrary."""
        self.make_next()
        fresh, self.next = self.next, None
        return fresh  # type: ignore[return-value]

    def _move(self, lent: StorageWeakRef) -> None:
        """Moves on to memory that nobody has, as the user has the tensor that was `lent`."""
        if self.disk is not None:
            self._others.append((self._memory, self._offset, lent))
        for number, (memory, offset, other) in enumerate(self._others):
            if other.expired():
                del self._others[number]
                self._lie_in(memory, offset)
                return
        self._lie_in(self._make(self._nbytes), 0)

    def _lie_in(self, memory: GradientMemory, offset: int) -> None:
        self._memory, self._offset, self._param.kept_gradient = memory, offset, None
        self.disk = memory if isinstance(memory, DiskGradients) and self._nbytes else None


@dataclass(eq=False)
class NodeGradients:
    """The node's memory for gradients of some parameters of one block, and this rank's view of it."""

    arena: Common
    view: Mapping
    offsets: dict[ManagedParam, int]
    lent: dict[ManagedParam, tuple[StorageWeakRef, int]] = field(default_factory=dict)  # storage and address

    def common(self, param: ManagedParam, dtype: torch.dtype) -> torch.Tensor:
        """A gradient's memory as all ranks see it, for the average: shape (elements,)."""
        return self.arena.tensor(self.offsets[param], param.home.numel() * dtype.itemsize, dtype)

    def lend(self, param: ManagedParam, dtype: torch.dtype) -> torch.Tensor:
        """The average as the user of this rank sees it, in the home's shape. Notes that it was lent."""
        lent = self.view.tensor(self.offsets[param], param.home.numel() * dtype.itemsize, dtype)
        self.lent[param] = StorageWeakRef(lent.untyped_storage()), lent.data_ptr()
        return lent.as_strided_(param.layout.shape, strides_of(param))

    def is_kept(self, param: ManagedParam) -> bool:
        """Whether the user still refers to the tensor that was lent last."""
        return param in self.lent and not self.lent[param][0].expired()

    def has_lent(self, param: ManagedParam, gradient: torch.Tensor) -> bool:
        """Whether `gradient` is the tensor that was lent last."""
        return self.is_kept(param) and gradient.data_ptr() == self.lent[param][1]

    def leave_to_user(self) -> None:
        """Leaves all that was lent to the user, and takes a new view for what is lent from now on."""
        self.view.dirty()
        self.view = self.arena.own_view()
        self.lent.clear()


def offsets_of(params: Iterable[ManagedParam], dtype_of: Callable[[ManagedParam], torch.dtype]) -> list[int]:
    """The bytes at which gradients of these parameters begin, one after the other and aligned, and the end."""
    return [0, *accumulate(aligned(param.home.numel() * dtype_of(param).itemsize) for param in params)]


def strides_of(param: ManagedParam) -> tuple[int, ...]:
    """The strides of a parameter's gradients: the home's, or contiguous ones where the home's leave holes."""
    home = torch.empty_strided(param.layout.shape, param.layout.stride, device="meta")
    dense = torch.ops.aten.is_non_overlapping_and_dense(home)
    return param.layout.stride if dense else torch.empty(param.layout.shape, device="meta").stride()


def laid_out(gradient: torch.Tensor, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The gradient with these strides and dtype, so that the copy across the link is one run of bytes."""
    if gradient.stride() == stride and gradient.dtype == dtype:
        return gradient
    return torch.empty_strided(gradient.shape, stride, dtype=dtype, device=gradient.device).copy_(gradient)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, shape (elements,), in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def elements_of(gradient: torch.Tensor, param: ManagedParam, dtype: torch.dtype) -> torch.Tensor:
    """The gradient's elements, shape (elements,), in the order that headrace's memory for gradients has."""
    return flat(laid_out(gradient, strides_of(param), dtype))
