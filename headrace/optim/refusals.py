"""Which parameters, gradients and states do all optimizers of headrace refuse? Mainly ones that are not plain bytes."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from headrace.errors import LayoutError
from headrace.optim.options import Options
from headrace.runtime.autograd import data_of, without_overrides
from headrace.runtime.pending import Manager, name_of, unit_of


def check_duplicates(param_group: Any) -> None:
    """Raises ValueError if a parameter is in a new group twice."""
    params = param_group["params"] if isinstance(param_group, dict) else None
    if isinstance(params, list | tuple):
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        if len({id(tensor) for tensor in tensors}) < len(tensors):
            raise ValueError("optimizer contains a parameter group with duplicate parameters; name each one once")


def check_device_fraction(parameters: Iterable[torch.Tensor], fraction: float | str) -> None:
    """Raises ValueError for a share of state on an accelerator if no parameter is on one."""
    if fraction not in (0, "auto") and all(parameter.device.type == "cpu" for parameter in parameters):
        raise ValueError(
            f"device_fraction={fraction} is a share of state that is updated on the accelerator its parameters live on,"
            " and all parameters are on the CPU; leave it at 0"
        )


def check_on_node(options: Options) -> None:
    """Raises ValueError for settings that are not possible if ranks share one copy of a model."""
    if options.mesh is not None:
        raise ValueError(
            "the model was offloaded with mesh= itself, and its ranks share the optimizer's work; leave mesh out here"
        )
    if options.overlap == "backward":
        raise ValueError(
            'overlap="backward" updates weights before their gradients are averaged over the ranks; use'
            ' overlap="forward"'
        )


def check_overlap(parameters: Iterable[torch.Tensor], overlap: str) -> None:
    """Raises ValueError for a plain model on an accelerator: nothing there would wait for an update beside its passes.

    It is called in a step, not at construction: the model may be offloaded before the first step.
    """
    parameters = list(parameters)
    if any(unit_of(parameter) is not None for parameter in parameters):
        return
    for index, parameter in enumerate(parameters):
        if parameter.device.type != "cpu":
            raise ValueError(
                f"overlap={overlap!r} runs updates beside passes over an offloaded model, whose loads wait for them;"
                f" parameter {index} of shape {tuple(parameter.shape)} lives on {parameter.device}, and a plain model"
                ' reads it there at any time: leave overlap at "none", or give the model to headrace.offload() first'
            )


def check_bytes(tensor: torch.Tensor, what: Callable[[], str]) -> None:
    """Raises LayoutError if a tensor's values are not just the bytes at its address and strides."""
    with without_overrides():
        reason = _why_not_bytes(tensor)
    if reason is not None:
        raise LayoutError(f"{what()} cannot be updated in host memory: {reason}")


def check_parameter(groups: Iterable[dict[str, Any]], parameter: torch.Tensor, updated: torch.Tensor) -> None:
    """Raises LayoutError if `updated`, a parameter of `groups` or its local shard, is not plain bytes."""
    check_bytes(updated, lambda: _described(groups, parameter))


def _described(groups: Iterable[dict[str, Any]], parameter: torch.Tensor) -> str:
    index = 0
    for group in groups:
        for place, held in enumerate(group["params"]):
            if held is parameter:
                return f"parameter {index}" + (f", {group['param_names'][place]!r}," if "param_names" in group else "")
            index += 1
    raise ValueError("a parameter of no group")


def _why_not_bytes(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "it is not initialised yet; run the lazy module once before"
    kind = type(data_of.__get__(tensor))
    if kind is not torch.Tensor:
        return (
            f"it is a {kind.__name__}, which is more than the bytes at its address; use an optimizer of torch.optim for"
            " it, or plain tensors"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"its layout is {'nested' if tensor.is_nested else tensor.layout}; make it dense, as with to_dense()"
    if tensor.is_quantized:
        return f"its dtype {tensor.dtype} is quantised; call dequantize() on it"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no bytes; load the weights first"
    if tensor.is_neg() or tensor.is_conj():
        return "its bytes are to be read with another sign; call resolve_neg() or resolve_conj() on it"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return f"its storage of {tensor.nbytes} bytes was freed (resized to 0); bring them back before step()"
    return None


def check_one_model(parameters: Iterable[torch.Tensor]) -> Manager | None:
    """The manager of the offloaded model to which parameters belong; None: they belong to none.

    Raises ValueError if they belong to two: updates follow the passes over one model.
    """
    first = None
    for index, parameter in enumerate(parameters):
        unit = unit_of(parameter)
        if unit is None:
            continue
        if first is None:
            first = index, parameter, unit.manager
        elif unit.manager is not first[2]:
            raise ValueError(
                f"parameter {index}, {name_of(parameter)!r} of shape {tuple(parameter.shape)}, belongs to another"
                f" offloaded model than parameter {first[0]}, {name_of(first[1])!r} of shape {tuple(first[1].shape)};"
                " make one optimizer for each model"
            )
    return None if first is None else first[2]


def check_gradient(optimizer: str, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raises RuntimeError for a gradient that is not dense or not real, LayoutError for one that is not plain bytes."""
    what = f"parameter {index} of shape {tuple(parameter.shape)} has one"
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"{optimizer} does not support sparse gradients: {what}; make it dense, as with nn.Embedding(sparse=False)"
        )
    if not gradient.is_floating_point():
        raise RuntimeError(
            f"{optimizer} does not support {gradient.dtype} gradients: {what}; optimize"
            " torch.view_as_real of the parameter"
        )
    check_bytes(gradient, lambda: f"the gradient of parameter {index} of shape {tuple(parameter.shape)}")
