"""What is saved of optimizers? Their state_dicts; what rests on disk stays there until it is read."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["Optimizers", "optimizer_file", "plain_optimizers", "state_of_optimizer"]

Optimizers = Optimizer | Sequence[Optimizer] | None


def optimizer_file(number: int) -> str:
    """Where the state of the first, the second, ... is."""
    return f"optimizer-{number}.pt" if number else "optimizer.pt"


def plain_optimizers(given: Optimizers) -> list[Optimizer]:
    """One, several or none, without the wrappers that accelerate puts around them."""
    several = [] if given is None else [given] if not isinstance(given, Sequence) else list(given)
    accelerate = sys.modules.get("accelerate")
    wrappers = () if accelerate is None else (accelerate.optimizer.AcceleratedOptimizer,)
    plain = [one.optimizer if isinstance(one, wrappers) else one for one in several]
    for one in plain:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer is a {type(one).__name__}; give one of torch.optim or millrace.optim, or a list"
            )
    return plain


def state_of_optimizer(optimizer: Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """`optimizer.state_dict()`, with `state` as that of the parameters."""
    numbers: dict[Any, int] = {}
    groups = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            numbers.setdefault(parameter, len(numbers))
        packed = {name: value for name, value in group.items() if name != "params"}
        groups.append({**packed, "params": [numbers[parameter] for parameter in group["params"]]})
    others = {key: value for key, value in state.items() if key not in numbers and not isinstance(key, torch.Tensor)}
    return {
        "state": {number: dict(state[parameter]) for parameter, number in numbers.items() if state.get(parameter)}
        | others,
        "param_groups": groups,
    }
