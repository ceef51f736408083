"""What does a torch function want of a tensor that is not where it seems to be, or has another one in its place?

One table serves all such tensors: homes and leaves that are away (passes/parameter_access.py), buffers whose values are
on the device (module_buffers.py), and stand-ins for weights of which only a part is here (passes/expert_stand_ins.py).
"""

from enum import Enum, auto
from typing import Any

import torch

from headrace.runtime.autograd import tree_map_only, without_overrides


class Use(Enum):
    """What a torch function wants of a tensor."""

    ASK = auto()  # its shape or the like, which every tensor in its place has, too
    LOOK = auto()  # its device or dtype
    HOLD = auto()  # the object itself or its memory, to hook into it or to pass it on
    WRITE = auto()  # to change it in place
    COMPUTE = auto()  # its values


# fmt: off
_OF_METHODS = {
    **dict.fromkeys((
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__",
    ), Use.ASK),
    **dict.fromkeys((
        "data_ptr", "stride", "storage_offset", "is_contiguous", "untyped_storage", "is_pinned", "is_shared", "type",
        "register_hook", "requires_grad_", "retain_grad", "register_post_accumulate_grad_hook", "__repr__", "__hash__",
        "__deepcopy__", "__reduce_ex__", "__set__", "__delete__",
    ), Use.HOLD),
    **dict.fromkeys((
        "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__setitem__",
    ), Use.WRITE),
    "get_device": Use.LOOK,
}
_OF_PROPERTIES = {  # all others: HOLD
    **dict.fromkeys(("shape", "ndim", "requires_grad", "layout", "is_leaf", "grad_fn", "is_sparse"), Use.ASK),
    **dict.fromkeys(("device", "dtype", "is_cuda", "is_cpu"), Use.LOOK),
    **dict.fromkeys(("T", "mT", "H", "mH", "real", "imag"), Use.COMPUTE),
}
# fmt: on


def use_of(func: Any) -> Use:
    """What `func`, as given to `__torch_function__`, wants of the tensors that it takes."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return _OF_PROPERTIES.get(getattr(getattr(func, "__self__", None), "__name__", ""), Use.HOLD)
    use = _OF_METHODS.get(name)
    if use is not None:
        return use
    return Use.WRITE if name.endswith("_") and not name.endswith("__") else Use.COMPUTE


class StandIn(torch.Tensor):
    """A tensor of ours that answers questions about its shape, device and dtype; for all else another one is used."""

    def used(self) -> torch.Tensor:
        """The tensor that a torch function takes in its place."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_overrides():
            if func is torch.Tensor.__hash__ or use_of(func) in (Use.ASK, Use.LOOK):
                return func(*args, **(kwargs or {}))
            args, kwargs = tree_map_only(cls, cls.used, (args, kwargs or {}))
        return func(*args, **kwargs)
