"""How is a matrix updated as a whole, if each rank has only a shard of it? On one rank, for all.

Each matrix is owned by one rank. For an update, the other ranks send it their shards of weights and gradients. It
updates the matrix in a *stand-in*, which has memory only during the update, and sends the weights back into the shards.
The owner keeps the whole state.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.optim.devices import Member
from headrace.optim.local_shards import LocalShards
from headrace.optim.ownership import Ownership
from headrace.runtime.ranks import Ranks
from headrace.runtime.sharded import Cut, cut_of, local_shard

_ROUND_BYTES = 32 << 20  # of whole gradients that a rank has at once, unless one is larger


class Gathered(Ownership):
    """Who owns the parameters of an optimizer that are DTensors cut along one dimension of one mesh."""

    def __init__(self, first: Cut, shards: LocalShards, owners: Sequence[int]) -> None:
        ranks = Ranks(first.mesh.get_group(first.mesh_dimension), first.mesh.device_type)
        super().__init__(ranks, owners)
        self._mesh = first.mesh, first.mesh_dimension
        self._shards = shards
        self._cuts: dict[torch.Tensor, Cut] = {}  # by DTensor

    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        return super().is_elsewhere(self._shards.dtensor_of(parameter))

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Gives owners to the parameters that are cut. Raises ValueError for one that is cut unlike the first one."""
        cuts = {parameter: cut for parameter in parameters if (cut := cut_of(parameter)) is not None}
        for parameter, cut in cuts.items():
            if (cut.mesh, cut.mesh_dimension) != self._mesh:
                raise ValueError(
                    f"a DTensor parameter of shape {tuple(parameter.shape)} is cut over dimension"
                    f" {cut.mesh_dimension} of {cut.mesh}, and the first one over dimension {self._mesh[1]} of"
                    f" {self._mesh[0]}; make one optimizer for the parameters of each"
                )
            device = local_shard(parameter).device
            if not self.ranks.reaches(device):
                raise ValueError(
                    f"a DTensor parameter of shape {tuple(parameter.shape)} has its shards on {device}, and the mesh's"
                    f" process group has no backend for {device.type!r} to gather them by:"
                    " init_process_group('cpu:gloo,cuda:nccl')"
                )
        self._cuts |= cuts
        super().take(list(cuts))
        for parameter in cuts:
            if not self.is_elsewhere(parameter):
                self._shards.stand_in(parameter)

    def rounds(self, members: Sequence[Member]) -> list[list[Member]]:
        """Puts as many members of each owner as fit into each round, so that all ranks work. Uncut ones come first."""
        filled: dict[int, tuple[int, int]] = {}  # by owner: its last round, and the bytes in it
        rounds: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            owner = self.map.owner(self._shards.dtensor_of(member.parameter))
            if owner is None:
                rounds[-1].append(member)
                continue
            nbytes = self._shards.dtensor_of(member.parameter).numel() * member.gradient.itemsize
            last, held = filled.get(owner, (0, 0))
            if held and held + nbytes > _ROUND_BYTES:
                last, held = last + 1, 0
            filled[owner] = last, held + nbytes
            rounds[last].append(member)
        return [rounds[number] for number in sorted(rounds)]

    def bring(self, members: Sequence[Member]) -> list[Member]:
        """Brings this rank the whole weights and gradients of the members that it owns, and returns these."""
        if not self._are_cut(members):
            return list(members)
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        incoming: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        mine = []
        for member in members:
            parameter: Any = self._shards.dtensor_of(member.parameter)
            outgoing[self.map.owner(parameter) or 0] += [local_shard(parameter).detach(), member.gradient]
            if not self.is_elsewhere(parameter):
                weight = member.parameter.detach()
                weight.untyped_storage().resize_(weight.nbytes)
                gradient = torch.empty_like(weight, dtype=member.gradient.dtype)
                for rank, pieces in enumerate(incoming):
                    pieces += [self._cuts[parameter].part(tensor, rank) for tensor in (weight, gradient)]
                member.master.changed = True  # the checksum tells whether somebody wrote the weights
                mine.append(replace(member, gradient=gradient))
        self.ranks.exchange(outgoing, incoming)
        return mine

    def _are_cut(self, members: Sequence[Member]) -> bool:
        return self._shards.dtensor_of(members[0].parameter) in self._cuts

    def spread(self, members: Sequence[Member]) -> None:
        if not self._are_cut(members):
            return
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        incoming: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        mine = [member.parameter.detach() for member in members if not self.is_elsewhere(member.parameter)]
        for member in members:
            parameter = self._shards.dtensor_of(member.parameter)
            incoming[self.map.owner(parameter) or 0].append(local_shard(parameter).detach())
            if not self.is_elsewhere(parameter):
                for rank, pieces in enumerate(outgoing):
                    pieces.append(self._cuts[parameter].part(member.parameter.detach(), rank))
        self.ranks.exchange(outgoing, incoming)
        for weight in mine:
            weight.untyped_storage().resize_(0)
