"""How does a checkpoint go on in another precision? Masters become weights, and weights masters, to the last bit."""

from typing import Any

import torch

from headrace.optim import narrow
from headrace.optim.kernel import Master
from headrace.optim.optimizer import HostOptimizer
from headrace.optim.weights import FULL, REMAINDER


def take_exact(weight: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    """The exact values of a weight, by the master in `state` if there is one; the master is removed."""
    for name, form in ((REMAINDER, Master.SPLIT), (FULL, Master.FULL)):
        master = state.pop(name, None)
        if isinstance(master, torch.Tensor):
            return narrow.join(weight, master.contiguous(), form)
    return weight


@torch.no_grad()
def adopt_exact(optimizer: HostOptimizer, parameter: torch.Tensor, exact: torch.Tensor, state: dict[str, Any]) -> None:
    """Sets a narrow parameter to the value `exact`, rounded as the optimizer does; `state` gets the master.

    If the optimizer keeps no master of the parameter, the value is only rounded.
    """
    form = optimizer.master_form_of(parameter)
    if form in (Master.IS_WEIGHT, Master.NONE):
        parameter.copy_(exact)
        return
    exact = exact.float()
    rounded = torch.empty(exact.shape, dtype=parameter.dtype, device="cpu")
    name, dtype = (REMAINDER, torch.int16) if form is Master.SPLIT else (FULL, torch.float32)
    state[name] = torch.empty(exact.shape, dtype=dtype, device="cpu")
    narrow.split_master(exact, rounded, state[name], form)
    parameter.copy_(rounded)
