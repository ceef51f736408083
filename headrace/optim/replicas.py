"""How do ranks with the same parameters share one update (ZeRO-1)? Each updates its own; then all get all weights."""

from collections.abc import Sequence
from typing import Any

import torch

from headrace.optim.devices import Member
from headrace.optim.ownership import Ownership
from headrace.runtime.ranks import Ranks
from headrace.runtime.sharded import is_sharded

__all__ = ["Replicas", "replicas_over"]


class Replicas(Ownership):
    """Who owns parameters that every rank has, with gradients that were averaged."""

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """As in `Ownership`. Raises ValueError for parameters that cannot be sent over the mesh."""
        for parameter in parameters:
            what = f"a parameter of shape {tuple(parameter.shape)}"
            if is_sharded(parameter):
                raise ValueError(
                    f"{what} is a DTensor over {parameter.device_mesh}, which has its ranks already;"  # type: ignore[attr-defined]
                    " leave mesh out, which is for plain tensors that all ranks have alike"
                )
            if not self.ranks.reaches(parameter.device):
                raise ValueError(
                    f"{what} is on {parameter.device}, and the mesh's process group has no backend for"
                    f" {parameter.device.type!r}: init_process_group('cpu:gloo,cuda:nccl')"
                )
        super().take(parameters)

    def spread(self, members: Sequence[Member]) -> None:
        owners = ((self.map.owner(member.parameter) or 0, member) for member in members)
        self.ranks.spread((owner, member.parameter.detach()) for owner, member in owners)


def replicas_over(mesh: Any, owners: Sequence[int], kind: type[Replicas]) -> Replicas:
    """The ownership by ranks of a mesh. Raises TypeError or ValueError unless it is a mesh of one dimension."""
    from torch.distributed.device_mesh import DeviceMesh  # here: not every build of PyTorch has it

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; give the DeviceMesh over whose ranks gradients are averaged:"
            " torch.distributed.init_device_mesh('cuda', (world_size,))"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("replicate", "shard")
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions, of sizes {tuple(mesh.shape)}; give the one over which gradients are"
            f" averaged, such as mesh[{names[0]!r}]"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {torch.distributed.get_rank()} is not in the mesh, whose ranks are {mesh.mesh.tolist()}; make the"
            " optimizer on these ranks alone, or give a mesh that has all"
        )
    ranks = Ranks(mesh.get_group(0), mesh.device_type)
    return kind(ranks, owners)
