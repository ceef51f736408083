"""How much memory do some modules need on the device? What headrace lays out for them, in bytes."""

from collections.abc import Iterable

import torch
from torch import nn

from headrace.memory.arena import aligned


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of these tensors as headrace lays them out, each one once."""
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(aligned(tensor.nbytes) for tensor in distinct.values())


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters in a block."""
    return tensor_bytes(module.parameters())


def parameter_pattern(name: str) -> str:
    """A name pattern that matches the parameter `name` and no other."""
    return name.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")
