"""How do gradients get to the ranks that update with them, and only there (ZeRO-2)? In buckets, as backward goes.

A bucket holds the gradients of neighbouring parameters of one owner. Once it is complete, it is averaged over all ranks
into the owner's gradients, and the other ranks let go of theirs. Buckets leave in the same order on all ranks, the
reverse of the optimizer's, whatever a rank's own backward does: a bucket that is complete early waits for its turn.
When a backward ends, each rank gives zeros for parameters that it did not use, because other ranks may wait for their
buckets; then the ranks tell each other which gradients they had.
"""

import gc
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from headrace.errors import StateError
from headrace.optim.devices import Member
from headrace.optim.options import Options
from headrace.optim.ownership import Ownership, Replicas, Unscale
from headrace.runtime.autograd import EndOfBackward
from headrace.runtime.grad_scaler import grad_scaler_leaves_traces
from headrace.runtime.pending import unit_of
from headrace.runtime.ranks import Ranks

TOGETHER_BYTES = 25 << 20  # of neighbouring parameters, whose gradients leave in one bucket for each owner
IN_FLIGHT_BYTES = 64 << 20  # of gradients on their way at once, unless one bucket is larger
_numbers = count()  # numbers every `Reduced` that is made, in the same order on all ranks
_HERE, _LATE = 1, 2  # what a rank says of a parameter: it has a gradient; it has one that came after its turn


