"""What is the norm of all gradients? That of each is taken when it has come to the host, while backward goes on."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from millrace.runtime.grad_scaler import make_grad_scaler_leave_traces
from millrace.runtime.pending import Unit

__all__ = ["GradientNorms"]


class GradientNorms:
    """Norms of gradients that were seen on their way home; a `Watcher` of the units of one optimizer.

    `run` submits a job to the thread on which norms are taken.
    """

    def __init__(self, run: Callable[[Callable[[], None]], "Future[None]"]) -> None:
        self._run = run
        self._jobs: list[Future[None]] = []
        self._norms: dict[Any, torch.Tensor] = {}
        self._seen: dict[Any, tuple[torch.Tensor, int]] = {}  # gradients as they were when backward ended
        self._process = os.getpid()
        make_grad_scaler_leave_traces()

    def complete(self, unit: Unit, gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]) -> Sequence[Any]:
        """All gradients of a unit are here, or on their way: their norms are taken when they have come."""
        held = dict(gradients)

        def job() -> None:
            arrived()
            self._norms |= zip(held, torch._foreach_norm(list(held.values())), strict=True)
            held.clear()  # the memory is wanted back

        for parameter in held:
            self._seen.pop(parameter, None)
        self._jobs.append(self._run(job))
        return ()

    def delivered(self, parameters: Iterable[Any]) -> None:
        """Backward is over: gradients that change from now on have another norm."""
        for parameter in parameters:
            self._seen[parameter] = (parameter.grad, parameter.grad._version)

    def total(self, gradients: Mapping[Any, torch.Tensor]) -> torch.Tensor:
        """The norm of all of them, with the arithmetic of `torch.nn.utils.get_total_norm`."""
        if self._process != os.getpid():  # a fork: jobs of the other process never end here
            self._process = os.getpid()
            self._jobs.clear()
            self._norms.clear()
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        tensors = list(gradients.values())
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return torch.nn.utils.get_total_norm(tensors)
        norms = {
            id(gradient): norm
            for parameter, gradient in gradients.items()
            if (norm := self._norms.get(parameter)) is not None and self._unchanged(parameter, gradient)
        }
        missing = [tensor for tensor in tensors if id(tensor) not in norms]
        if missing:
            norms |= zip(map(id, missing), torch._foreach_norm(missing), strict=True)
        groups = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]  # gives the order of the sum
        ordered = [norms[id(tensor)] for (alike,), _ in groups.values() for tensor in alike]
        self._norms.clear()
        self._seen.clear()
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
        return total

    def _unchanged(self, parameter: Any, gradient: torch.Tensor) -> bool:
        seen = self._seen.get(parameter)
        return seen is not None and seen[0] is gradient and seen[1] == gradient._version
