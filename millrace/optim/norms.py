"""What is the norm of all gradients? That of each is taken when it has come to the host, while backward goes on."""

import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from millrace.runtime.grad_scaler import make_grad_scaler_leave_traces
from millrace.runtime.pending import Unit
from millrace.runtime.torch_rules import foreach_norm, group_tensors

__all__ = ["GradientNorms", "SeenGradient"]


class SeenGradient:
    """A gradient as it is now. It is not kept alive, and who counts its users does not find this one."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether `gradient` is that one, and was not written to."""
        return gradient is not None and self._gradient() is gradient and self._version == gradient._version


class GradientNorms:
    """Norms of gradients that were seen on their way home; a `Watcher` of the units of one optimizer.

    `run` submits a job to the thread on which norms are taken.
    """

    def __init__(self, run: Callable[[Callable[[], None]], "Future[None]"]) -> None:
        self._run = run
        self._jobs: list[Future[None]] = []
        self._norms: dict[Any, torch.Tensor] = {}
        self._seen: dict[Any, SeenGradient] = {}  # when backward ended
        self._process = os.getpid()
        make_grad_scaler_leave_traces(self)

    def complete(self, unit: Unit, gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]) -> Sequence[Any]:
        """All gradients of a unit are here, or on their way: their norms are taken when they have come."""
        held = dict(gradients)

        def job() -> None:
            arrived()
            self._norms |= zip(held, foreach_norm(list(held.values())), strict=True)
            held.clear()  # the memory is wanted back

        for parameter in held:
            self._seen.pop(parameter, None)
        self._jobs.append(self._run(job))
        return ()

    def delivered(self, parameters: Mapping[Any, bool]) -> None:
        """Backward is over: gradients that change from now on have another norm."""
        for parameter, complete in parameters.items():
            self._seen.pop(parameter, None)
            if complete:
                self._seen[parameter] = SeenGradient(parameter.grad)

    def abandoned(self) -> None:
        """Nothing to do: norms count for gradients that are delivered."""

    def clipping(
        self, limit: float, gradients: Mapping[Any, torch.Tensor], shared: Collection[Any]
    ) -> tuple[float | None, float]:
        """The factor for all gradients, by the arithmetic of torch.nn.utils.clip_grad_norm_, and their norm.

        None where that is not finite.
        """
        norm = self.total(gradients, shared)
        factor = float(torch.clamp(limit / (norm + 1e-6), max=1.0)) if norm.isfinite() else None
        return factor, float(norm)

    def total(self, gradients: Mapping[Any, torch.Tensor], shared: Collection[Any]) -> torch.Tensor:
        """The norm of all of them, with the arithmetic of `torch.nn.utils.get_total_norm`.

        `shared`: parameters whose gradients others have, too, and may have written without a trace.
        """
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
            if (norm := self._norms.get(parameter)) is not None
            and parameter not in shared
            and self._unchanged(parameter, gradient)
        }
        missing = [tensor for tensor in tensors if id(tensor) not in norms]
        if missing:
            norms |= zip(map(id, missing), foreach_norm(missing), strict=True)
        groups = group_tensors([tensors])  # type: ignore[list-item]  # gives the order of the sum
        ordered = [norms[id(tensor)] for (alike,), _ in groups.values() for tensor in alike]
        self._norms.clear()
        self._seen.clear()
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
        return total

    def _unchanged(self, parameter: Any, gradient: torch.Tensor) -> bool:
        seen = self._seen.get(parameter)
        return seen is not None and seen.is_still(gradient)
