"""Which schedules of torch.distributed.pipelining cannot run offloaded stages? Those that split backward in two.

For zero bubbles, these compute the gradients of a stage's inputs first, and later those of the parameters in autograd's
graph. Homes are not in the graph: their gradients would silently stay None. PyTorch's module is not imported here.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch

from headrace.errors import StateError
from headrace.runtime.pending import unit_of
from headrace.runtime.process_wide import Method, patched

_STAGE = "torch.distributed.pipelining.stage"


def pipelines_are_imported() -> bool:
    """Whether PyTorch's module for stages is imported: without it, there can be no stages."""
    return _STAGE in sys.modules


@patched(lambda: sys.modules[_STAGE], "stage_backward_input")
def split_backward_is_refused(own: Method) -> Method:
    """Relies on stages looking this function up by its name in their module, and passing their parameters last."""

    def stage_backward_input(*arguments: Any) -> Any:
        *others, weights = arguments
        parameters: Iterable[torch.Tensor] = list(weights)
        if any(parameter.requires_grad and unit_of(parameter) is not None for parameter in parameters):
            raise StateError(
                "the schedule splits the backward of an offloaded stage into one for inputs and one for weights, as"
                " zero-bubble schedules do, and would find no gradients of weights; use ScheduleGPipe, Schedule1F1B or"
                " ScheduleInterleaved1F1B"
            )
        return own(*others, iter(parameters))

    return stage_backward_input
