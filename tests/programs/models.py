"""What is a random model? Layers of many kinds between an embedding and a head: shared, tied, skipped, recomputed."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.programs.layers import LAYERS, hidden_of

VOCABULARY = 12
CHECKPOINTS = ("none", "reentrant", "non-reentrant")


@dataclass(frozen=True)
class LayerSpec:
    """One use of a layer. `kind` is a name of LAYERS; a layer of the same `seed` and kind is the same module again."""

    kind: str
    seed: int
    checkpointing: str = "none"
    skipped: float = 0.0  # how often it is left out

    def __str__(self) -> str:
        notes = [
            *([self.checkpointing] if self.checkpointing != "none" else []),
            *(["skipped"] if self.skipped else []),
        ]
        return f"{self.kind}#{self.seed}" + (f"({','.join(notes)})" if notes else "")


@dataclass(frozen=True)
class ModelSpec:
    """All that it takes to build the same model again."""

    seed: int
    width: int
    layers: tuple[LayerSpec, ...]
    listed: bool  # whether layers are in a ModuleList
    tied_head: bool
    tied_layers: bool
    encodes: bool = False  # whether its user calls `encode` and not the model

    def __str__(self) -> str:
        flags = [name for name in ("listed", "tied_head", "tied_layers", "encodes") if getattr(self, name)]
        return f"width {self.width}, {' '.join(map(str, self.layers))} {' '.join(flags)}"


def random_model(
    rng: random.Random, widths: Sequence[int], without: Collection[str] = (), *, steady: bool = False
) -> ModelSpec:
    """A small model, of one of these widths, without the kinds of layers and checkpoints that are named.

    A `steady` one uses the same layers in every step.
    """
    kinds = [kind for kind in LAYERS if kind not in without and not (steady and kind == "experts")]
    layers: list[LayerSpec] = []
    ways = [way for way in CHECKPOINTS if way not in without]
    skips, recomputes = not steady and rng.random() < 0.3, rng.choice(["none", *ways, "mixed"])
    for _ in range(rng.randrange(2, 7)):
        again = rng.choice(layers) if layers and rng.random() < 0.15 else None
        kind = again.kind if again else rng.choice(kinds)
        way = rng.choice(ways) if recomputes == "mixed" else recomputes
        seed = again.seed if again else len(layers)
        layers.append(LayerSpec(kind, seed, way, rng.choice([0.0, 0.4]) if skips else 0.0))
    return ModelSpec(
        seed=rng.randrange(10**6),
        width=rng.choice(widths),
        layers=tuple(layers),
        listed=rng.random() < 0.5,
        tied_head=rng.random() < 0.25,
        tied_layers=rng.random() < 0.2,
    )


class Model(nn.Module):
    """Called with float inputs, tokens, and the seed by which layers are skipped."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        torch.manual_seed(spec.seed)
        self.spec = spec
        self.embedding = nn.Embedding(VOCABULARY, spec.width)
        modules: dict[int, nn.Module] = {}
        for layer in spec.layers:
            if layer.seed not in modules:
                modules[layer.seed] = LAYERS[layer.kind](spec.width, random.Random(f"{spec.seed} {layer.seed}"))
        self.uses = [list(modules).index(layer.seed) for layer in spec.layers]
        if spec.listed:
            self.layers = nn.ModuleList(modules.values())
        else:
            for index, module in enumerate(modules.values()):
                setattr(self, f"layer{index}", module)
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, VOCABULARY)
        if spec.tied_head:
            self.head.weight = self.embedding.weight
        if spec.tied_layers:
            self._tie_two()

    def _tie_two(self) -> None:
        """The last two plain linear maps of one shape get the same weight."""
        linears = [
            m for m in self.modules() if type(m) is nn.Linear and m is not self.head and "weight" in m._parameters
        ]
        for other in linears[:-1]:
            if (other.weight.shape, other.weight.dtype) == (linears[-1].weight.shape, linears[-1].weight.dtype):
                other.weight = linears[-1].weight
                return

    def layer(self, index: int) -> nn.Module:
        return self.layers[index] if self.spec.listed else getattr(self, f"layer{index}")

    def forward(self, x: Tensor, tokens: Tensor, seed: int = 0) -> Tensor:
        return self.head(self.norm(self._hidden(x, tokens, seed)))

    def encode(self, x: Tensor, tokens: Tensor, seed: int = 0) -> Tensor:
        """As `forward`, but for reading the weight of the norm by itself."""
        hidden = self._hidden(x, tokens, seed)
        return self.head(F.layer_norm(hidden, hidden.shape[-1:], self.norm.weight, self.norm.bias, self.norm.eps))

    def _hidden(self, x: Tensor, tokens: Tensor, seed: int) -> Tensor:
        rng = random.Random(seed)
        hidden: Any = self.embedding(tokens) + x
        for use, layer in zip(self.uses, self.spec.layers, strict=True):
            if rng.random() < layer.skipped:
                continue
            hidden = self._run(self.layer(use), hidden, layer.checkpointing)
        return hidden  # type: ignore[no-any-return]

    def _run(self, module: nn.Module, hidden: Tensor, checkpointing: str) -> Tensor:
        if checkpointing == "none" or not torch.is_grad_enabled():
            return hidden_of(module(hidden))
        recomputed = checkpoint(lambda x: hidden_of(module(x)), hidden, use_reentrant=checkpointing == "reentrant")
        assert isinstance(recomputed, Tensor)
        return recomputed
