"""How is the graph of one micro-batch cut where another block's turn comes? Into segments, each from one visit to the
next, whose backwards can be run one by one, later, with those of other micro-batches in between.

A tensor that a segment takes from an earlier one is replaced there by a stand-in with the same memory and no graph
behind it. The segment's backward gives the stand-in a gradient, with which the earlier segment's backward begins. Where
several segments use one tensor, the later one's gradient is put into the earlier one's stand-in first: so autograd adds
up gradients one by one, in the order in which one backward through the whole graph adds them up.
"""

import contextlib
import threading
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from headrace.runtime.autograd import sequence_number
from headrace.runtime.process_wide import ProcessWide
from headrace.runtime.tensors import containers_in, fields_of, map_tensors
from headrace.weights.model.home import Home, Leaf
from headrace.weights.model.uses import Use, use_of
from headrace.weights.passes.backward import WATCHED
from headrace.weights.passes.row_gradients import TakenRows

_HOOKED = "a hook is put on a tensor that comes from before a block"
_USERS_LEAVES = 0  # the number of the segment that has the user's own leaves


class CannotCutError(BaseException):  # so that user code that catches Exception lets it through
    """This model's graph cannot be cut between blocks; `str()` says why."""


class _Boundary:
    """Where a segment uses a tensor of an earlier one, and a stand-in takes that tensor's place."""

    def __init__(self, source: GradientEdge) -> None:
        self.source: GradientEdge | None = source
        self.edge: GradientEdge | None = None  # of the stand-in
        self.later: _Boundary | None = None  # the boundary of the next segment that uses the same tensor
        self.gradient: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        """Hands out the stand-in's gradient, and does not keep it."""
        gradient, self.gradient = self.gradient, None
        return gradient


class _Cut(torch.autograd.Function):
    """Makes a stand-in: the same memory, with no graph behind it. Its gradient goes to the boundary."""

    @staticmethod
    def forward(ctx: Any, _carrier: torch.Tensor, tensor: torch.Tensor, boundary: _Boundary) -> torch.Tensor:
        ctx.boundary = boundary
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.boundary.gradient = gradient
        return None, None, None


