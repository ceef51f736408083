"""What is the norm of all gradients? Most gradients' own norms are taken once they are on the host, beside backward."""

import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from headrace.optim import threads
from headrace.optim.ownership import Ownership
from headrace.runtime.grad_scaler import grad_scaler_leaves_traces
from headrace.runtime.pending import Unit
from headrace.runtime.sharded import is_sharded, largest_of_ranks, local_shard, whole_of
from headrace.runtime.torch_rules import foreach_norm, group_tensors

_BYTES_OF_A_THREAD = 1 << 20  # fewer are read sooner than another thread is woken


class SeenGradient:
    """A gradient as it is now. The weak reference to it does not count as a user of the gradient."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient = weakref.ref(gradient)
        self._version = gradient._version

    def is_still(self, gradient: torch.Tensor | None) -> bool:
        """Whether `gradient` is the one that was seen, and was not written to since."""
        return gradient is not None and self._gradient() is gradient and self._version == gradient._version


class GradientNorms:
    """The norms of gradients, taken on their way home; a `Watcher` of the units of one optimizer.

    `run` submits a job to a thread that may wait for copies; the threads that update weights take the norms.
    """

    begins_updates = False

    def __init__(self, run: Callable[..., "Future[None]"]) -> None:
        self._run = run
        self._jobs: deque[Future[None]] = deque()
        self._norms: dict[Any, tuple[object, torch.Tensor]] = {}  # each with the call of `complete` that it belongs to
        self._latest: dict[Any, object] = {}  # the last such call; jobs of older calls may end after it
        self._seen: dict[Any, SeenGradient] = {}  # as they were when backward ended
        self._process = os.getpid()
        grad_scaler_leaves_traces.use(self)

    def complete(self, unit: Unit, gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]) -> Sequence[Any]:
        """Called when all gradients of a unit are here, or on their way: has their norms taken when they have come."""
        this = object()
        alike = ((parameter, one) for parameter, one in gradients.items() if _is_alike_on_all_threads(one))
        waiting = deque(alike)  # emptied as it goes: the next backward wants the gradients' memory back

        def keep(parameter: Any, norm: torch.Tensor) -> None:
            self._norms[parameter] = this, norm

        def job() -> None:
            arrived()
            at_most = _threads_for([gradient for _, gradient in waiting])
            self._jobs.extend(threads.begin_on_each(partial(_take, waiting, keep), at_most=at_most))

        for parameter in gradients:
            self._seen.pop(parameter, None)
            self._latest[parameter] = this
        while self._jobs and self._jobs[0].done() and self._jobs[0].exception() is None:
            self._jobs.popleft()  # there may be many backwards without a step
        self._jobs.append(self._run(job, unit.device))
        return ()

    def delivered(self, parameters: Mapping[Any, bool]) -> None:
        """Called when backward is over: norms do not count for gradients that change from now on."""
        for parameter, complete in parameters.items():
            self._seen.pop(parameter, None)
            if complete:
                self._seen[parameter] = SeenGradient(parameter.grad)

    def abandoned(self) -> None:
        """Does nothing: norms count only for gradients that are delivered."""

    def wait(self) -> None:
        """Blocks until no norm is being taken: meanwhile a gradient has one more user. Raises an error of a job."""
        if self._process != os.getpid():  # a fork: the parent's jobs never end here
            self._process = os.getpid()
            self._jobs.clear()
            self._norms.clear()
        error = None
        while self._jobs:  # a job adds others before it ends
            error = self._jobs[0].exception() or error
            self._jobs.popleft()
        if error is not None:
            raise error

    def clipping(
        self, limit: float, gradients: Mapping[Any, torch.Tensor], shared: Collection[Any], owners: Ownership
    ) -> tuple[float | None, float]:
        """The factor for all gradients, with the arithmetic of torch.nn.utils.clip_grad_norm_, and their norm.

        The factor is None if the norm is not finite. Each rank of `owners` takes the norms of its own parameters; all
        get the total.
        """
        return _factor(limit, self.total(gradients, shared, owners))

    def total(self, gradients: Mapping[Any, torch.Tensor], shared: Collection[Any], owners: Ownership) -> torch.Tensor:
        """The norm of all gradients together, with the arithmetic of `torch.nn.utils.get_total_norm`.

        `shared`: parameters whose gradients somebody else holds, too, and may have written without a trace.
        """
        tensors = list(gradients.values())
        if not owners.shares and any(tensor.device.type != "cpu" for tensor in tensors):
            return torch.nn.utils.get_total_norm(tensors)
        own = [one for one in gradients if not owners.is_elsewhere(one)]
        norms = {
            id(gradients[parameter]): taken[1]
            for parameter in own
            if (taken := self._norms.get(parameter)) is not None
            and taken[0] is self._latest.get(parameter)
            and parameter not in shared
            and self._unchanged(parameter, gradients[parameter])
        }
        missing = [gradients[parameter] for parameter in own if id(gradients[parameter]) not in norms]
        alike = [gradient for gradient in missing if _is_alike_on_all_threads(gradient)]
        if alike:
            waiting = deque((id(gradient), gradient) for gradient in alike)
            threads.on_each(partial(_take, waiting, norms.__setitem__), at_most=_threads_for(alike))
        _take(deque((id(one), one) for one in missing if id(one) not in norms), norms.__setitem__)
        if owners.shares:
            norms = _of_all_ranks(tensors, norms, owners)
        groups = group_tensors([tensors])  # type: ignore[list-item]  # gives the order of the sum
        ordered = [norms[id(tensor)] for (alike,), _ in groups.values() for tensor in alike]
        self._norms.clear()
        self._latest.clear()
        self._seen.clear()
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), 2.0)
        return total

    def _unchanged(self, parameter: Any, gradient: torch.Tensor) -> bool:
        seen = self._seen.get(parameter)
        return seen is not None and seen.is_still(gradient)


def _take(waiting: deque[tuple[Any, torch.Tensor]], keep: Callable[[Any, torch.Tensor], None]) -> None:
    """Takes the norms of gradients until none waits; `keep` gets each. Several threads may call it at once."""
    with torch.no_grad():
        while True:
            try:
                key, gradient = waiting.popleft()
            except IndexError:
                return
            keep(key, foreach_norm([gradient])[0])


def _is_alike_on_all_threads(gradient: torch.Tensor) -> bool:
    """Whether the norm has the same bits, whichever thread takes it.

    PyTorch takes the norm of such a tensor on one thread. It cuts any other tensor into one part for each thread that
    the caller may use, and callers may differ in the number of these.
    """
    on_host = gradient.device.type == "cpu"
    return on_host and gradient.dtype in (torch.float32, torch.bfloat16) and gradient.is_contiguous()


def _threads_for(gradients: Collection[torch.Tensor]) -> int:
    """How many threads should take the norms of these."""
    return 1 + sum(gradient.nbytes for gradient in gradients) // _BYTES_OF_A_THREAD


def _of_all_ranks(
    gradients: Sequence[torch.Tensor], own: Mapping[int, torch.Tensor], owners: Ownership
) -> dict[int, torch.Tensor]:
    """The norms of all gradients, by id, from each rank's norms of its own. A collective."""
    values = torch.zeros(len(gradients), dtype=torch.float64, device="cpu")  # holds all dtypes exactly
    for place, gradient in enumerate(gradients):
        if id(gradient) in own:
            values[place] = own[id(gradient)]
    every = zip(gradients, owners.ranks.added(values), strict=True)
    return {id(gradient): norm.to(gradients[0].device, gradient.dtype) for gradient, norm in every}


