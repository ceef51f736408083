"""Which tensors are inside a module's arguments or results (containers, dataclasses, ModelOutputs) or an optimizer?"""

import contextlib
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def parameters_of(optimizer: Any) -> list[Any]:
    """All parameters of a `torch.optim.Optimizer`, in the order in which its state_dict numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_stock(method: Callable[..., Any]) -> bool:
    """Whether a method of an optimizer is PyTorch's or headrace's: no user's class, nor `torch.distributed.optim`."""
    return method.__module__.startswith(("torch.optim.", "headrace."))


def tensors_in(value: Any, around: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Every tensor inside `value`. `around`: the ids of the containers it is in, which are not searched again."""
    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in around:
        around = (*around, id(value))
        for item in _items_of(value):
            yield from tensors_in(item, around)


def containers_in(value: Any, around: tuple[int, ...] = ()) -> Iterator[Any]:
    """Every list, dict and dataclass inside `value`: the containers that can be written to."""
    if id(value) in around:
        return
    if isinstance(value, list | dict) or _is_dataclass(value):
        yield value
    around = (*around, id(value))
    for item in _items_of(value):
        yield from containers_in(item, around)


def _items_of(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return fields_of(value).values() if _is_dataclass(value) else ()


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are set, past its own `__getattribute__`: that of a config may raise."""
    found = {}
    for field in dataclasses.fields(value):
        try:
            found[field.name] = object.__getattribute__(value, field.name)
        except AttributeError:
            with contextlib.suppress(AttributeError):  # not set, unless `__getattr__` gives it
                found[field.name] = getattr(value, field.name)
    return found


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are whole numbers; those of bool are not."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype != torch.bool


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor], around: tuple[int, ...] = ()) -> Any:
    """`value` with each tensor replaced by `change` of it; `value` itself if no tensor changes.

    `around`: the ids of the containers it is in. Where one of them comes again, it stays as it is.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if id(value) in around:
        return value
    around = (*around, id(value))
    if isinstance(value, PackedSequence):  # its batch sizes stay on the host
        indices = (value.sorted_indices, value.unsorted_indices)
        moved = [None if tensor is None else change(tensor) for tensor in indices]
        data = change(value.data)
        same = data is value.data and all(new is old for new, old in zip(moved, indices, strict=True))
        return value if same else PackedSequence(data, value.batch_sizes, *moved)
    if isinstance(value, MutableMapping):
        changed = {key: map_tensors(item, change, around) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return changed
        copied: Any = value.copy()  # type: ignore[attr-defined]  # an OrderedDict, BatchEncoding or ModelOutput keeps its type
        copied = copied if type(copied) is type(value) else type(value)(**changed)
        for key, item in changed.items():
            copied[key] = item
        return copied
    if isinstance(value, list | tuple):
        items = [map_tensors(item, change, around) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if _is_dataclass(value):
        fields = fields_of(value)
        changed = {name: map_tensors(item, change, around) for name, item in fields.items()}
        if all(changed[name] is item for name, item in fields.items()):
            return value
        if changed.keys() <= {field.name for field in dataclasses.fields(value) if field.init}:
            return dataclasses.replace(value, **changed)
        new = copy.copy(value)  # a new one would not have the fields that are set later
        for name in (name for name, item in changed.items() if item is not fields[name]):
            object.__setattr__(new, name, changed[name])  # also if it is frozen
        return new
    return value


def map_tree(
    tree: Any, change: Callable[[Any, str], Any], path: str = "", is_leaf: Callable[[Any], bool] = lambda _: False
) -> Any:
    """`tree` with each leaf of its dicts, lists and tuples replaced by `change(leaf, path)`, as "state.0.exp_avg".

    `is_leaf`: whether a container is a leaf, too.
    """
    within = f"{path}." if path else ""
    if isinstance(tree, Mapping) and not is_leaf(tree):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        return kind((key, map_tree(value, change, f"{within}{key}", is_leaf)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map_tree(value, change, f"{within}{index}", is_leaf) for index, value in enumerate(tree))
    return change(tree, path)
