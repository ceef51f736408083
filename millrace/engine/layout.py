"""How do parameters become the byte range of a block? Aligned one behind the other; shared storages stay shared."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from millrace.engine.slot import Layout
from millrace.errors import LayoutError
from millrace.memory.arena import ALIGNMENT_BYTES, aligned

__all__ = ["by_storage", "check_can_travel", "lay_out", "travel_dtype"]


def travel_dtype(parameter: nn.Parameter, param_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter travels and computes: `param_dtype` for floating-point ones, else its own."""
    wide = parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1  # float8 weights are left as they are
    return param_dtype if param_dtype is not None and wide else parameter.dtype


def check_can_travel(name: str, parameter: nn.Parameter) -> None:
    """Raises LayoutError for a parameter whose bytes cannot be a part of a block, saying why."""
    reason = None
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        reason = "it is not initialised yet; run the lazy module once before offloading"
    elif parameter.device.type == "meta":
        reason = "it is on the meta device and has no bytes; load the weights first"
    elif parameter.layout != torch.strided:
        reason = f"its layout is {parameter.layout}; call to_dense() on it first"
    elif parameter.is_quantized:
        reason = f"its dtype {parameter.dtype} is quantised; dequantise it, or keep its module out of the model"
    elif type(parameter.data) is not torch.Tensor or type(parameter) is not nn.Parameter:
        kind = type(parameter if type(parameter) is not nn.Parameter else parameter.data).__name__
        reason = f"it is a {kind}, whose bytes lie elsewhere; keep its module out of the model, or use plain parameters"
    if reason is not None:
        raise LayoutError(f"parameter {name!r} cannot be offloaded: {reason}")


def lay_out(parameters: Sequence[nn.Parameter], param_dtype: torch.dtype | None) -> tuple[list[Layout], int]:
    """The layout of each parameter, in order, and the bytes of all: every region begins at a multiple of 64 bytes.

    A region is one parameter, or all that share a storage and travel as they are: these keep their distances, so that
    a write through one is still seen through the others.
    """
    layouts: dict[int, Layout] = {}
    end = 0
    for group in by_storage(parameters, param_dtype):
        if len(group) == 1:
            index = group[0]
            layouts[index] = _alone(parameters[index], end, travel_dtype(parameters[index], param_dtype))
            end += aligned(layouts[index].nbytes)
        else:
            shared = {index: _span(parameters[index]) for index in group}
            base = min(begin for begin, _ in shared.values()) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
            region = end, end + aligned(max(stop for _, stop in shared.values()) - base)
            for index, (begin, stop) in shared.items():
                parameter = parameters[index]
                layouts[index] = Layout(
                    offset=end + begin - base,
                    nbytes=stop - begin,
                    region=region,
                    dtype=parameter.dtype,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            end = region[1]
    return [layouts[index] for index in range(len(parameters))], end


def by_storage(parameters: Sequence[nn.Parameter], param_dtype: torch.dtype | None) -> list[list[int]]:
    """Indices of parameters, grouped by the storage they share, in order of their first member."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        casts = travel_dtype(parameter, param_dtype) != parameter.dtype
        alone = casts or not parameter.numel()
        groups[index if alone else (parameter.untyped_storage()._cdata,)].append(index)
    return list(groups.values())


def _alone(parameter: nn.Parameter, offset: int, dtype: torch.dtype) -> Layout:
    """The layout of a parameter that shares nothing: dense strides (channels_last, transposed) are kept."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    stride = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
    nbytes = parameter.numel() * dtype.itemsize
    region = offset, offset + nbytes
    return Layout(offset=offset, nbytes=nbytes, region=region, dtype=dtype, shape=parameter.shape, stride=stride)


def _span(parameter: nn.Parameter) -> tuple[int, int]:
    """The bytes of its storage that a parameter reaches: first, and one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    begin = int(parameter.storage_offset()) * parameter.element_size()
    return begin, begin + (last + 1) * parameter.element_size()
