"""What goes into a call of the model, and what comes out? Inputs, on the device; copies of weights."""

from typing import Any

import torch

from headrace.runtime.autograd import has_storage
from headrace.runtime.tensors import is_integer, map_tensors, tensors_in
from headrace.weights.model.home import Home, Leaf
from headrace.weights.movement.addresses import Addresses


def to_device(
    device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves inputs to where the model computes.

    If some of them are there already, others that can be lengths stay where they are: integers of at most one
    dimension, which PyTorch's packed sequences want on the host.
    """
    placed = device.type != "cpu" and any(tensor.device == device for tensor in tensors_in((args, kwargs)))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.device == device or (placed and tensor.dim() < 2 and is_integer(tensor))
        return tensor if stays or isinstance(tensor, Home) else tensor.to(device)

    return map_tensors(args, moved), map_tensors(kwargs, moved)


def handed_out(addresses: Addresses, output: Any, *, outermost: bool) -> Any:
    """A call's output, with views of weights copied: a view would keep a whole buffer beyond the visit.

    A weight itself may be handed on inside the model, where its block comes back for it; the user gets a copy.
    """
    if type(output) is torch.Tensor and has_storage(output):
        address = output.data_ptr()
        if address and not addresses.first <= address < addresses.last:
            return output

    def outlives(tensor: torch.Tensor) -> bool:
        if isinstance(tensor, Leaf):
            return not outermost
        block = addresses.block_of(tensor)
        return block is None or (block.index < 0 and not outermost)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if outlives(tensor):
            return tensor
        with torch.set_grad_enabled(tensor.requires_grad or torch.is_grad_enabled()):
            return tensor.clone()

    return map_tensors(output, copied)
