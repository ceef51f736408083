"""What do state_dicts hold of state that is dealt out to ranks? This rank's; after `consolidate_state_dict`, all."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.errors import StateError
from headrace.runtime.ranks import Ranks

__all__ = ["Consolidated", "OnAnotherRank", "consolidated"]

Consolidated = dict[int, dict[str, Any]]  # the state of other ranks' parameters, by number

_SMALL_BYTES = 1 << 10  # what is pickled together


class OnAnotherRank(dict[str, Any]):
    """The state of a parameter whose state another rank keeps: empty, and refuses to be saved as if it were all.

    torch.distributed.checkpoint finds nothing to save or to load in it.
    """

    def __init__(self, parameter: int, rank: str) -> None:
        super().__init__()
        self._parameter = parameter
        self._rank = rank

    def __repr__(self) -> str:
        return (
            f"the state of parameter {self._parameter} is on {self._rank}; call"
            " optimizer.consolidate_state_dict(to=0) on all ranks before rank 0 takes state_dict(), or save with"
            " torch.distributed.checkpoint on all ranks"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnAnotherRank":
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(repr(self))


def consolidated(state: Mapping[int, Mapping[str, Any]], ranks: Ranks, to: int) -> Consolidated | None:
    """State by the parameters' numbers, of all other ranks, in host memory; None on those. A collective.

    Tensors come one by one.
    """
    large = [
        (number, name, value)
        for number, entries in state.items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor) and value.nbytes >= _SMALL_BYTES
    ]
    forms = {(number, name): (value.shape, value.stride(), value.dtype) for number, name, value in large}
    small = {
        number: {name: value for name, value in entries.items() if (number, name) not in forms}
        for number, entries in state.items()
    }
    told = ranks.objects((small, forms))
    if ranks.own != to:
        for _, _, value in large:
            ranks.send(value.detach(), to)
        return None
    found: Consolidated = {}
    for rank, (small, forms) in enumerate(told):
        if rank == to:
            continue
        found |= small
        for (number, name), (shape, strides, dtype) in forms.items():
            # Elements lie as their parameter's do: fused optimizers of PyTorch rely on it.
            found[number][name] = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            ranks.receive(found[number][name], rank)
    return found
