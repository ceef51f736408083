"""What do other designs take for the same work? Two of them, written for comparison from their documentation.

`synchronous`: every layer is copied in before its forward and its backward on the compute stream, and let go after it
(the offload training of DiffSynth-Studio). `ahead_of_residents`: the first blocks stay, each forward sends for the
block that many places ahead on a copy stream (the block offload of MindIE-SD; for inference only). Both copy from
pinned memory.
"""

from collections.abc import Sequence

import torch
from torch import nn

from headrace.runtime.autograd import in_backward

__all__ = ["ahead_of_residents", "synchronous"]


class _Streamed:
    """The parameters of one layer as pinned flat bytes, and as storages on the device that are filled when needed."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.parameters = list(layer.parameters())
        self.rest = [parameter.detach().clone().pin_memory() for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.data = torch.empty_like(parameter, device=device)
        self.nbytes = [parameter.untyped_storage().nbytes() for parameter in self.parameters]
        self.arrived: torch.Event | None = None
        self.present = True

    def drop(self) -> None:
        if self.present:
            for parameter in self.parameters:
                parameter.untyped_storage().resize_(0)
            self.present = False

    def allocate(self) -> None:
        for parameter, nbytes in zip(self.parameters, self.nbytes, strict=True):
            parameter.untyped_storage().resize_(nbytes)
        self.present = True

    def copy(self) -> None:
        for parameter, rest in zip(self.parameters, self.rest, strict=True):
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(parameter):
                parameter.copy_(rest, non_blocking=True)

    def fill(self) -> None:
        if not self.present:
            self.allocate()
            self.copy()


def synchronous(layers: Sequence[nn.Module], device: torch.device, budget_blocks: int, *, training: bool) -> None:
    """Copies on the compute stream, before each layer; holds one layer at a time, whatever `budget_blocks` is."""
    for layer in layers:
        streamed = _Streamed(layer, device)
        streamed.drop()
        layer.register_forward_pre_hook(lambda *_, streamed=streamed: streamed.fill())
        layer.register_forward_hook(lambda *_, streamed=streamed: None if in_backward() else streamed.drop())
        if training:
            layer.register_full_backward_pre_hook(lambda *_, streamed=streamed: streamed.fill())
            layer.register_full_backward_hook(lambda *_, streamed=streamed: streamed.drop())


def ahead_of_residents(
    layers: Sequence[nn.Module], device: torch.device, budget_blocks: int, *, training: bool
) -> None:
    """The first blocks stay; each layer sends for the one that far ahead. Peak 2R+1 blocks, so R fits the budget.

    Backward, which the design lacks, goes the same way downwards.
    """
    reserved = max(1, (budget_blocks - 1) // 2)
    streamed = [_Streamed(layer, device) for layer in layers]
    for block in streamed[reserved:]:
        block.drop()
    lane = torch.Stream(device=device)

    def send_for(index: int) -> None:
        if not reserved <= index < len(streamed) or streamed[index].present:
            return
        streamed[index].allocate()
        lane.wait_event(torch.accelerator.current_stream().record_event())
        with lane:
            streamed[index].copy()
            streamed[index].arrived = lane.record_event()

    def enter(index: int, step: int) -> None:
        send_for(index)
        block = streamed[index]
        if block.arrived is not None:
            torch.accelerator.current_stream().wait_event(block.arrived)
            block.arrived = None
        for distance in range(1, reserved + 1):
            send_for(index + step * distance)

    def leave(index: int) -> None:
        if index >= reserved:
            streamed[index].drop()

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: enter(index, -1 if in_backward() else 1))
        layer.register_forward_hook(lambda *_, index=index: None if in_backward() else leave(index))
        if training:
            layer.register_full_backward_pre_hook(lambda *_, index=index: enter(index, -1))
            layer.register_full_backward_hook(lambda *_, index=index: leave(index))
