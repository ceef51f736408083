"""What does an optimizer take from a state_dict? The values: moments are not cast to their parameter's dtype."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from headrace.optim import eight_bit
from headrace.runtime.tensors import is_stock


def by_number(state_dict: Mapping[str, Any], groups: Iterable[dict[str, Any]]) -> dict[Any, Any]:
    """The parameters of `groups`, by their numbers in a state_dict."""
    pairs = zip(state_dict["param_groups"], groups, strict=False)
    return {
        number: parameter
        for saved, group in pairs
        for number, parameter in zip(saved["params"], group["params"], strict=False)
    }


def lacking_options(optimizer: Optimizer, saved_groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The options that an optimizer has, and that its saved groups lack.

    If there are any, another kind of optimizer was saved. Flags (True, False, None) do not count: PyTorch gives them
    their defaults when it loads what an older version saved. So may a user's class, by its `__setstate__`, with any.
    """
    if not is_stock(type(optimizer).__setstate__):
        return []
    numbers = {name for name, value in optimizer.defaults.items() if not isinstance(value, bool | None)}
    pairs = zip(optimizer.param_groups, saved_groups, strict=False)
    return sorted({name for group, saved in pairs for name in numbers & group.keys() - saved.keys()})


def values_from(
    groups: list[dict[str, Any]],
    state_dict: dict[str, Any],
    elementwise: Sequence[tuple[str, ...]],
    state_dtype: torch.dtype,
) -> dict[Any, Any]:
    """The state for each parameter of `groups`. `elementwise` names, for each group, the state that has the state dtype
    and the parameter's shape.

    The dtype torch.uint8 stands for moments in 8 bits. Loaded moments are converted into 8 bits, or out of them.

    Raises ValueError if groups do not match, or a state has another shape than its parameter.
    """
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved_groups)}, and the optimizer has"
            f" {len(groups)}"
        )
    parameters = {}
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group"
                f" {number} has {len(saved['params'])} parameters, and the optimizer's has {len(group['params'])}"
            )
        names = group.get("param_names", [None] * len(group["params"]))
        for key, parameter, name in zip(saved["params"], group["params"], names, strict=True):
            parameters[key] = (parameter, repr(name) if name else str(key), elementwise[number])
    values: dict[Any, Any] = {}
    for key, saved in state_dict["state"].items():
        if key in parameters:
            parameter, name, moments = parameters[key]
            wide_dtype = torch.float32 if state_dtype == torch.uint8 else state_dtype
            if parameter.dtype == torch.float64:
                wide_dtype = parameter.dtype
            values[parameter] = dict(_entries(saved, parameter, name, moments, wide_dtype))
            narrow = state_dtype == torch.uint8 and eight_bit.fits(parameter)
            eight_bit.convert(values[parameter], moments, parameter, narrow=narrow)
        else:
            values[key] = saved
    return values


def _entries(
    saved: dict[str, Any],
    parameter: torch.Tensor,
    parameter_name: str,
    elementwise: tuple[str, ...],
    state_dtype: torch.dtype,
) -> Iterator[tuple[str, Any]]:
    for name, value in saved.items():
        if not isinstance(value, torch.Tensor):
            yield name, value
            continue
        if name in elementwise:
            if value.shape != parameter.shape:
                raise ValueError(
                    f"state {name!r} of parameter {parameter_name} has shape {tuple(value.shape)} in the loaded state"
                    f" dict; the parameter has shape {tuple(parameter.shape)}"
                )
            value = value.to("cpu", state_dtype)
        elif name.removesuffix(eight_bit.SUFFIX) in elementwise and not eight_bit.is_record(value, parameter.numel()):
            runs = eight_bit.records(parameter.numel())
            raise ValueError(
                f"state {name!r} of parameter {parameter_name} has shape {tuple(value.shape)} and dtype {value.dtype}"
                f" in the loaded state dict; the parameter, of shape {tuple(parameter.shape)}, has {runs} runs, so the"
                f" moment must have shape ({runs}, {eight_bit.RECORD_BYTES}) and torch.uint8"
            )
        yield name, value.to("cpu")