class Reduced(Replicas):
    """Parameters that every rank has, whose gradients are averaged into those of their owners.

    After a backward, `.grad` on ranks that are not the owner is a single NaN, expanded to the parameter's shape.
    """

    def __init__(self, ranks: Ranks, owners: Sequence[int] = ()) -> None:
        super().__init__(ranks, owners)
        self._apart = ranks.apart()
        self._order: list[torch.Tensor] = []  # the parameters to be trained, the last one first
        self._kinds: list[tuple[torch.dtype, torch.device, bool]] = []  # of each in `_order`
        self._buckets: list[list[torch.Tensor]] = []
        self._places: dict[torch.Tensor, int] = {}  # the index of each parameter's bucket
        self._hooked: dict[torch.Tensor, Any] = {}  # hooked parameters, and their AccumulateGrad nodes, hooked too
        self._here: dict[torch.Tensor, torch.Tensor] = {}  # gradients whose turn has not come
        self._late: dict[torch.Tensor, torch.Tensor] = {}  # gradients that came after their turn
        self._next = 0  # the index of the bucket whose turn it is
        self._own: list[int] = []  # what this rank says of each parameter
        self._in_flight: deque[_Bucket] = deque()
        self._in_flight_bytes = 0
        self._before: dict[torch.Tensor, torch.Tensor] = {}  # averages of earlier backwards, to add to
        # What a backward made `.grad`, as long as somebody holds that tensor.
        self._given: dict[torch.Tensor, weakref.ref[torch.Tensor]] = {}
        self._present: _Backward | None = None  # the backward under way
        self._has_failed = self._is_alone = False
        self.number = next(_numbers)
        grad_scaler_leaves_traces.use(self)

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """As `Replicas.take`; also hooks the parameters, and gives all ranks the first rank's values."""
        for parameter in parameters:
            if unit_of(parameter) is not None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is of an offloaded model, whose gradients leave the"
                    " device; leave mesh and zero_stage out, and give the mesh to headrace.offload()"
                )
        super().take(parameters)
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooked:
                itself, which = weakref.WeakMethod(self._after_accumulation), weakref.ref(parameter)
                handle = parameter.register_post_accumulate_grad_hook(partial(_call, itself, which))
                weakref.finalize(self, handle.remove)
                self._hooked[parameter] = None
                self._order.insert(0, parameter)
        self._lay_out()
        self._refuse_wrapped()
        self.ranks.spread((0, parameter.detach()) for parameter in parameters)
        torch.autograd.graph.increment_version(list(parameters))

    def _prepare(self, groups: Sequence[dict[str, Any]]) -> None:
        self._check()  # on this rank alone: the others may still be in the collectives of the backward

    def _seen(self, member: Member) -> int:
        # Zeros count as averaged: torch.distributed.checkpoint takes a step with them to make state.
        if not self._is_given(member.parameter, member.parameter.grad) and member.gradient.any():
            raise StateError(
                f"the gradient of parameter {member.index}, of shape {tuple(member.parameter.shape)}, was not averaged"
                " by backward(): it was set by hand, or the parameter was frozen when the optimizer was made; with"
                " zero_stage=2 gradients come from backward() alone"
            )
        return super()._seen(member)

    def unscale(self, unscale: Unscale, parameters: Sequence[torch.Tensor]) -> dict[torch.device, torch.Tensor]:
        """As `Ownership.unscale`: each rank unscales what it owns, and what one finds counts on all. A collective."""
        self._check()
        elsewhere = {one: one.grad for one in parameters if self.is_elsewhere(one) and self._is_given(one, one.grad)}
        with self.ranks.as_one("unscale its gradients"):
            try:
                for parameter in elsewhere:
                    parameter.grad = None
                found = unscale()
            finally:
                for parameter, gradient in elsewhere.items():
                    parameter.grad = gradient
        infinite = torch.tensor(sum(map(float, found.values())), dtype=torch.float32, device="cpu")
        return {infinite.device: self.ranks.added(infinite)}

    # backward ---------------------------------------------------------------------------------------------------------
    def _lay_out(self) -> None:
        """Makes buckets and hooks autograd's nodes; again after a change of dtype or device, which makes new nodes."""
        kinds = [(parameter.dtype, parameter.device, parameter.requires_grad) for parameter in self._order]
        if kinds == self._kinds:
            return
        self._kinds, self._buckets = kinds, []
        neighbours: dict[Any, list[torch.Tensor]] = {}
        nbytes = 0
        for parameter, (*kind, trained) in zip(self._order, kinds, strict=True):
            node = torch.autograd.graph.get_gradient_edge(parameter).node if trained else self._hooked[parameter]
            if node is not self._hooked[parameter]:
                before = weakref.WeakMethod(self._before_accumulation)
                handle = node.register_prehook(partial(_call, before, weakref.ref(parameter)))
                weakref.finalize(self, handle.remove)
                self._hooked[parameter] = node
            if neighbours and nbytes + parameter.nbytes > TOGETHER_BYTES:
                self._buckets += neighbours.values()
                neighbours, nbytes = {}, 0
            key = self.map.owner(parameter), *kind
            neighbours[key] = [*neighbours.pop(key, ()), parameter]  # in the order in which they are complete
            nbytes += parameter.nbytes
        self._buckets += neighbours.values()
        self._places = {parameter: place for place, bucket in enumerate(self._buckets) for parameter in bucket}

    def _is_given(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Whether `gradient` is the tensor that the last backward made the parameter's `.grad`."""
        given = self._given.get(parameter)
        return gradient is not None and given is not None and given() is gradient

    def _before_accumulation(self, parameter: torch.Tensor) -> None:
        """Called when autograd is about to add to `.grad`: puts aside an average that is there already."""
        gradient = parameter.grad
        if gradient is not None and self._is_given(parameter, gradient):
            if not self.is_elsewhere(parameter):
                self._before[parameter] = gradient
            parameter.grad = None

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        self._begin()
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if self._is_given(parameter, gradient):
            raise StateError(
                f"a parameter of shape {tuple(parameter.shape)} has another dtype or device than when its gradient was"
                " averaged (zero_stage=2); call zero_grad() after such a change of the model"
            )
        if gradient.layout != torch.strided or gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, or has a graph"
                " (create_graph=True), and cannot be averaged with zero_stage=2"
            )
        there = self._here if self._places[parameter] >= self._next else self._late
        there[parameter] = there[parameter] + gradient if parameter in there else gradient
        while self._next < len(self._buckets) and all(one in self._here for one in self._buckets[self._next]):
            self._reduce(self._buckets[self._next], self._here)
            self._next += 1

    def _begin(self) -> None:
        self._check()
        if self._present is not None:
            return
        if not self._is_alone:
            self._refuse_wrapped()
            self._is_alone = True
        self._lay_out()
        self._present = _Backward.under_way()
        self._present.add(self)

    @torch.no_grad()
    def give_rest(self, *, waits: bool) -> None:
        """Called when the backward has returned: begins the averages of all buckets whose turn has not come.

        Among them are parameters that this rank did not use, because other ranks may be waiting for those. With
        `waits`, as few bytes are on their way at once as during the backward.
        """
        self._own = [
            _HERE * (self._places[one] < self._next or one in self._here) | _LATE * (one in self._late)
            for one in self._order
        ]
        for bucket in self._buckets[self._next :]:
            if bucket[0].requires_grad:
                self._reduce(bucket, self._here, waits=waits)

    def ended(self, *, completed: bool) -> None:
        """Called when the backward is over. If it raised, ranks may wait for others in vain, so no step may follow."""
        self._present = None
        self._has_failed = True
        if completed:
            with torch.no_grad():
                self._finish()
            self._has_failed = False

    def _finish(self) -> None:
        """Averages gradients that came after their turn, waits for all averages, and sets each `.grad`."""
        order = self._order
        said = dict(zip(order, zip(*self.ranks.numbers(self._own), strict=True), strict=True))
        for bucket in self._buckets:
            given = [parameter for parameter in bucket if any(one & _LATE for one in said[parameter])]
            if given:
                self._reduce(given, self._late)
        self._next = 0
        while self._in_flight:
            self._arrive()
        for parameter in order:
            if not any(said[parameter]):
                self._before.pop(parameter, None)  # `.grad` stays as it was
                continue
            if self.is_elsewhere(parameter):
                parameter.grad = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(
                    parameter.shape
                )
            else:
                parameter.grad = self._before.pop(parameter)
            self._given[parameter] = weakref.ref(parameter.grad)

    @torch.no_grad()
    def _reduce(
        self, parameters: Sequence[torch.Tensor], there: dict[torch.Tensor, torch.Tensor], *, waits: bool = True
    ) -> None:
        """Begins to average gradients of one owner's parameters; for one that is not `there`, this rank gives zeros."""
        gradients = []
        for parameter in parameters:
            gradient, laid_out = there.pop(parameter, None), torch.empty_like(parameter, device="meta")
            if gradient is None:
                gradient = torch.full_like(parameter, -0.0)  # what is added to -0.0 does not change, not even in sign
            elif gradient.stride() != laid_out.stride():
                gradient = torch.empty_like(parameter).copy_(gradient)
            gradients.append(gradient.as_strided((gradient.numel(),), (1,)))
        flat = gradients[0] if len(gradients) == 1 else torch.cat(gradients)
        owner = self.map.owner(parameters[0]) or 0
        work = self._apart.reduce(flat.div_(self.ranks.count), owner)
        self._in_flight.append(_Bucket(work, flat, parameters, gradients if owner == self.ranks.own else []))
        self._in_flight_bytes += flat.nbytes
        del flat, gradient, gradients
        while waits and self._in_flight_bytes > IN_FLIGHT_BYTES and len(self._in_flight) > 1:
            self._arrive()

    def _arrive(self) -> None:
        """Waits for the oldest bucket on its way; its owner adds the averages to those that it has."""
        bucket = self._in_flight.popleft()
        self._in_flight_bytes -= bucket.flat.nbytes
        self._apart.wait(bucket.work)
        for parameter, gradient in bucket.averages():
            before = self._before.get(parameter)
            if before is None and self._is_given(parameter, parameter.grad):
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
        """Raises StateError if a DistributedDataParallel has the parameters, as it averages gradients too."""
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


