"""Which parameters and gradients does no optimizer of millrace take?"""

from collections.abc import Iterable

import torch

from millrace.runtime.pending import name_of, unit_of

__all__ = ["check_gradient", "check_one_model"]


def check_one_model(parameters: Iterable[torch.Tensor]) -> None:
    """Raises ValueError when parameters belong to two offloaded models: updates follow the passes over one."""
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


def check_gradient(optimizer: str, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raises RuntimeError for a gradient that is not dense or not real."""
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
