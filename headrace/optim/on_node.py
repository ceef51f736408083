"""How do the ranks of a node update the one copy that they have of a model? Each its own parameters, for all."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.errors import StateError
from headrace.optim.deal import Deal
from headrace.optim.dealt import Dealt, Perform
from headrace.optim.devices import Member
from headrace.runtime.pending import OWNER, unit_of
from headrace.runtime.ranks import Ranks

__all__ = ["OnNode", "node_of"]

_SEEN = 64  # elements of each gradient at most, of which the ranks tell each other


class OnNode(Dealt):
    """Parameters of a model that was offloaded with `mesh`: all ranks of the node see homes and averages."""

    def __init__(self, common: Any) -> None:
        """`common`: as in `runtime.pending.Unit`."""
        ranks = Ranks(common.node.group, "cpu", common.node.look)
        super().__init__(ranks, Deal(ranks.count))
        self.common = common

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        self._described = None
        self.deal.take(parameters)

    def agree(
        self, look: Callable[[], list[Member]], groups: Sequence[dict[str, Any]], settings: Mapping[str, object]
    ) -> list[Member]:
        for group in groups:
            for parameter in group["params"]:
                if node_of(parameter) is not self.common:
                    raise StateError(
                        f"a parameter of shape {tuple(parameter.shape)} is not, or no more, one of the model that this"
                        " optimizer's other ones belong to, which is offloaded on several ranks; make a new optimizer"
                    )
        return super().agree(look, groups, settings)

    def _seen(self, member: Member) -> int:
        """All have the same average, of which each may have written its own view: clipping and scaling write all."""
        row = member.gradient[(0,) * (member.gradient.dim() - 1)] if member.gradient.numel() else member.gradient
        return zlib.crc32(row[..., :_SEEN].contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def _agreed(self, alike: Sequence[int]) -> None:
        self.common.note_step(alike)

    def update(self, members: Sequence[Member], perform: Perform) -> None:
        error = None
        try:
            self.perform(perform, members)
        except Exception as failure:  # the others wait
            error = failure
        self.common.node.meet("the end of its update")
        self.tell(error)

    def mine(self, members: Iterable[Member]) -> list[Member]:
        """Those that this rank updates; the others count as updated."""
        mine = []
        for member in members:
            if self.is_elsewhere(member.parameter):
                member.updated = True
            else:
                mine.append(member)
        return mine

    def perform(self, perform: Callable[..., None], members: Iterable[Member], *settings: Any) -> None:
        """Calls `perform`, with these settings, for what this rank updates of `members`."""
        if mine := self.mine(members):
            perform(mine, *settings)
            self.common.updated(member.parameter.__dict__[OWNER] for member in mine)

    def place_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weights as all ranks see them."""
        place: torch.Tensor = self.common.place_of(parameter.__dict__[OWNER])
        return place


def node_of(parameter: torch.Tensor) -> Any:
    """What the ranks of a node have in common of the parameter's model; None where it is this process's alone."""
    return getattr(unit_of(parameter), "common", None)
