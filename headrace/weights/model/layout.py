"""How do parameters become the byte range of a block? Aligned, one after the other; shared storages stay shared."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from headrace.errors import LayoutError
from headrace.memory.arena import KERNEL_ALIGNMENT_BYTES, aligned, is_large
from headrace.runtime.autograd import address_of
from headrace.weights.model.home import AliasHome, AliasParam, Home
from headrace.weights.model.managed_param import Layout
from headrace.weights.model.precision import ParamDtype, Precision, cast_dtype


def travel_dtype(parameter: nn.Parameter, param_dtype: ParamDtype) -> torch.dtype:
    """The dtype in which a parameter travels and computes: `param_dtype` for floating-point ones, else its own."""
    if isinstance(parameter, AliasParam | AliasHome):
        return parameter.dtype
    return cast_dtype(parameter, param_dtype.of(parameter) if isinstance(param_dtype, Precision) else param_dtype)


def check_can_travel(name: str, parameter: nn.Parameter) -> None:
    """Raises LayoutError for a parameter whose bytes cannot be a part of a block, saying why."""
    reason = None
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        reason = "it is not initialised yet; run the lazy module once before offloading"
    elif parameter.device.type == "meta":
        reason = "it is on the meta device and has no bytes; load the weights first"
    elif parameter.is_inference():
        reason = (
            "it was made in torch.inference_mode(), and can never be trained or written; make the model outside of it"
        )
    elif parameter.layout != torch.strided:
        reason = f"its layout is {parameter.layout}; call to_dense() on it first"
    elif parameter.is_quantized:
        reason = (
            f"its dtype {parameter.dtype} is quantised; call dequantize() on it, or offload the modules beside its own"
        )
    elif isinstance(parameter, Home):
        reason = (
            "another offloaded model has it, too; offload both as one, such as nn.ModuleList([a, b]), or call remove()"
            " on the other one's handle first"
        )
    elif parameter.device.type != "cpu" and isinstance(parameter, AliasParam):
        reason = f"a part of it is on {parameter.device}; bring the model to the CPU first (model.cpu())"
    if reason is not None:
        raise LayoutError(f"parameter {name!r} cannot be offloaded: {reason}")


def lay_out(parameters: Sequence[nn.Parameter], param_dtype: ParamDtype) -> tuple[list[Layout], int]:
    """The layout of each parameter, in order, and the bytes of all together.

    Every region begins at a multiple of 64 bytes; regions of 256 bytes and more come first, at multiples of 256. A
    region is one parameter, or all parameters that share a storage and travel in their own dtype: these keep their
    distances, so that a write through one is still seen through the others.
    """
    layouts: dict[int, Layout] = {}
    end = 0
    groups = by_storage(parameters, param_dtype)
    for group in sorted(groups, key=lambda group: not is_large(_region_bytes(parameters, group, param_dtype))):
        if len(group) == 1:
            index = group[0]
            layouts[index] = _alone(parameters[index], end, travel_dtype(parameters[index], param_dtype))
            end += aligned(layouts[index].nbytes)
        else:
            shared = {index: _span(parameters[index]) for index in group}
            base = _base(shared.values())
            region = end, end + aligned(_region_bytes(parameters, group, param_dtype))
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


def by_storage(parameters: Sequence[nn.Parameter], param_dtype: ParamDtype) -> list[list[int]]:
    """Indices of parameters, grouped by the storage they share, in order of their first member."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        casts = travel_dtype(parameter, param_dtype) != parameter.dtype
        alone = casts or not parameter.numel()
        groups[index if alone else (address_of(parameter.untyped_storage()),)].append(index)
    return list(groups.values())


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one storage have elements in common."""
    (begin, stop), (begin_of_other, stop_of_other) = _span(one), _span(other)
    if stop <= begin_of_other or stop_of_other <= begin or not (one.numel() and other.numel()):
        return False
    if one.dtype != other.dtype:
        return True
    first = min(one.storage_offset(), other.storage_offset())
    seen = torch.zeros(max(stop, stop_of_other) // one.element_size() - first, dtype=torch.bool, device="cpu")
    seen.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(seen.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def _alone(parameter: nn.Parameter, offset: int, dtype: torch.dtype) -> Layout:
    """The layout of a parameter that shares nothing. It keeps dense strides (channels_last, transposed)."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    stride = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
    nbytes = parameter.numel() * dtype.itemsize
    region = offset, offset + nbytes
    return Layout(offset=offset, nbytes=nbytes, region=region, dtype=dtype, shape=parameter.shape, stride=stride)


def _region_bytes(parameters: Sequence[nn.Parameter], group: list[int], param_dtype: ParamDtype) -> int:
    """Bytes of a region, before it is rounded up."""
    if len(group) == 1:
        parameter = parameters[group[0]]
        return parameter.numel() * travel_dtype(parameter, param_dtype).itemsize
    spans = [_span(parameters[index]) for index in group]
    return max(stop for _, stop in spans) - _base(spans)


def _base(spans: Iterable[tuple[int, int]]) -> int:
    """Where the region of a shared storage begins: at or before its first byte, so that all keep their alignment."""
    return min(begin for begin, _ in spans) // KERNEL_ALIGNMENT_BYTES * KERNEL_ALIGNMENT_BYTES


def _span(parameter: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a parameter spans: the first, and one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    begin = int(parameter.storage_offset()) * parameter.element_size()
    return begin, begin + (last + 1) * parameter.element_size()