@dataclass
class _Bucket:
    """Gradients on their way to their owner, one behind the other in `flat`; `gradients`: their memory at the owner."""

    work: Any
    flat: torch.Tensor
    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]

    def averages(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The averages that have come, by parameter; none on other ranks."""
        if len(self.gradients) > 1:
            parts = self.flat.split([one.numel() for one in self.gradients])
            for gradient, average in zip(self.gradients, parts, strict=True):
                gradient.copy_(average)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=False):
            strides = torch.empty_like(parameter, device="meta").stride()
            yield parameter, gradient.as_strided(parameter.shape, strides)


class _Backward:
    """A backward under way, and each `Reduced` that averages gradients in it; these end in one order on all ranks."""

    _present: "weakref.ref[_Backward] | None" = None

    def __init__(self) -> None:
        self._those: list[Reduced] = []
        EndOfBackward(self.ended).queue()

    @classmethod
    def under_way(cls) -> "_Backward":
        """The backward in which this is called."""
        found = None if cls._present is None else cls._present()
        if found is None:
            found = cls()
            cls._present = weakref.ref(found)
        return found

    def add(self, one: Reduced) -> None:
        """Has `one` told when this backward ends."""
        self._those.append(one)

    def ended(self, *, completed: bool) -> None:
        """Called when autograd ends this backward: tells each `Reduced` in it."""
        present = type(self)._present
        if present is not None and present() is self:
            type(self)._present = None
        self._those.sort(key=lambda one: one.number)
        if completed:
            for one in self._those:  # with several, none may block here: other ranks may be waiting for the next one
                one.give_rest(waits=len(self._those) == 1)
        while self._those:  # if one raises, the rest are told when autograd lets go of this
            self._those.pop(0).ended(completed=completed)


def owners_over(options: Options, owners: Sequence[int] = ()) -> Ownership:
    """The ownership of parameters that every rank of the options' mesh has.

    Raises TypeError or ValueError unless it is a mesh of one dimension.
    """
    mesh = options.mesh
    if mesh is None:
        return Ownership()
    from torch.distributed.device_mesh import DeviceMesh  # here: not every build of PyTorch has it

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; give the DeviceMesh over whose ranks gradients are averaged:"
            " torch.distributed.init_device_mesh('cuda', (world_size,))"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("replicate", "shard")
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions, of sizes {tuple(mesh.shape)}; give the one over which gradients are"
            f" averaged, such as mesh[{names[0]!r}]"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {torch.distributed.get_rank()} is not in the mesh, whose ranks are {mesh.mesh.tolist()}; make the"
            " optimizer on these ranks alone, or give a mesh that has all"
        )
    ranks = Ranks(mesh.get_group(0), mesh.device_type)
    return (Reduced if options.zero_stage == 2 else Replicas)(ranks, owners)


def _call(method: "weakref.WeakMethod[Any]", which: "weakref.ref[torch.Tensor]", *_: Any) -> None:
    """A hook that keeps nothing alive: it does nothing once the optimizer or the parameter is gone."""
    itself, parameter = method(), which()
    if itself is not None and parameter is not None:
        itself(parameter)
