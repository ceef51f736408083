"""Which rank updates which parameter, and keeps its state? Each goes, in order, to the one that has least so far."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["Deal"]


class Deal:
    """Parameters, dealt out to `count` ranks. The same on all of them, without a word between them."""

    def __init__(self, count: int, owners: Sequence[int] = ()) -> None:
        """`owners`: those of the first parameters, as they were dealt out before."""
        self._before = owners
        self._owners: dict[Any, int] = {}
        self._elements = [0] * count  # by rank

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Deals these out, too. Those that are frozen now count for nothing: they have no state."""
        for parameter in parameters:
            number = len(self._owners)
            fewest = self._elements.index(min(self._elements))
            owner = self._before[number] if number < len(self._before) else fewest
            self._owners[parameter] = owner
            if parameter.requires_grad:
                self._elements[owner] += parameter.numel()

    def owner(self, parameter: torch.Tensor) -> int | None:
        """The rank that updates it; None for one that was not dealt out."""
        return self._owners.get(parameter)

    @property
    def owners(self) -> list[int]:
        """Of all parameters, in their order."""
        return list(self._owners.values())
