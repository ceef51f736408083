"""How do the ranks of a node update a model of which they share one copy? Each updates its own parameters, for all."""

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from headrace.errors import StateError
from headrace.optim.devices import Member
from headrace.optim.ownership import Ownership
from headrace.runtime.pending import OWNER, OtherRanks, Unit, unit_of
from headrace.runtime.ranks import Ranks

_SEEN = 64  # at most this many elements of each gradient are compared between ranks


class OnNode(Ownership):
    """Who owns the parameters of a model offloaded with `mesh`: all ranks of the node see their homes and averages."""

    def __init__(self, common: Any) -> None:
        """`common`: as in `runtime.pending.Unit`."""
        ranks = Ranks(common.node.group, "cpu", common.node.look)
        super().__init__(ranks)
        self.common = common

    def _prepare(self, groups: Sequence[dict[str, Any]]) -> None:
        for group in groups:
            for parameter in group["params"]:
                if node_of(parameter) is not self.common:
                    raise StateError(
                        f"a parameter of shape {tuple(parameter.shape)} is not, or no more, one of the model that this"
                        " optimizer's other ones belong to, which is offloaded on several ranks; make a new optimizer"
                    )

    def _seen(self, member: Member) -> int:
        """A checksum of some elements: enough to see that only one rank clipped or scaled, which writes to all."""
        # The weights that all ranks see may have moved to disk.
        member.master.host = self.common.place_of(member.parameter.__dict__[OWNER])
        row = member.gradient[(0,) * (member.gradient.dim() - 1)] if member.gradient.numel() else member.gradient
        return zlib.crc32(row.reshape(-1)[:_SEEN].contiguous().view(torch.uint8).numpy().tobytes())

    def _agreed(self, alike: Sequence[int]) -> None:
        self.common.note_step(alike)

    def bring(self, members: Sequence[Member]) -> list[Member]:
        """As in `Ownership`; members of other ranks count as updated."""
        for member in members:
            member.updated = member.updated or self.is_elsewhere(member.parameter)
        return super().bring(members)

    def _performed(self, mine: Sequence[Member]) -> None:
        self.common.updated(member.parameter.__dict__[OWNER] for member in mine)

    def spread(self, members: Sequence[Member]) -> None:
        self.common.node.meet("the end of its update")

    def begin_update(self, unit: Unit) -> OtherRanks | None:
        others: OtherRanks | None = self.common.begin_update(unit)
        return others

    def end_closure(self) -> None:
        self.common.agree("what its closure wrote")

    def end_step(self) -> None:
        self.common.accept()

    def discard_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        self.common.discard(parameters)


def node_of(parameter: torch.Tensor) -> Any:
    """What the ranks of a node share of the parameter's model; None if the model is this process's alone."""
    return getattr(unit_of(parameter), "common", None)
