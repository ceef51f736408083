"""What of a DTensor (FSDP2, tensor parallel) lies on this rank? Its local shard, a plain tensor, which is all we touch.

PyTorch's module is not imported here: who has DTensors has imported it.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "Cut",
    "cut_of",
    "described",
    "gradient_of_shard",
    "is_sharded",
    "largest_of_ranks",
    "lies_as",
    "local_shard",
    "sharded_like",
    "whole_of",
]

_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def local_shard(tensor: Any) -> torch.Tensor:
    """The tensor that a DTensor has on this rank; anything else as it is. Each of the two counts its own writes.

    `to_local()` of a parameter would make another object each time.
    """
    shard: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    return shard


def gradient_of_shard(parameter: Any) -> torch.Tensor | None:
    """The local shard of a DTensor's gradient, laid out as the parameter is. A collective where it is not yet."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local_shard(gradient)


@dataclass(frozen=True)
class Cut:
    """How the ranks along one dimension of a mesh have cut a tensor: as torch.chunk does, along one of its own."""

    mesh: Any
    mesh_dimension: int
    dimension: int

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What of the whole tensor that rank has; a view."""
        size = whole.shape[self.dimension]
        count = self.mesh.size(self.mesh_dimension)
        begin = min(size, rank * -(-size // count))
        return whole.narrow(self.dimension, begin, min(size, begin + -(-size // count)) - begin)


def cut_of(parameter: Any) -> Cut | None:
    """How it is cut; None for one that each rank has whole. Raises ValueError where that is along two dimensions."""
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


def lies_as(tensor: Any, parameter: Any) -> bool:
    """Whether the ranks have the same parts of both."""
    return is_sharded(tensor) and (
        (tensor.shape, tensor.placements, tensor.device_mesh)
        == (parameter.shape, parameter.placements, parameter.device_mesh)
    )


def described(tensor: Any) -> str:
    """How a tensor lies, for errors."""
    if not is_sharded(tensor):
        return f"a plain tensor of shape {tuple(tensor.shape)}"
    return f"one of shape {tuple(tensor.shape)} and {tensor.placements} over {tensor.device_mesh}"


def largest_of_ranks(value: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The largest of the ranks' values, one number each; what is not finite counts as infinite. A collective."""
    value = torch.where(value.isfinite(), value, torch.inf)
    for group in mesh.get_all_groups():
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX, group=group)
    return value


def whole_of(tensor: Any) -> torch.Tensor:
    """The values of a DTensor from all ranks. A collective."""
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def sharded_like(shard: torch.Tensor, parameter: Any) -> torch.Tensor:
    """`shard` as the local shard of a DTensor that lies as `parameter` does; on any device, nothing is copied.

    `DTensor.from_local` would move it to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(parameter.shape, parameter.stride(), shard.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=meta)
    made: torch.Tensor = DTensor(shard, spec, requires_grad=False)
    return made
