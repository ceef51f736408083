"""How do gradients get to the ranks that update with them, and only there (ZeRO-2)? One by one, as backward goes.

Each that is complete is averaged over all ranks into its owner's, and the others let go of theirs. They go in one order
on all ranks, the reverse of the optimizer's, whatever a rank's own backward does: what comes early waits for its turn.
When a backward ends, ranks tell each other what they have: what some did not use, they give zeros for.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from millrace.errors import StateError
from millrace.optim.deal import Deal
from millrace.optim.devices import Member
from millrace.optim.options import Options
from millrace.optim.replicas import Replicas, replicas_over
from millrace.runtime.autograd import EndOfBackward
from millrace.runtime.pending import unit_of
from millrace.runtime.ranks import Ranks

__all__ = ["Reduced", "dealt_over"]

_IN_FLIGHT_BYTES = 64 << 20  # of gradients on their way, or one that is larger
_HERE, _LATE = 1, 2  # what a rank says of each parameter: it has a gradient; it has another one, past its turn


class Reduced(Replicas):
    """Parameters that every rank has, whose gradients are averaged into those of their owners.

    Elsewhere `.grad` is one NaN, shown in the parameter's shape, after a backward.
    """

    def __init__(self, ranks: Ranks, deal: Deal) -> None:
        super().__init__(ranks, deal)
        self._apart = ranks.apart()
        self._order: list[torch.Tensor] = []
        self._places: dict[torch.Tensor, int] = {}  # in it
        self._hooked: dict[torch.Tensor, Any] = {}  # and its node in graphs
        self._here: dict[torch.Tensor, torch.Tensor] = {}  # gradients whose turn has not come
        self._late: dict[torch.Tensor, torch.Tensor] = {}  # those that came after it
        self._next = 0  # whose turn it is
        self._in_flight: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self._in_flight_bytes = 0
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # averages of earlier backwards, which are added to
        self._given: dict[torch.Tensor, torch.Tensor] = {}  # what `.grad` is since a backward
        self._present: object | None = None  # the backward under way
        self._has_failed = self._is_alone = False

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """As Replicas'. All ranks get the first rank's values."""
        for parameter in parameters:
            if unit_of(parameter) is not None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is of an offloaded model, whose gradients leave the"
                    " device; leave mesh and zero_stage out, and give the mesh to millrace.offload()"
                )
        super().take(parameters)
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooked:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                itself, which = weakref.WeakMethod(self._accumulates), weakref.ref(parameter)
                after = weakref.WeakMethod(self._accumulated)
                handles = [
                    node.register_prehook(partial(_call, itself, which)),
                    parameter.register_post_accumulate_grad_hook(partial(_call, after, which)),
                ]
                for handle in handles:
                    weakref.finalize(self, handle.remove)
                self._hooked[parameter] = node
                self._order.insert(0, parameter)
        self._places = {parameter: place for place, parameter in enumerate(self._order)}
        self._refuse_wrapped()
        self.ranks.spread((0, parameter.detach()) for parameter in parameters)
        torch.autograd.graph.increment_version(list(parameters))

    def agree(self, look: Callable[[], list[Member]], groups: Sequence[dict[str, Any]]) -> list[Member]:
        def reduced() -> list[Member]:
            self._check()
            found = look()
            for member in found:
                if self._given.get(member.parameter) is not member.parameter.grad:
                    raise StateError(
                        f"the gradient of parameter {member.index}, of shape {tuple(member.parameter.shape)}, was not"
                        " averaged by backward(): it was set by hand, or the parameter was frozen when the optimizer"
                        " was made; with zero_stage=2 gradients come from backward() alone"
                    )
            return found

        return super().agree(reduced, groups)

    # backward ---------------------------------------------------------------------------------------------------------
    def _accumulates(self, parameter: torch.Tensor) -> None:
        """A gradient is about to be added to what there is: that is an average already."""
        if parameter.grad is not None and parameter.grad is self._given.get(parameter):
            if not self.is_elsewhere(parameter):
                self._before[parameter] = parameter.grad
            parameter.grad = None

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._begin()
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if gradient.layout != torch.strided or gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, or has a graph"
                " (create_graph=True), and cannot be averaged with zero_stage=2"
            )
        there = self._here if self._places[parameter] >= self._next else self._late
        there[parameter] = there[parameter] + gradient if parameter in there else gradient
        while self._next < len(self._order) and self._order[self._next] in self._here:
            self._reduce(self._order[self._next], self._here)
            self._next += 1

    def _begin(self) -> None:
        self._check()
        if self._present is not None:
            return
        if not self._is_alone:
            self._refuse_wrapped()
            self._is_alone = True
        self._present = present = object()
        EndOfBackward(partial(_ended, weakref.ref(self), present)).queue()

    def ended(self, present: object, *, completed: bool) -> None:
        """The backward returned, or raised: then some ranks may wait for others in vain."""
        if present is not self._present:
            return
        self._present = None
        self._has_failed = True
        if completed:
            with torch.no_grad():
                self._finish()
            self._has_failed = False

    def _finish(self) -> None:
        """What some ranks have and others have not, what came late, and all that is on its way."""
        order = self._order
        own = [
            _HERE * (place < self._next or parameter in self._here) | _LATE * (parameter in self._late)
            for place, parameter in enumerate(order)
        ]
        said = list(zip(*self.ranks.numbers(own), strict=True))
        used = [parameter for parameter, each in zip(order, said, strict=True) if any(each)]
        for parameter, each in zip(order[self._next :], said[self._next :], strict=True):
            if any(one & _HERE for one in each):
                self._reduce(parameter, self._here)
        for parameter, each in zip(order, said, strict=True):
            if any(one & _LATE for one in each):
                self._reduce(parameter, self._late)
        self._next = 0
        while self._in_flight:
            self._arrive()
        for parameter in used:
            if self.is_elsewhere(parameter):
                parameter.grad = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(
                    parameter.shape
                )
            else:
                parameter.grad = self._before.pop(parameter)
            self._given[parameter] = parameter.grad

    @torch.no_grad()
    def _reduce(self, parameter: torch.Tensor, there: dict[torch.Tensor, torch.Tensor]) -> None:
        """Begins the average of one, to which a rank that has none gives zeros."""
        gradient, laid_out = there.pop(parameter, None), torch.empty_like(parameter, device="meta")
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.stride() != laid_out.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        flat = gradient.as_strided((gradient.numel(),), (1,)).div_(self.ranks.count)
        work = self._apart.reduce(flat, self.deal.owner(parameter) or 0)
        self._in_flight.append((work, parameter, gradient))
        self._in_flight_bytes += gradient.nbytes
        del flat, gradient
        while self._in_flight_bytes > _IN_FLIGHT_BYTES and len(self._in_flight) > 1:
            self._arrive()

    def _arrive(self) -> None:
        """The oldest that is on its way: at its owner it is added to what there is."""
        work, parameter, gradient = self._in_flight.popleft()
        self._in_flight_bytes -= gradient.nbytes
        self._apart.wait(work)
        if self.is_elsewhere(parameter):
            return
        before = self._before.get(parameter)
        if before is None and parameter.grad is not None and parameter.grad is self._given.get(parameter):
            before = parameter.grad  # this rank's backward has not used it
        self._before[parameter] = gradient if before is None else before.add_(gradient)

    # misuse -----------------------------------------------------------------------------------------------------------
    def _check(self) -> None:
        if self._has_failed:
            raise StateError(
                "a backward has raised, in which gradients were being averaged (zero_stage=2): ranks may have come to"
                " different ones; end this run on all ranks, and go on from its last checkpoint"
            )

    def _refuse_wrapped(self) -> None:
        """Raises StateError for a DistributedDataParallel, which averages as well."""
        own = set(map(id, self._order))
        for found in gc.get_objects():
            if issubclass(type(found), nn.parallel.DistributedDataParallel) and not own.isdisjoint(
                map(id, found.parameters())
            ):
                raise StateError(
                    "these parameters are in a DistributedDataParallel, which averages gradients into all ranks';"
                    " with zero_stage=2 the optimizer averages them: use the model without that wrapper, or leave"
                    " zero_stage out"
                )


def dealt_over(options: Options, owners: Sequence[int] = ()) -> Replicas | None:
    """Who has what of parameters that all ranks of the options' mesh have; see `replicas_over`. None without mesh."""
    kind = Reduced if options.zero_stage == 2 else Replicas
    return None if options.mesh is None else replicas_over(options.mesh, owners, kind)


def _call(method: "weakref.WeakMethod[Any]", which: "weakref.ref[torch.Tensor]", *_: Any) -> None:
    """A hook that is nobody's owner: the optimizer may be gone."""
    itself, parameter = method(), which()
    if itself is not None and parameter is not None:
        itself(parameter)


def _ended(itself: "weakref.ref[Reduced]", present: object, *, completed: bool) -> None:
    found = itself()
    if found is not None:
        found.ended(present, completed=completed)