class _Whole(torch.autograd.Function):
    """A function whose backward runs other backwards."""

    @staticmethod
    def forward(ctx: Any, carrier: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return carrier.detach().clone()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[None, None]:
        ctx.run()
        return None, None


def in_one_backward(run: Callable[[], None]) -> None:
    """Calls `run()` within a backward: the backwards that `run` begins are nested in it, and it ends after them."""
    whole: Any = _Whole.apply
    with torch.enable_grad():
        end: torch.Tensor = whole(torch.zeros((), requires_grad=True, device="cpu"), run)
    end.backward()


class _Between(TorchFunctionMode):
    """Gives torch functions that are called between visits stand-ins for tensors of earlier segments."""

    def __init__(self, segments: "GraphSegments") -> None:
        super().__init__()
        self._segments = segments

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        segments = self._segments
        if torch.compiler.is_compiling():  # compiled code comes through `apply` when it runs
            return func(*args, **kwargs)
        if segments.on_use is not None:
            segments.on_use((args, kwargs))
        if not segments.in_visit and torch.is_grad_enabled():
            if func in _DIFFERENTIATES:
                raise CannotCutError(f"{func.__name__}() is called while the loss is computed")
            if use_of(func) in (Use.COMPUTE, Use.WRITE):
                args, kwargs = segments.taken((args, kwargs))
        return func(*args, **kwargs)


_watched = threading.local()  # `segments`: of the micro-batch that this thread computes


def _watch_functions() -> Callable[[], None]:
    """Puts a detour into `autograd.Function.apply`, because users' own functions and reentrant checkpoints call no
    torch function. Returns what takes the detour out again.
    """
    own = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        segments = getattr(_watched, "segments", None)
        if segments is not None and not segments.in_visit and not issubclass(cls, TakenRows):
            if torch.is_grad_enabled():
                segments.function += 1
            if cls is CheckpointFunction and torch.is_grad_enabled():
                # Its node comes before those of the blocks that it calls, and calls them in backward.
                segments.checkpoints.append(segments.begin())
            args, kwargs = segments.taken((args, kwargs))
        return own.__func__(cls, *args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010  # for the type checker

    def undo() -> None:
        setattr(torch.autograd.Function, "apply", own)  # noqa: B010

    return undo


_functions = ProcessWide(_watch_functions, anywhere=True)

_DIFFERENTIATES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class GraphSegments:
    """The graph of one micro-batch, while forward makes it and until backward has gone through it."""

    def __init__(self, on_use: Callable[[Any], None] | None = None) -> None:
        """`on_use` is told what torch functions are given, within visits, too."""
        self.on_use = on_use
        self.in_visit = 0  # how many calls of visits are under way: arguments are replaced, but nothing inside
        self.function = 0  # number of the last function between visits: visits without gradients are within it
        self.of_nodes = 0  # the last segment that began with gradients on: nodes made with gradients off are its
        self.checkpoints: list[int] = []  # the segments that have the nodes of reentrant checkpoints
        self._begins = [-1]  # of each segment: the first sequence number that autograd gives to its nodes
        self._carrier = torch.zeros((), requires_grad=True, device="cpu")
        self._here: dict[tuple[Any, int], tuple[torch.Tensor, torch.Tensor, int]] = {}  # stand-ins of the segment
        self._chains: dict[tuple[Any, int], _Boundary] = {}  # the last stand-in of each tensor
        self._used_in: defaultdict[int, list[_Boundary]] = defaultdict(list)
        self._made_in: defaultdict[int, list[_Boundary]] = defaultdict(list)  # the first stand-in of each tensor
        self._cuts: dict[Any, tuple[tuple[Any, int], int]] = {}  # stand-ins' nodes, and for what each stands
        self._given_out: list[weakref.ref[torch.Tensor]] = []  # all stand-ins
        self._copies: list[list[tuple[Any, list[Any]]]] = []  # of containers that visits under way were given
        self._all: list[_Boundary] = []
        self._loss: GradientEdge | None = None
        self._loss_gradient: torch.Tensor | None = None

    # forward ----------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, this thread computes the micro-batch, and tensors of earlier segments are replaced."""
        stop = _functions.use(self)
        try:
            with _Between(self):
                _watched.segments = self
                yield
        finally:
            _watched.segments = None
            stop()

    @property
    def number(self) -> int:
        """The number of the present segment; 0: none has begun."""
        return len(self._begins) - 1

    def begin(self) -> int:
        """A visit begins, and with it a segment, whose number this returns. Raises CannotCutError."""
        self._check()
        with torch.enable_grad():
            self._begins.append(sequence_number(self._carrier.view(()).grad_fn))
        if torch.is_grad_enabled():
            self.of_nodes = self.number
        return self.number

    def taken(self, value: Any) -> Any:
        """`value` with stand-ins for what earlier segments have made."""
        return map_tensors(value, self._stand_in) if torch.is_grad_enabled() else value

    def enter_visit(self, inputs: Any, *, encloses: bool) -> Any:
        """A visit's call begins; returns its inputs. Nothing inside is replaced, unless the call `encloses` blocks."""
        taken = self.taken(inputs)
        self._copies.append([] if taken is inputs else [(one, _held(one)) for one in containers_in(taken)])
        self.in_visit += not encloses
        return taken

    def leave_visit(self, *, encloses: bool) -> None:
        """The call of a visit ends. Raises CannotCutError."""
        self.in_visit -= not encloses
        for copy, before in self._copies.pop():
            if len(before) != len(_held(copy)) or any(a is not b for a, b in zip(before, _held(copy), strict=True)):
                raise CannotCutError(f"a block writes to a {type(copy).__name__} that it was given")

    def end(self, loss: torch.Tensor) -> None:
        """Forward ends, with this loss. Raises CannotCutError."""
        self._check()
        for reference in self._given_out:
            stand_in = reference()
            if stand_in is not None and (stand_in._backward_hooks or stand_in.retains_grad):
                raise CannotCutError(_HOOKED)
        self._loss, self._loss_gradient = get_gradient_edge(loss), torch.ones_like(loss)

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the present segment uses for a tensor: itself, or a stand-in if an earlier segment has made it."""
        if not tensor.requires_grad or isinstance(tensor, Home | Leaf):
            return tensor
        node = tensor.grad_fn
        made_in = _USERS_LEAVES if node is None else bisect_right(self._begins, sequence_number(node)) - 1
        if made_in == self.number:
            return tensor
        key = (tensor, 0) if node is None else (node, tensor.output_nr)
        key, made_in = self._cuts.get(node, (key, made_in))
        if key not in self._here:
            earlier = self._chains.get(key)
            source = get_gradient_edge(tensor) if earlier is None or earlier.source is None else earlier.source
            boundary = self._chains[key] = _Boundary(source)
            self._all.append(boundary)
            if earlier is None:
                self._made_in[made_in].append(boundary)
            else:
                earlier.later = boundary
            self._used_in[self.number].append(boundary)
            cut: Any = _Cut.apply
            self.in_visit += 1  # nothing is replaced: what is computed is our own
            try:
                with torch.enable_grad():
                    stand_in = cut(self._carrier, tensor.detach(), boundary)
            finally:
                self.in_visit -= 1
            stand_in.__dict__.update(tensor.__dict__)
            setattr(stand_in, WATCHED, sequence_number(stand_in.grad_fn))
            boundary.edge = get_gradient_edge(stand_in)
            self._cuts[stand_in.grad_fn] = key, made_in
            self._given_out.append(weakref.ref(stand_in))
            self._here[key] = stand_in, tensor, tensor._version
        return self._here[key][0]

    def _check(self) -> None:
        """The present segment is over. Raises CannotCutError if something was done to tensors that it took."""
        here, self._here = self._here, {}
        for stand_in, source, version in here.values():
            if source._version != version:
                raise CannotCutError("a tensor from before a block is written in place in or after it")
            if stand_in._backward_hooks or stand_in.retains_grad:
                raise CannotCutError(_HOOKED)

    # between ----------------------------------------------------------------------------------------------------------
    def leaves(self, segment: int, owners: dict[Any, int], number: int) -> list[torch.Tensor]:
        """Leaves to which the segment's graph gives gradients, once for each use. Raises CannotCutError where the graph
        goes on beyond the segment.

        `owners`: nodes, each with the micro-batch that it was found in. `number` is that of this micro-batch.
        """
        found: list[torch.Tensor] = []
        begin, seen = self._begins[segment], set()
        rest = [root.node for root, _ in self._roots(segment)]
        while rest:
            node: Any = rest.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                found.append(leaf)
                continue
            if node is None or node in seen or node in self._cuts:
                continue
            seen.add(node)
            if owners.setdefault(node, number) != number:
                raise CannotCutError(f"micro-batches share a tensor ({node.name()}) that one of them has made")
            if sequence_number(node) < begin:
                raise CannotCutError(f"{node.name()} of before a block is used after it, unseen by torch functions")
            rest.extend(following for following, _ in node.next_functions)
        return found

    # backward ---------------------------------------------------------------------------------------------------------
    def backward(self, segment: int) -> None:
        """Runs the backward of one segment; to be called for the last segment first."""
        found = [(root, gradient()) for root, gradient in self._roots(segment)]
        roots = [(root, gradient) for root, gradient in found if gradient is not None]
        self._made_in.pop(segment, None)
        self._used_in.pop(segment, None)
        if segment == self.number:
            self._loss = self._loss_gradient = None
        if roots:
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])

    def close(self) -> None:
        """Lets go of everything: nodes and stand-ins would keep each other alive."""
        for one in self._all:
            one.source = one.edge = one.later = one.gradient = None
        self._all.clear()
        for held in (self._made_in, self._used_in, self._chains, self._here, self._cuts, self._given_out, self._copies):
            held.clear()
        self._loss = self._loss_gradient = None

    def _roots(self, segment: int) -> Iterable[tuple[GradientEdge, Callable[[], torch.Tensor | None]]]:
        """Where the segment's backward begins, and what gives the gradient there once later segments' have run."""
        if segment == self.number and self._loss is not None:
            yield self._loss, lambda: self._loss_gradient
        for one in self._made_in[segment]:
            if one.source is not None:
                yield one.source, one.take
        for one in self._used_in[segment]:
            if one.later is not None and one.edge is not None:
                yield one.edge, one.later.take


def _held(container: Any) -> list[Any]:
    """What a list, dict or dataclass holds now."""
    if isinstance(container, list):
        return list(container)
    if isinstance(container, dict):
        return [*container, *container.values()]
    own = vars(container) if hasattr(container, "__dict__") else {}  # slots have none
    return list({**fields_of(container), **own}.values())
