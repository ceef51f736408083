"""How do some modules of a model visit the device, while all the rest of it stays there?"""

import glob
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

import headrace
from headrace.memory.arena import aligned
from headrace.weights.model.inventory import is_left_to_user

BLOCKS_ON_DEVICE = 3  # one computes, one arrives, one more evens out their sizes


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that headrace's layout of these tensors takes, each counted once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(aligned(tensor.nbytes) for tensor in distinct.values())


def offload_some(model: nn.Module, modules: Sequence[nn.Module], visiting: int, **settings: Any) -> headrace.Offloaded:
    """Offloads these modules of `model`, within memory for the rest of it and `visiting` of the largest of them.

    Parameters that are left to the user do not count. `settings` are those of `headrace.offload`.
    """
    inside = {module: [p for p in module.parameters() if not is_left_to_user(p)] for module in modules}
    inside = {module: parameters for module, parameters in inside.items() if parameters}
    travelling = {id(parameter) for parameters in inside.values() for parameter in parameters}
    staying = {name: p for name, p in model.named_parameters() if id(p) not in travelling and not is_left_to_user(p)}
    staying_bytes = tensor_bytes(staying.values()) + tensor_bytes(model.buffers())
    return headrace.offload(
        model,
        device_memory=staying_bytes + visiting * max(map(tensor_bytes, inside.values()), default=0),
        blocks=list(inside) or "auto",
        resident=[glob.escape(name) for name in staying],
        **settings,
    )
