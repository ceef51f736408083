"""How does the race detector learn of host accesses? They are announced, by hand or by a watch over CPU operators."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ._native import native


def host_access(tensor: torch.Tensor, *, write: bool, what: str) -> None:
    """Tells the race detector that the host touches `tensor` now. Plain host code is invisible to it."""
    host_access_at(tensor.data_ptr(), _span_bytes(tensor), write=write, what=what)


def host_access_at(address: int, nbytes: int, *, write: bool, what: str) -> None:
    """The same by address, of native code. Nothing is told of memory that is not pinned."""
    native.host_access(address, nbytes, write, what)


class _HostWatch(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        by_name = {formal.name: formal for formal in func._schema.arguments}
        given = [*zip(func._schema.arguments, args, strict=False), *((by_name[name], kwargs[name]) for name in kwargs)]
        tensors = [
            (leaf, formal.alias_info is not None and formal.alias_info.is_write)
            for formal, value in given
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        ]
        # Copies to and from the device are seen by the detector itself, and a view touches no bytes.
        if not func.is_view and all(tensor.device.type == "cpu" for tensor, _ in tensors):
            for tensor, write in tensors:
                if tensor.numel() and tensor.is_pinned():
                    host_access(tensor, write=write, what=func._schema.name)
        return func(*args, **kwargs)


def watch_host() -> TorchDispatchMode:
    """For a with block: announces what PyTorch's CPU operators do to pinned memory, in the calling thread.

    Other host code (numpy, ctypes, system calls) and other threads stay unseen.
    """
    return _HostWatch()


def _span_bytes(tensor: torch.Tensor) -> int:
    """From the first to the last element: the bounding range of a strided view."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
