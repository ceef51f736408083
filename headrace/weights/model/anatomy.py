"""Which plain tensors make up a weight that is not plain itself, and how is such a weight made around other ones?

A wrapper subclass such as torchao's names them (`__tensor_flatten__`). A Parameter of a class of its own is made of its
data and of the tensors in its attributes (bitsandbytes' quantisation state, the type of a GGUF weight).
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from headrace.errors import LayoutError
from headrace.runtime.autograd import is_wrapper, make_subclass, without_overrides
from headrace.weights.model.data_parallel import ADVICE, SHARDS

OWN_DATA = "data"  # the name of the part that is the Parameter itself


class Attributes:
    """A snapshot of what the attributes of a weight, and of the objects in them, refer to."""

    def __init__(self, weight: Any) -> None:
        holders = list(_holders(weight))
        self._of = [vars(holder) for holder in holders if hasattr(holder, "__dict__")]
        self._slotted = [holder for holder in holders if any(map(_slots, type(holder).__mro__))]
        self._values = self._now()  # kept, so that other objects do not get their ids

    def changed(self) -> bool:
        """Whether an attribute refers to something else than when the snapshot was taken."""
        return list(map(id, self._values)) != list(map(id, self._now()))

    def _now(self) -> list[Any]:
        values: list[Any] = []
        for attributes in self._of:
            values += attributes.values()
        for holder in self._slotted:
            values += _fields(holder).values()
        return values


def _holders(weight: Any, around: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The weight, and the objects in its attributes that may hold tensors."""
    yield weight
    for value in _fields(weight).values():
        if not any(value is other for other in around) and (is_wrapper(value) or _may_hold_tensors(value)):
            yield from _holders(value, (*around, weight))


def parts_of(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a weight is made of, each with its path in the weight. LayoutError if nobody can tell."""
    if type(tensor).__name__ == "DTensor":
        raise LayoutError(f"it is a DTensor: {SHARDS}; or {ADVICE}")
    if is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if type(inner) in (torch.Tensor, nn.Parameter):
                yield name, inner
            else:
                yield from ((f"{name}.{path}", part) for path, part in parts_of(inner))
        return
    with without_overrides():
        plain = isinstance(tensor, nn.Parameter) and type(tensor.detach()) is torch.Tensor
    if not plain or tensor.layout != torch.strided:
        raise LayoutError(f"it is a {type(tensor).__name__}, and PyTorch cannot say of which tensors that is made")
    yield OWN_DATA, tensor
    yield from _tensors_in(tensor)


def _tensors_in(holder: Any, around: tuple[Any, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the attributes of an object, and of the objects in these, except of those in `around`."""
    for name, value in _fields(holder).items():
        if type(value) in (torch.Tensor, nn.Parameter):
            yield name, value
        elif _may_hold_tensors(value) and not any(value is other for other in around):
            yield from ((f"{name}.{path}", part) for path, part in _tensors_in(value, (*around, holder)))


def _fields(holder: Any) -> dict[str, Any]:
    slots = [name for kind in type(holder).__mro__ for name in _slots(kind) if hasattr(holder, name)]
    names = [*getattr(holder, "__dict__", {}), *slots]
    return {name: getattr(holder, name) for name in names if not name.startswith("_")}


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _may_hold_tensors(value: Any) -> bool:
    plain = isinstance(value, type | nn.Module | torch.Tensor | Callable)
    return not plain and (hasattr(value, "__dict__") or any(map(_slots, type(value).__mro__)))


def rebuilt(tensor: Any, leaves: Mapping[str, torch.Tensor]) -> Any:
    """Makes another weight of the same class around `leaves`, which are given by their paths."""
    made: Any
    if is_wrapper(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = {
            name: leaves[name] if name in leaves else rebuilt(getattr(tensor, name), _below(leaves, name))
            for name in names
        }
        made = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())
        for name, value in vars(tensor).items():  # attributes that the class does not flatten, such as `_is_param`
            made.__dict__.setdefault(name, value)
        return made
    made = make_subclass(type(tensor), leaves[OWN_DATA], False)
    made.__dict__.update(vars(tensor))
    _put_parts(tensor, made, leaves)
    return made


def _put_parts(holder: Any, made: Any, leaves: Mapping[str, torch.Tensor]) -> None:
    """Gives `made`, which is like `holder`, the leaves: directly, or in copies of the objects that hold parts."""
    for name, value in _fields(holder).items():
        if name in leaves and name != OWN_DATA:
            setattr(made, name, leaves[name])
        elif below := _below(leaves, name):
            copied = copy.copy(value)
            _put_parts(value, copied, below)
            setattr(made, name, copied)
        elif name not in getattr(made, "__dict__", {}):
            setattr(made, name, value)


def _below(leaves: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {path[len(name) + 1 :]: leaf for path, leaf in leaves.items() if path.startswith(f"{name}.")}