def clipping_of_shards(limit: float, gradients: Sequence[Any]) -> tuple[float | None, float]:
    """As `GradientNorms.clipping`, for gradients some of which are DTensors, whose norm is taken over all ranks.

    A collective. Raises RuntimeError where the mesh has no backend for the device that gradients are on.
    """
    sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    plain = [gradient for gradient in gradients if not is_sharded(gradient)]
    norms = [torch.nn.utils.get_total_norm(plain)] if plain else []
    try:
        if sharded and plain:  # ranks should have the same plain gradients; if not, all use the largest norm
            norms = [largest_of_ranks(norms[0], sharded[0].device_mesh)]
        norms += [whole_of(torch.nn.utils.get_total_norm(sharded))] if sharded else []
    except RuntimeError as error:
        if "No backend" not in str(error):
            raise
        device = local_shard(sharded[0]).device.type
        raise RuntimeError(
            f"max_grad_norm sums norms over all ranks, and the mesh's process group has no backend for {device!r},"
            " where the shards of gradients are: init_process_group('cpu:gloo,cuda:nccl')"
        ) from error
    return _factor(limit, norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms)))


def _factor(limit: float, norm: torch.Tensor) -> tuple[float | None, float]:
    factor = float(torch.clamp(limit / (norm + 1e-6), max=1.0)) if norm.isfinite() else None
    return factor, float(norm)
