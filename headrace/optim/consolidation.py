"""What do state_dicts hold if ranks divide the state? This rank's part; after `consolidate_state_dict`, all."""

from collections.abc import Mapping
from typing import Any

import torch

from headrace.errors import StateError
from headrace.runtime.ranks import Ranks

Consolidated = dict[int, dict[str, Any]]  # the state of other ranks' parameters, by number

_SMALL_BYTES = 1 << 10  # how much is pickled together


class OnAnotherRank(dict[str, Any]):
    """An empty placeholder for state that another rank keeps. It refuses to be saved as if it were the state.

    torch.distributed.checkpoint finds nothing in it to save or to load.
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
    """On the rank `to`: the state of all other ranks, by parameters' numbers, in host memory. Else None. A collective.

    Tensors are sent one by one.
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
            # Elements lie in the order of the parameter's, which PyTorch's fused optimizers rely on.
            found[number][name] = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
            ranks.receive(found[number][name], rank)
    return found
