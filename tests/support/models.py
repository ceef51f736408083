"""Which small models do tests train? A stack of layers, and a decoder: an embedding, layers and a head.

A model whose odd structure is what a test is about stays in that test.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import headrace

Activation = Callable[[Tensor], Tensor]
Made = TypeVar("Made")


def seeded(make: Callable[..., Made], *arguments: Any, seed: int = 0, **options: Any) -> Made:
    """What it makes of these, with the same weights every time."""
    torch.manual_seed(seed)
    return make(*arguments, **options)


class Layer(nn.Module):
    """A residual layer whose backward needs weights, activations and, with a norm, statistics.

    `inner`: its width within; as a rule twice as wide. A `scaled` one has a parameter of its own beside its children.
    """

    def __init__(
        self,
        width: int = 16,
        inner: int | None = None,
        *,
        norm: bool = True,
        activation: Activation = F.relu,
        dropout: float = 0.0,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        inner = 2 * width if inner is None else inner
        self.norm = nn.LayerNorm(width) if norm else None
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.scale = nn.Parameter(torch.ones(width)) if scaled else None
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        normed = hidden if self.norm is None else self.norm(hidden)
        added = self.down(self.activation(self.up(normed)))
        if self.dropout is not None:
            added = self.dropout(added)
        return hidden + (added if self.scale is None else added * self.scale)


class TanhLayer(nn.Module):
    """Autograd saves two tensors of the size of its output: its input, for the linear map, and the output of tanh."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Adapted(nn.Module):
    """A frozen layer, and a detour of low rank that is trained beside it."""

    def __init__(
        self, base: nn.Module, width: int, rank: int, *, activation: Activation | None = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, width, bias=False, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.up(self.down(x))
        return y if self.activation is None else self.activation(y)


class Toy(nn.Module):
    """The model of DiffSynth's page, smaller: linear maps, residual, with a norm without weights before each."""

    def __init__(self, width: int = 64, layers: int = 10, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.recompute = recompute

    def layer(self, index: int, x: Tensor) -> Tensor:
        return self.layers[index](F.layer_norm(x, x.shape[-1:]))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for index in range(len(self.layers)):
            x = x + (checkpoint(self.layer, index, x, use_reentrant=False) if self.recompute else self.layer(index, x))
        return x


def linears(count: int, width: int, activation: type[nn.Module] | None = None, **options: Any) -> nn.Sequential:
    """Square linear maps one behind the other, each with its activation."""
    made = (nn.Linear(width, width, **options) for _ in range(count))
    if activation is None:
        return nn.Sequential(*made)
    return nn.Sequential(*(nn.Sequential(one, activation()) for one in made))


def _of_products(policy: CheckpointPolicy, _context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    return policy if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """A model that may run its layers under activation checkpointing: "none", "reentrant", "non-reentrant", "chosen" by
    headrace, or a policy for what products of matrices give."""

    def __init__(self, checkpointing: str | CheckpointPolicy = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing

    def run(self, layer: nn.Module, x: Tensor, *others: Any) -> Any:
        """`layer(x, *others)`, checkpointed as the model is set."""
        if self.checkpointing == "none":
            return layer(x, *others)
        if isinstance(self.checkpointing, CheckpointPolicy):
            contexts = partial(create_selective_checkpoint_contexts, partial(_of_products, self.checkpointing))
            return checkpoint(layer, x, *others, use_reentrant=False, context_fn=contexts)
        if self.checkpointing == "chosen":
            return checkpoint(layer, x, *others, use_reentrant=False, context_fn=headrace.checkpoint_contexts)
        reentrant = self.checkpointing == "reentrant"
        if reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()  # what enable_input_require_grads() of transformers is for
        return checkpoint(layer, x, *others, use_reentrant=reentrant)


class Stack(Checkpointed):
    """Layers one behind the other, and what is computed `between` them."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        between: Activation | None = None,
        checkpointing: str | CheckpointPolicy = "none",
    ) -> None:
        super().__init__(checkpointing)
        self.layers = nn.ModuleList(layers)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
            if self.between is not None:
                x = self.between(x)
        return x


class Decoder(Checkpointed):
    """An embedding, layers, and a head.

    Options: positions of its own beside the embedding, other layers than `Layer`, a norm before the head, and a head
    with the weight of the embedding.
    """

    def __init__(
        self,
        layers: int = 5,
        width: int = 16,
        vocabulary: int = 32,
        *,
        layer: Callable[[int], nn.Module] = Layer,
        positions: int = 0,
        norm: Callable[[int], nn.Module] | None = None,
        tied: bool = False,
        checkpointing: str = "none",
    ) -> None:
        super().__init__(checkpointing)
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(positions, width)) if positions else None
        self.layers = nn.ModuleList(layer(width) for _ in range(layers))
        self.norm = None if norm is None else norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions
        for layer in self.layers:
            hidden = self.run(layer, hidden)
        return self.head(hidden if self.norm is None else self.norm(hidden))


def large_decoder(**options: Any) -> Decoder:
    """470 KB of weights: enough for several blocks and a disk. The same weights every time."""
    return seeded(Decoder, layers=6, width=64, vocabulary=128, **options)


def some_tokens(vocabulary: int = 32) -> Tensor:
    """Two rows of eight."""
    return torch.arange(16).view(2, 8) % vocabulary
