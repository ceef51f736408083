"""What do the actions of a program act on? A model, plain or offloaded, with its optimizer, hooks and observations."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.programs.models import VOCABULARY, Model

Seen = list[tuple[str, Any]]


class StopError(Exception):
    """What a user's code might raise."""


class Handle(Protocol):
    """What offloads a model: weights, activations or both."""

    def remove(self) -> None: ...


@dataclass
class World:
    """One side of a program. Actions do the same on both; `handle` and `offload` are None on the plain side."""

    model: Model
    device: torch.device
    make_optimizer: Callable[[list[nn.Parameter], random.Random], torch.optim.Optimizer]
    offload: Callable[[nn.Module, random.Random], Any] | None = None
    handle: Any = None
    optimizer: torch.optim.Optimizer | None = None
    kept_hooks: list[Any] = field(default_factory=list)
    has_hooked_parameter: bool = False  # by a hook on the output of a module that returns a parameter itself
    seen: Seen = field(default_factory=list)  # by the action under way
    passes: int = 0  # since the model was offloaded
    keeps_budget: bool = True
    names: dict[int, str] = field(default_factory=dict)  # by the ids of parameters, as they were last

    def see(self, what: str, value: Any) -> None:
        """Notes what must be the same on both sides."""
        self.seen.append((what, value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value))

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def new_optimizer(self, rng: random.Random) -> None:
        self.optimizer = self.make_optimizer(self.trained(), rng)

    def batch(self, rng: random.Random) -> dict[str, Any]:
        """Inputs of random sizes; those of an offloaded model may be on the CPU."""
        rows, length, seed = rng.randrange(2, 4), rng.randrange(2, 5), rng.randrange(1000)
        on_host = (
            rng.random() < 0.5 and not self.model.spec.encodes and self.offload is not None and has_weights(self.handle)
        )
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, length, self.model.spec.width, generator=generator)
        tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
        place = torch.device("cpu") if on_host else self.device
        return {"x": x.to(place), "tokens": tokens.to(place), "seed": seed}

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The loss; the output is noted."""
        output = self.model.encode(**batch) if self.model.spec.encodes else self.model(**batch)
        self.passes += 1
        self.see("output", output)
        loss = F.cross_entropy(output.flatten(0, 1), batch["tokens"].to(output.device).flatten())
        self.see("loss", loss)
        return loss

    def module(self, rng: random.Random) -> nn.Module:
        """Some module, the model included."""
        return rng.choice(list(self.model.modules()))

    def some(self, rng: random.Random, share: float = 0.4) -> list[nn.Parameter]:
        """Some parameters, one at least."""
        parameters = list(self.model.parameters())
        chosen = [p for p in parameters if rng.random() < share]
        return chosen or [rng.choice(parameters)]

    def look(self) -> None:
        """Notes parameters, gradients and buffers, and which parameters became other objects."""
        for name, parameter in self.model.named_parameters():
            self.see(name, parameter)
            self.see(f"gradient of {name}", parameter.grad)
            self.see(f"{name} is another object", self.names.get(id(parameter)) != name)
        for name, buffer in self.model.named_buffers():
            self.see(name, buffer)
        self.names = {id(p): name for name, p in self.model.named_parameters()}


def has_weights(handle: Any) -> bool:
    """Whether it is the handle of offloaded weights, not of activations alone."""
    return hasattr(handle, "refresh")


def difference(seen: Seen, expected: Seen) -> str | None:
    """The first thing that both sides did not see alike, in words."""
    for (what, value), (wanted_what, wanted) in zip(seen, expected, strict=False):
        if what != wanted_what:
            return f"{what} in the place of {wanted_what}"
        if isinstance(value, Tensor) and isinstance(wanted, Tensor):
            if value.dtype != wanted.dtype or value.shape != wanted.shape:
                return f"{what} is {value.dtype} {tuple(value.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
            if not torch.equal(bits(value), bits(wanted)):
                return f"{what} differs in {int((bits(value) != bits(wanted)).sum())} bytes of {value.nbytes}"
        elif isinstance(value, Tensor) or isinstance(wanted, Tensor):
            return f"{what} is {'there' if isinstance(value, Tensor) else value}, where plain it is {kind(wanted)}"
        elif value != wanted:
            return f"{what} is {value}, not {wanted}"
    if len(seen) != len(expected):
        return f"{len(seen)} things were seen, not {len(expected)}"
    return None


def kind(value: Any) -> str:
    return "there" if isinstance(value, Tensor) else str(value)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
