"""How is a matrix updated of which each rank has a shard, by a rule that needs it whole? On one rank, for all.

Each matrix belongs to a rank. Weights and gradients come there from all others, into a *stand-in* that has memory only
meanwhile; the updated weights go back into the shards. State stays with the owner, whole.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.optim.deal import Deal
from headrace.optim.dealt import Dealt, Perform
from headrace.optim.devices import Member
from headrace.optim.local_shards import LocalShards
from headrace.runtime.ranks import Ranks
from headrace.runtime.sharded import Cut, cut_of, local_shard

__all__ = ["Gathered"]

_ROUND_BYTES = 32 << 20  # of gradients that each rank has whole at once, or of one that is larger


class Gathered(Dealt):
    """Those parameters of one optimizer that are DTensors, cut along one dimension of one mesh."""

    def __init__(self, first: Cut, shards: LocalShards, owners: Sequence[int]) -> None:
        ranks = Ranks(first.mesh.get_group(first.mesh_dimension), first.mesh.device_type)
        super().__init__(ranks, Deal(ranks.count, owners))
        self._mesh = first.mesh, first.mesh_dimension
        self._shards = shards
        self._cuts: dict[torch.Tensor, Cut] = {}  # by DTensor

    def is_elsewhere(self, parameter: torch.Tensor) -> bool:
        return super().is_elsewhere(self._shards.given(parameter))

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Deals out those that are cut. Raises ValueError for one that is so otherwise than the first."""
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
        self._described = None
        self._cuts |= cuts
        self.deal.take(cuts)
        for parameter in cuts:
            if not self.is_elsewhere(parameter):
                self._shards.stand_in(parameter)

    def update(self, members: Sequence[Member], perform: Perform) -> None:
        cut = [member for member in members if self._shards.given(member.parameter) in self._cuts]
        whole = [member for member in members if self._shards.given(member.parameter) not in self._cuts]
        error = self._tried(perform, whole) if whole else None
        for batch in self._rounds(cut):
            mine = self._gather(batch)
            if mine and error is None:
                error = self._tried(perform, mine)
            self._scatter(batch)
        self.tell(error)

    def _tried(self, perform: Perform, members: list[Member]) -> Exception | None:
        try:
            perform(members)
        except Exception as error:  # the other ranks wait for what they get from here
            return error
        return None

    def _rounds(self, members: Sequence[Member]) -> list[list[Member]]:
        """What is gathered at once: of each owner as many as fit, so that all have something to do."""
        filled: dict[int | None, tuple[int, int]] = {}  # by owner: its last round, and the bytes in that
        rounds: defaultdict[int, list[Member]] = defaultdict(list)
        for member in members:
            owner = self.deal.owner(self._shards.given(member.parameter))
            nbytes = self._shards.given(member.parameter).numel() * member.gradient.itemsize
            last, held = filled.get(owner, (0, 0))
            if held and held + nbytes > _ROUND_BYTES:
                last, held = last + 1, 0
            filled[owner] = last, held + nbytes
            rounds[last].append(member)
        return [rounds[number] for number in sorted(rounds)]

    def _gather(self, batch: Sequence[Member]) -> list[Member]:
        """Weights and gradients of those that this rank owns, whole."""
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        incoming: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        mine = []
        for member in batch:
            parameter: Any = self._shards.given(member.parameter)
            outgoing[self.deal.owner(parameter) or 0] += [local_shard(parameter).detach(), member.gradient]
            if not self.is_elsewhere(parameter):
                weight = member.parameter.detach()
                weight.untyped_storage().resize_(weight.nbytes)
                gradient = torch.empty_like(weight, dtype=member.gradient.dtype)
                for rank, pieces in enumerate(incoming):
                    pieces += [self._cuts[parameter].part(tensor, rank) for tensor in (weight, gradient)]
                member.weights.changed = True  # whether they are the old ones is seen in their values
                mine.append(replace(member, gradient=gradient))
        self.ranks.exchange(outgoing, incoming)
        return mine

    def _scatter(self, batch: Sequence[Member]) -> None:
        outgoing: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        incoming: list[list[torch.Tensor]] = [[] for _ in range(self.ranks.count)]
        mine = [member.parameter.detach() for member in batch if not self.is_elsewhere(member.parameter)]
        for member in batch:
            parameter = self._shards.given(member.parameter)
            incoming[self.deal.owner(parameter) or 0].append(local_shard(parameter).detach())
            if not self.is_elsewhere(parameter):
                for rank, pieces in enumerate(outgoing):
                    pieces.append(self._cuts[parameter].part(member.parameter.detach(), rank))
        self.ranks.exchange(outgoing, incoming)
        for weight in mine:
            weight.untyped_storage().resize_(0)
