"""What is saved of optimizers? Their state_dicts; what rests on disk stays there until it is read."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["Optimizers", "optimizer_file", "plain_optimizers", "state_of_optimizer"]

Optimizers = Optimizer | Sequence[Optimizer] | None


def optimizer_file(number: int) -> str:
    """Where the state of the first, the second, ... is."""
    return f"optimizer-{number}.pt" if number else "optimizer.pt"


def plain_optimizers(given: Optimizers) -> list[Optimizer]:
    """One, several or none, without the wrappers that accelerate puts around them."""
    several = [] if given is None else [given] if not isinstance(given, Sequence) else list(given)
    plain = [getattr(one, "optimizer", one) for one in several]
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
    return {
        "state": {number: dict(state[parameter]) for parameter, number in numbers.items() if state.get(parameter)},
        "param_groups": groups,
    }
