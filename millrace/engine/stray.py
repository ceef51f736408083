"""Who uses homes directly? Modules that do so without calling their module, and users while an update is under way.

`F.linear(x, self.child.weight)` computes with the home of a block that no visit brought. While a pass is recorded,
torch functions that take homes come through here, and get the leaves instead. While an optimizer updates homes beside
the next pass they come through here too, and wait.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from millrace.engine.home import Home, owner_of

__all__ = ["replacing_homes", "waiting_for_homes"]

Replace = Callable[[Any], torch.Tensor | None]
Wait = Callable[[Any], None]

# What asks about a tensor, or hooks into it, and does not compute with its values.
# fmt: off
_ASKS = frozenset((
    "data_ptr", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset",
    "is_contiguous", "untyped_storage", "is_floating_point", "is_complex", "get_device", "is_pinned",
    "is_shared", "type", "register_hook", "requires_grad_", "retain_grad",
    "register_post_accumulate_grad_hook", "__repr__", "__hash__", "__deepcopy__", "__reduce_ex__", "__len__",
    "__set__", "__delete__",
))
# fmt: on
_grad: Any = torch.Tensor.grad  # may be written in place next, and an update reads it
_COMPUTING_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag"))

_replacers: list[Replace] = []
_waits: list[Wait] = []


@contextlib.contextmanager
def replacing_homes(replace: Replace) -> Iterator[None]:
    """Torch functions get `replace(owner)` for a home; None leaves the home in place."""
    with _taking_part(_replacers, replace):
        yield


@contextlib.contextmanager
def waiting_for_homes(wait: Wait) -> Iterator[None]:
    """Torch functions call `wait(owner)` for a home before they read it, or hand out its gradient."""
    with _taking_part(_waits, wait):
        yield


@contextlib.contextmanager
def _taking_part(present: list[Any], one: Any) -> Iterator[None]:
    if not _replacers and not _waits:
        Home.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
    present.append(one)
    try:
        yield
    finally:
        present.remove(one)
        if not _replacers and not _waits:
            del Home.__torch_function__


def _torch_function(_cls: type, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        if _waits and (_computes(func) or func == _grad.__get__):
            tree_map_only(Home, _waited_for, (args, kwargs))
        if _replacers and _computes(func):
            args, kwargs = tree_map_only(Home, _replaced, (args, kwargs))
        return func(*args, **kwargs)


def _computes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _COMPUTING_PROPERTIES
    return name not in _ASKS


def _waited_for(home: Home) -> Home:
    for wait in list(_waits):
        wait(owner_of(home))
    return home


def _replaced(home: Home) -> torch.Tensor:
    for replace in reversed(_replacers):
        replacement = replace(owner_of(home))
        if replacement is not None:
            return replacement
    return home
