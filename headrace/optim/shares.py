"""Which elements are updated on their own accelerator, and which on the host? The first ones on the host.

Parameters are taken in order until the host has its share. The tensor in which the border falls is split there, at a
multiple of 128 elements: vector instructions and runs of 8-bit moments then meet the same elements as without a split,
and results have the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headrace.optim import eight_bit
from headrace.optim.devices import Member
from headrace.optim.eight_bit import RUN_ELEMENTS
from headrace.optim.weights import Weights, in_memory_order
from headrace.runtime.device import free_device_bytes

__all__ = ["SPLIT_ELEMENTS", "Shares"]

SPLIT_ELEMENTS = RUN_ELEMENTS
_RESERVE = 0.1  # of free device memory: what "auto" leaves


class Shares:
    """The border between host and device in each parameter, and the state of the two pieces of a split one."""

    def __init__(self) -> None:
        self._host_elements: dict[torch.Tensor, int] = {}
        self.pieces: dict[torch.Tensor, tuple[dict[str, Any], dict[str, Any]]] = {}

    def assign(
        self, parameters: Sequence[torch.Tensor], device_fraction: float | str, state_bytes: int, *, splits: bool
    ) -> None:
        """Draws the border in parameters, all of one device, that have none yet. `state_bytes` are of one element.

        The fraction "auto" is what fits on the device. With `splits` the border may run through a tensor.
        """
        new = [parameter for parameter in parameters if parameter not in self._host_elements]
        if not new:
            return
        if isinstance(device_fraction, str):
            device_fraction = _fraction_that_fits(parameters, state_bytes)
        left = round((1 - device_fraction) * sum(parameter.numel() for parameter in new))
        for parameter in new:
            count = parameter.numel()
            share = min(count, max(0, left))
            if share < count:
                dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
                half = count if 2 * share > count else 0
                share = round(share / SPLIT_ELEMENTS) * SPLIT_ELEMENTS if splits and dense else half
            self._host_elements[parameter] = min(share, count)
            left -= count

    def divide(
        self, members: Sequence[Member], weights_of: Callable[[torch.Tensor, int], Weights]
    ) -> tuple[list[Member], list[Member]]:
        """What is updated on the host, and what on the device; of a split parameter a piece each, 0 and 1."""
        on_host, on_device = [], []
        for member in members:
            border = self._host_elements[member.parameter]
            if border == member.parameter.numel():
                on_host.append(member)
            elif border == 0:
                on_device.append(member)
            else:
                states = self.split(member.parameter, member.state)
                for side, part, list_of_side in ((0, slice(0, border), on_host), (1, slice(border, None), on_device)):
                    list_of_side.append(member.piece(part, weights_of(member.parameter, side), states[side]))
        return on_host, on_device

    def split(self, parameter: torch.Tensor, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state of the two pieces, on the host and on the device; taken out of `state` at first."""
        if parameter not in self.pieces:
            border = self._host_elements[parameter]
            on_host: dict[str, Any] = {}
            on_device: dict[str, Any] = {}
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                    flat = in_memory_order(value, parameter)
                    on_host[name] = flat[:border].to("cpu", copy=True)
                    on_device[name] = flat[border:].to(parameter.device, copy=True)
                elif isinstance(value, torch.Tensor) and eight_bit.is_record(value, parameter.numel()):
                    on_host[name] = value[: eight_bit.records(border)].to("cpu", copy=True)
                    on_device[name] = value[eight_bit.records(border) :].to(parameter.device, copy=True)
                else:
                    on_host[name] = value
                    on_device[name] = value.clone() if isinstance(value, torch.Tensor) else value
            state.clear()
            self.pieces[parameter] = (on_host, on_device)
        return self.pieces[parameter]

    def join(self, states: dict[torch.Tensor, dict[str, Any]]) -> None:
        """The pieces go back into `states`, in host memory and in the shape of their parameter."""
        pieces, self.pieces = self.pieces, {}
        for parameter, (on_host, on_device) in pieces.items():
            for name, value in on_host.items():
                if isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
                    states[parameter][name] = torch.cat([value, on_device[name].cpu()])
                elif isinstance(value, torch.Tensor) and value.dim():
                    joined = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device="cpu")
                    flat = in_memory_order(joined, parameter)
                    flat[: value.numel()] = value
                    flat[value.numel() :] = on_device[name]
                    states[parameter][name] = joined
                else:
                    states[parameter][name] = value


def _fraction_that_fits(parameters: Sequence[torch.Tensor], state_bytes: int) -> float:
    """The share of the state for which the accelerator has memory to spare.

    What passes took at their peak stays free for the next ones.
    """
    device = parameters[0].device
    passing = torch.accelerator.max_memory_allocated(device) - torch.accelerator.memory_allocated(device)
    spare = (free_device_bytes(device) - passing) * (1 - _RESERVE)
    wanted = state_bytes * sum(parameter.numel() for parameter in parameters)
    return min(1.0, max(0.0, spare / max(1, wanted)))
