"""What can a forward be made of? Pieces that save, drop, share and change values in every place; drawn at random."""

import gc
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["WIDTH", "Broken", "Made", "Scene", "TrapError"]

WIDTH = 16


class TrapError(Exception):
    """Raised where a program wants an exception."""


@dataclass
class Scene:
    """What a program's run has besides its model: what it noted, and what it holds."""

    notes: list[Any] = field(default_factory=list)  # tensors on the CPU, numbers, kinds of exceptions
    held: list[Any] = field(default_factory=list)  # graphs and tensors that somebody keeps for a while
    losses: list[Tensor] = field(default_factory=list)  # of this forward, beside its output
    hooks: int = 0  # that run now
    spoiled: bool = False  # something that was saved was written to
    armed: str = ""  # where the next trap springs
    again: Callable[[Tensor], Tensor] | None = None  # the model, for hooks

    def note(self, value: Any) -> None:
        """Keeps what must be the same in every run."""
        self.notes.append(value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value)


Piece = Callable[[Scene, Tensor, list[Tensor]], Tensor]  # the scene, (rows, WIDTH), earlier values of the same shape


class Saves(torch.autograd.Function):
    """Saves its input, an output, something else and views of that, nothing, and no elements; has two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x.sin(), x.cos()  # a view of an output would keep the graph alive for good
        ctx.save_for_backward(x, z[1:3], None, y, z.t(), x[:0], z[:, 3:5], x.expand(2, *x.shape), z, z)
        return y, z * 1

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[override]
        x, part, _, y, turned, empty, narrow, expanded, z, _ = ctx.saved_tensors
        sums = part.sum() + empty.sum() + narrow.sum() + expanded[1].mean()
        return first * z - second * turned.t() * y + sums * 0.1 + x * 0.01


class Holder:
    """Holds itself, and so what it was given, until the garbage collector comes."""

    def __init__(self, value: Any) -> None:
        self.me, self.value = self, value


def _in_thread(work: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


# simple ones ----------------------------------------------------------------------------------------------------------
def _attention(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.t() / 4, -1) @ x


def _halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=1)
    return torch.cat([first * second.sin(), second.tanh() * first], 1)


def _complex(x: Tensor) -> Tensor:
    number = torch.complex(x, x.sin())
    product = number * number.conj() + number.exp() * number.imag
    return torch.tanh(torch.view_as_real(product * product.conj()).sum(-1))


def _windows(x: Tensor) -> Tensor:
    windows = x.unfold(1, 4, 1)  # overlapping
    return torch.tanh(F.pad((windows * windows.flip(-1)).sum(-1), (0, 3)))


def _empties(x: Tensor) -> Tensor:
    return torch.cat([x, x[:0].exp() * x[:0]]) * (1 + x[:0].sin().sum())


def _in_place(x: Tensor) -> Tensor:
    y = x * 1.5
    y.add_(0.5).tanh_()
    z = y * x
    z[:, :5].mul_(2)
    z[1:].add_(x[1:])
    return z.tanh_()


def _written_parts(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for column, part in enumerate(x.unbind(1)[:4]):
        y[:, column] = part.sin() * part
    return y + x


def _expanded(x: Tensor) -> Tensor:
    return x * x[:1].expand_as(x).sin() + x.mean(0, keepdim=True).expand_as(x) * x


def _indexed(x: Tensor) -> Tensor:
    order = x.detach().sum(1).argsort()
    top, places = x.topk(3, dim=1)
    return x[order] * x + torch.zeros_like(x).scatter(1, places, top.sigmoid())


def _precisions(x: Tensor) -> Tensor:
    return (x.bfloat16().sigmoid() * x.bfloat16()).float() + (x.double().tanh() * x.double()).float()


def _parts_saved(x: Tensor) -> Tensor:
    return x + sum((part.sin() * part).sum() for part in x.split(3)) / 50


def _detached(x: Tensor) -> Tensor:
    return x * x.detach().cos() + x.detach().sin() * x.exp().tanh()


def _threaded(x: Tensor) -> Tensor:
    return _in_thread(lambda: x.sin() * x)


def _own_function(x: Tensor) -> Tensor:
    first, second = Saves.apply(x)
    return first * second


SIMPLE: list[Callable[[Tensor], Tensor]] = [
    torch.tanh,
    torch.sin,
    F.gelu,
    lambda x: F.layer_norm(x, (WIDTH,)),
    lambda x: F.dropout(x, 0.3),
    lambda x: torch.where(x > 0, x * x, x.tanh()).tanh(),
    lambda x: x.t().contiguous().sin().t() * x,
    lambda x: torch.cumsum(x, 1).tanh(),
    _attention,
    _halves,
    _complex,
    _windows,
    _empties,
    _in_place,
    _written_parts,
    _expanded,
    _indexed,
    _precisions,
    _parts_saved,
    _detached,
    _threaded,
    _own_function,
]


# those that do something with other pieces, or with what is around ----------------------------------------------------
def _checkpointed(inner: Piece, rng: random.Random) -> Piece:
    reentrant = rng.random() < 0.5
    return lambda scene, x, _: checkpoint(lambda y: inner(scene, y, [y]), x, use_reentrant=reentrant)  # type: ignore[return-value]


def _island(inner: Piece, _rng: random.Random) -> Piece:
    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        with torch.no_grad():
            y = inner(scene, x, [x])
        return x * y

    return piece


def _gradient_inside(inner: Piece, rng: random.Random) -> Piece:
    graph = rng.random() < 0.6

    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        if not torch.is_grad_enabled() or not x.requires_grad:
            return x.sin()
        (gradient,) = torch.autograd.grad(inner(scene, x, [x]).square().sum(), x, create_graph=graph)
        return torch.tanh(x + gradient)

    return piece


def _backward_inside(inner: Piece, _rng: random.Random) -> Piece:
    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            own = x.detach().requires_grad_()
            inner(scene, own, [own]).square().mean().backward()
            scene.note(own.grad)
        return x.sigmoid()

    return piece


def _dropped(inner: Piece, rng: random.Random) -> Piece:
    how = rng.choice(["now", "later", "by the collector", "never"])

    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        value = inner(scene, x, [x]).pow(2).mean()
        scene.note(value)
        if how == "later":
            scene.held.append(value)
        elif how == "by the collector":
            Holder(value)
        elif how == "never":
            scene.losses.append(value)
        del value
        return x + x.exp().tanh()

    return piece


def _lets_go(_inner: Piece, rng: random.Random) -> Piece:
    collects = rng.random() < 0.3

    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        scene.held.clear()
        if collects:
            gc.collect()
        return x * x.sin()

    return piece


def _with_earlier(_inner: Piece, rng: random.Random) -> Piece:
    place = rng.random()
    return lambda _scene, x, earlier: torch.tanh(x * earlier[int(place * len(earlier))])


def _user_hooks(inner: Piece, rng: random.Random) -> Piece:
    copies = rng.random() < 0.5

    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:  # detached: an output would keep the graph alive for good
            return tensor.detach().clone() if copies else tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return inner(scene, x, [x])

    return piece


def _spoils(_inner: Piece, rng: random.Random) -> Piece:
    """Changes what was saved, which autograd refuses in backward."""
    raises = rng.random() < 0.3

    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        scene.spoiled |= raises
        y = x.sigmoid() if raises else x * 2
        z = y + 1 if not raises else y * y
        y.detach().mul_(0.5)
        return z

    return piece


def _traps(_inner: Piece, _rng: random.Random) -> Piece:
    def spring(scene: Scene) -> None:
        if scene.armed == "backward":
            scene.armed = ""
            raise TrapError

    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        if scene.armed == "forward":
            scene.armed = ""
            raise TrapError
        y = x.sin() * x
        if y.requires_grad:
            y.register_hook(lambda _gradient: spring(scene))
        return y

    return piece


def _hooked(inner: Piece, rng: random.Random) -> Piece:
    """A hook in backward runs another graph: a piece of its own, or the whole model."""
    model, pre = rng.random() < 0.4, rng.random() < 0.3

    def run(scene: Scene, gradient: Tensor) -> None:
        if scene.hooks:
            return
        scene.hooks += 1
        armed, scene.armed = scene.armed, ""
        try:
            with torch.enable_grad():
                own = gradient.detach().tanh().requires_grad_()
                y = scene.again(own) if model and scene.again is not None else inner(scene, own, [own])
                y.square().mean().backward()
                scene.note(own.grad)
        finally:
            scene.hooks -= 1
            scene.armed = armed

    def piece(scene: Scene, x: Tensor, _earlier: list[Tensor]) -> Tensor:
        y = torch.tanh(x) * x
        if y.requires_grad:
            if pre and y.grad_fn is not None:
                y.grad_fn.register_prehook(lambda gradients: run(scene, gradients[0]))
            else:
                y.register_hook(lambda gradient: run(scene, gradient))
        return y

    return piece


WITH_OTHERS = [
    *(_checkpointed, _checkpointed, _island, _gradient_inside, _backward_inside, _dropped, _dropped, _lets_go),
    *(_with_earlier, _with_earlier, _user_hooks, _spoils, _traps, _hooked),
]


class Broken(nn.Module):
    """A layer: a linear map, and pieces behind it."""

    def __init__(self, scene: Scene, pieces: list[Piece]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scene, self.pieces = [scene], pieces

    def forward(self, x: Tensor, earlier: list[Tensor]) -> Tensor:
        x = torch.tanh(self.linear(x))
        for piece in self.pieces:
            earlier.append(x)
            x = piece(self.scene[0], x, earlier)
        return x


class Made(nn.Module):
    """A model made of the numbers of `rng`."""

    def __init__(self, rng: random.Random, scene: Scene) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(2**31))
        layers = [Broken(scene, [piece(rng) for _ in range(rng.randrange(1, 4))]) for _ in range(rng.randrange(1, 5))]
        self.layers = nn.ModuleList(layers)
        self.shares = rng.random() < 0.2  # the first layer is called once more
        self.between = rng.choice([None, None, torch.sin, torch.tanh])

    def forward(self, x: Tensor) -> Tensor:
        earlier = [x]
        x = x * 1.1
        for layer in [*self.layers, *self.layers[:1]] if self.shares else self.layers:
            x = layer(x, earlier)
            x = x if self.between is None else self.between(x)
        return x


def piece(rng: random.Random, depth: int = 0) -> Piece:
    """One piece, with others inside of it up to a depth."""
    if rng.random() < (0.5 if depth else 0.35) or depth > 2:
        simple = rng.choice(SIMPLE)
        return lambda _scene, x, _earlier: simple(x)
    return rng.choice(WITH_OTHERS)(piece(rng, depth + 1), rng)
