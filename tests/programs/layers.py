"""Which layers may a random model have? Each maps (rows, length, width) to the same shape, in one of many ways."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS = 2
CODES = 6


@dataclass
class Output:
    """What a layer may return that PyTorch knows nothing about."""

    hidden: Tensor
    extra: Any = None


def hidden_of(output: Any) -> Tensor:
    """The hidden states in whatever a layer returned."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return hidden_of(output["hidden"])
    return hidden_of(output.hidden if isinstance(output, Output) else output[0])


# ordinary layers ------------------------------------------------------------------------------------------------------
class FeedForward(nn.Module):
    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = rng.choice([nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(inplace=True), nn.Tanh()])
        self.down = nn.Linear(2 * width, width, bias=rng.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Normed(nn.Module):
    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.norm = rng.choice([nn.LayerNorm, nn.RMSNorm])(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Convolved(nn.Module):
    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1, groups=rng.choice([1, 2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)  # a view


class Attention(nn.Module):
    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.need_weights = rng.random() < 0.5

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention(x, x, x, need_weights=self.need_weights)


class BatchNormed(nn.Module):
    """Its buffers change in every forward."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=rng.random() < 0.5)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).flatten(0, 1)).view_as(x)


class Scaled(nn.Module):
    """Parameters and buffers of its own, one of no dimensions, one unused, one buffer that is replaced."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.unused = nn.Parameter(torch.zeros(3, width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=rng.random() < 0.5)
        self.mean: Tensor
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return (x - self.mean) * self.gain + self.shift


class Several(nn.Module):
    """Weights in a list and in a dict, used out of their order."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.list = nn.ParameterList(torch.randn(width, width) / width for _ in range(3))
        self.dict = nn.ParameterDict({"bias": torch.zeros(width), "gain": torch.ones(width)})
        self.order = rng.sample(range(3), 2)

    def forward(self, x: Tensor) -> Output:
        for index in self.order:
            x = torch.tanh(x @ self.list[index] * self.dict["gain"] + self.dict["bias"])
        return Output(x, extra=["text", None, 3])


class Experts(nn.Module):
    """Which of them are called depends on the data."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(-1)
        chosen = gate.mean((0, 1)).argmax().item()
        return x + gate[..., chosen, None] * self.experts[int(chosen)](x)


class Looped(nn.Module):
    """One module called several times, with keywords."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.times = rng.randrange(2, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        for _ in range(self.times):
            x = torch.sin(self.inner(input=x))
        return [x, x.detach()]


class Blocks(nn.Module):
    """Repeated layers."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        kind = rng.choice([FeedForward, Normed, Attention, Borrower])
        self.blocks = nn.ModuleList(kind(width, rng) for _ in range(rng.randrange(2, 5)))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + hidden_of(block(x))
        return {"hidden": x, "last": x[:, -1]}


class Narrow(nn.Module):
    """Computes in another dtype."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.dtype = rng.choice([torch.bfloat16, torch.float64])
        self.linear = nn.Linear(width, width).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.to(self.dtype)).to(x.dtype)


# odd uses of weights --------------------------------------------------------------------------------------------------
class Borrower(nn.Module):
    """Computes with the weights of a child that it does not call, or not always."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)
        self.way = rng.choice(["function", "view", "split", "both", "listed", "norm"])

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.child.weight, self.child.bias
        if self.way == "view":
            return torch.tanh(x @ weight.T + bias)
        if self.way == "split":
            return torch.cat([F.linear(x, part) for part in weight.chunk(2)], -1) + bias
        if self.way == "both":
            return self.child(x) + F.linear(x, weight)
        if self.way == "listed":
            return F.linear(x, *list(self.child.parameters()))
        if self.way == "norm":
            return F.linear(x, weight / weight.norm(dim=1, keepdim=True), bias)
        return F.linear(x, weight, bias)


class Lookup(nn.Module):
    """An embedding that writes to its weight in forward."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.table = nn.Embedding(CODES, width, max_norm=rng.choice([None, 0.9]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach().sum(-1).abs() * 7).long() % CODES)


class Codebook(nn.Module):
    """Moves its own weight, through `.data`, while it computes."""

    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(width, width) / width)
        self.clamps = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.clamps:
            self.codes.data.clamp_(-0.2, 0.2)
        elif self.training:
            self.codes.data.mul_(0.99)
        return x + x @ self.codes


class Product(torch.autograd.Function):
    """x @ weight.T, with a backward of its own."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        context.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        x, weight = context.saved_tensors
        (gradient,) = gradients
        return gradient @ weight, gradient.flatten(0, 1).T @ x.flatten(0, 1)


class ByFunction(nn.Module):
    """Gives its own weight to a custom Function."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return x + Product.apply(x, self.weight)


class ByFunctionOfChild(nn.Module):
    """Gives a child's weight to a custom Function."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + Product.apply(x, self.child.weight)


class Queries(nn.Module):
    """Returns its own parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 1, width))

    def forward(self) -> Tensor:
        return self.queries


class Prompted(nn.Module):
    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.prompt = Queries(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.prompt()
        return self.linear(x + prompt) * prompt


class Reparametrised(nn.Module):
    def __init__(self, width: int, rng: random.Random) -> None:
        super().__init__()
        wrap = rng.choice(
            [
                nn.utils.parametrizations.weight_norm,
                nn.utils.parametrizations.spectral_norm,
                nn.utils.parametrizations.orthogonal,
            ]
        )
        self.linear = wrap(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


# odd uses of autograd -------------------------------------------------------------------------------------------------
class Unrecorded(nn.Module):
    """Its child computes without gradients."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.child(x)
        return x + y


class InPlace(nn.Module):
    """Writes to what its child returned."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x).add_(1)
        y[..., 0] = x[..., 0]
        return y.mul_(0.5)


class Hooked(nn.Module):
    """Changes the gradient of its output."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


class Measured(nn.Module):
    """Computes a figure in grad mode, and drops it."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)
        self.figure = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        self.figure = y.pow(2).mean().item()
        return y


class Unchanged(nn.Module):
    """Returns its input itself."""

    def __init__(self, width: int, _rng: random.Random) -> None:
        super().__init__()
        self.child = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


def encoder(width: int, rng: random.Random) -> nn.Module:
    return nn.TransformerEncoderLayer(width, HEADS, 2 * width, 0.0, batch_first=True, norm_first=rng.random() < 0.5)


def recurrent(width: int, rng: random.Random) -> nn.Module:
    return rng.choice([nn.LSTM, nn.GRU])(width, width, num_layers=rng.choice([1, 2]), batch_first=True)


LAYERS: dict[str, Callable[[int, random.Random], nn.Module]] = {
    "feed_forward": FeedForward,
    "normed": Normed,
    "convolved": Convolved,
    "attention": Attention,
    "encoder": encoder,
    "recurrent": recurrent,
    "batch_normed": BatchNormed,
    "scaled": Scaled,
    "several": Several,
    "experts": Experts,
    "looped": Looped,
    "blocks": Blocks,
    "narrow": Narrow,
    "borrower": Borrower,
    "lookup": Lookup,
    "codebook": Codebook,
    "by_function": ByFunction,
    "by_function_of_child": ByFunctionOfChild,
    "prompted": Prompted,
    "reparametrised": Reparametrised,
    "unrecorded": Unrecorded,
    "in_place": InPlace,
    "hooked": Hooked,
    "measured": Measured,
    "unchanged": Unchanged,
}

WRITERS = ("lookup", "codebook")  # those that write to their weights in forward
