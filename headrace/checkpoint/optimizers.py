"""What is saved of optimizers? Their state_dicts; state on disk stays there until its bytes are read."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from headrace.checkpoint.files import Owned
from headrace.errors import CheckpointError
from headrace.memory.disk.torch_files import TorchFile
from headrace.runtime.tensors import is_stock, parameters_of

Optimizers = Optimizer | Sequence[Optimizer] | None


def optimizer_file(number: int) -> str:
    """The name of the file of an optimizer's state, by its number."""
    return f"optimizer-{number}.pt" if number else "optimizer.pt"


def plain_optimizers(given: Optimizers) -> list[Optimizer]:
    """The optimizers that were given, as a list, without the wrappers that accelerate puts around them."""
    several: list[Any] = [] if given is None else [given]
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        several = list(given)
    accelerate = sys.modules.get("accelerate")
    wrappers = () if accelerate is None else (accelerate.optimizer.AcceleratedOptimizer,)
    plain = [one.optimizer if isinstance(one, wrappers) else one for one in several]
    for one in plain:
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"optimizer is a {type(one).__name__}; give one of torch.optim or headrace.optim, or a list"
            )
    return plain


def state_of_optimizer(optimizer: Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> Owned:
    """`optimizer.state_dict()` with `state` as the parameters' state, and the parameter that owns each part of it."""
    parameters = list(dict.fromkeys(parameters_of(optimizer)))
    tree = optimizer.state_dict() if _is_made_otherwise(optimizer) else _plain_state(optimizer, state)
    numbered = tree.get("state") if isinstance(tree, Mapping) else None
    if isinstance(numbered, Mapping):
        within = range(len(parameters))
        owned = {key: Owned(value, parameters[key]) for key, value in numbered.items() if key in within}
        tree = {**tree, "state": {**numbered, **owned}}
    return Owned(tree, next(iter(parameters), None))  # the rest may change with any parameter


def _is_made_otherwise(optimizer: Optimizer) -> bool:
    """Whether hooks, or its class, may change the state_dict that it gives."""
    hooks = (optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks)
    return any(hooks) or not is_stock(type(optimizer).state_dict)


def is_loaded_otherwise(optimizer: Optimizer) -> bool:
    """Whether hooks, or its class, may change a state_dict before it is loaded."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks) or not is_stock(type(optimizer).load_state_dict)


def fitting(optimizer: Optimizer, saved: TorchFile) -> dict[Any, Any]:
    """The optimizer's parameters, by their number in the state_dict that was saved.

    Raises CheckpointError if `saved` is no such state_dict, has other groups, or tensors larger than their storage.
    """
    tree = saved.tree
    state, groups = (tree.get("state"), tree.get("param_groups")) if isinstance(tree, Mapping) else (None, None)
    if (
        not isinstance(state, Mapping)
        or not all(isinstance(entries, Mapping) for entries in state.values())
        or not isinstance(groups, list)
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)
    ):
        raise CheckpointError(f"{saved.file.path} holds no state_dict of an optimizer; load another checkpoint")
    for number, entries in state.items():
        for name, value in entries.items():
            if isinstance(value, torch.Tensor) and value.nbytes > value.untyped_storage().nbytes():
                raise CheckpointError(
                    f"{name!r} of parameter {number} is of {value.nbytes} bytes, and {saved.file.path} has"
                    f" {value.untyped_storage().nbytes()} of it; save it with .contiguous()"
                )
    there, here = ([len(group["params"]) for group in each] for each in (groups, optimizer.param_groups))
    if there != here:
        raise CheckpointError(
            f"{saved.file.path} is of an optimizer with {there} parameters in its groups; the one given has {here}"
        )
    numbers = [number for group in groups for number in group["params"]]
    return dict(zip(numbers, parameters_of(optimizer), strict=True))


def _plain_state(optimizer: Optimizer, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
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
