"""Which part of a DTensor (FSDP2, tensor parallel) is on this rank? Its local shard, the plain tensor that we handle.

PyTorch's module for DTensors is imported only when needed: whoever has one has imported it already.
"""

import contextlib
import sys
from dataclasses import dataclass
from typing import Any

import torch

_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Any) -> torch.Tensor:
    """A DTensor's plain tensor on this rank; any other tensor itself. DTensor and shard have separate `_version`s.

    `to_local()` of a parameter would return a new object each time.
    """
    shard: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return shard


def gradient_of_shard(parameter: Any) -> torch.Tensor | None:
    """The local shard of a DTensor's gradient, placed as the parameter is. A collective if it is placed otherwise."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_shard(gradient)


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut among the ranks of one mesh dimension: along a dimension of its own, as by torch.chunk."""

    mesh: Any
    mesh_dimension: int
    dimension: int

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of the whole tensor that `rank` has, as a view."""
        size = whole.shape[self.dimension]
        count = self.mesh.size(self.mesh_dimension)
        begin = min(size, rank * -(-size // count))
        return whole.narrow(self.dimension, begin, min(size, begin + -(-size // count)) - begin)


def cut_of(parameter: Any) -> Cut | None:
    """How a parameter is cut; None if each rank has it whole. Raises ValueError if it is cut in any other way."""
    if not is_sharded(parameter) or all(placement.is_replicate() for placement in parameter.placements):
        return None
    from torch.distributed.tensor import Shard

    cut = [(at, one.dim) for at, one in enumerate(parameter.placements) if type(one) is Shard]
    whole = sum(placement.is_replicate() for placement in parameter.placements)
    if len(cut) == 1 and len(cut) + whole == len(parameter.placements):
        found = Cut(parameter.device_mesh, *cut[0])
        meta = torch.empty(parameter.shape, device="meta")
        if found.part(meta, parameter.device_mesh.get_local_rank(cut[0][0])).shape == local_shard(parameter).shape:
            return found
    raise ValueError(
        f"a DTensor parameter of shape {tuple(parameter.shape)} lies as {parameter.placements} over"
        f" {parameter.device_mesh}; Muon and Adafactor need it whole, and gather what is cut along one dimension of a"
        " mesh, in equal parts: use headrace.optim.AdamW for it"
    )


def first_element(parameter: Any) -> int:
    """The place, in the whole parameter, of its shard's first element; 0 unless it is cut along a single dimension."""
    cut = None
    with contextlib.suppress(ValueError):
        cut = cut_of(parameter)
    if cut is None:
        return 0
    rank = parameter.device_mesh.get_local_rank(cut.mesh_dimension)
    return int(cut.part(torch.empty(parameter.shape, device="meta"), rank).storage_offset())


def lies_as(tensor: Any, parameter: Any) -> bool:
    """Whether each rank has the same part of `tensor` as of `parameter`."""
    return is_sharded(tensor) and (
        (tensor.shape, tensor.placements, tensor.device_mesh)
        == (parameter.shape, parameter.placements, parameter.device_mesh)
    )


def described(tensor: Any) -> str:
    """Describes a tensor's shape and placement, for errors."""
    if not is_sharded(tensor):
        return f"a plain tensor of shape {tuple(tensor.shape)}"
    return f"one of shape {tuple(tensor.shape)} and {tensor.placements} over {tensor.device_mesh}"


def largest_of_ranks(value: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The largest of the ranks' numbers, of which each gives one; NaN and -inf count as inf. A collective."""
    value = torch.where(value.isfinite(), value, torch.inf)
    for group in mesh.get_all_groups():
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=group)
    return value


def whole_of(tensor: Any) -> torch.Tensor:
    """A DTensor's whole values, gathered from all ranks. A collective."""
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def sharded_like(shard: torch.Tensor, parameter: Any) -> torch.Tensor:
    """A DTensor placed as `parameter` is, with `shard`, on any device, as its local shard. Nothing is copied.

    `DTensor.from_local` would move the shard to the mesh's device.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), shard.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    made: torch.Tensor = DTensor(shard, spec, requires_grad=False)
    return made
