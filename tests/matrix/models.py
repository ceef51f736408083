"""What does the matrix train? One small model of each kind, with its batches and its loss."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support import models
from tests.support.loops import to_device
from tests.support.models import Checkpointed

CHECKPOINTING = ("none", "reentrant", "non-reentrant")
VOCABULARY = 48
WIDTH = 32


class Attention(nn.Module):
    """Attention over itself, or over a memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        heads = [
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.query(x), self.key(source), self.value(source))
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=memory is None)
        return self.output(attended.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    """Each token goes to the two experts that its router likes best; an expert without tokens is not called."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, inner) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            if len(row):
                result = result.index_add(0, row, expert(tokens[row]) * weights[row, place, None])
        return result.view_as(x)


class DecoderLayer(nn.Module):
    def __init__(self, width: int, mlp: nn.Module, *, crosses: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width)
        self.cross_attention = Attention(width) if crosses else None
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        if self.cross_attention is not None:
            x = x + self.cross_attention(x, memory)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(models.Decoder):
    """A language model: dense, with experts, or with its head tied to its embedding."""

    def __init__(self, *, layers: int = 6, experts: int = 0, tied: bool = False) -> None:
        def layer(width: int) -> DecoderLayer:
            return DecoderLayer(width, MixtureOfExperts(width, 32, experts) if experts else GatedMLP(width, 64))

        super().__init__(layers, WIDTH, VOCABULARY, layer=layer, norm=nn.RMSNorm, tied=tied)


class EncoderDecoder(Checkpointed):
    """Two lists of layers over one embedding; every layer of the second reads what the first one made."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(DecoderLayer(WIDTH, GatedMLP(WIDTH, 48)) for _ in range(4))
        self.decoder = nn.ModuleList(DecoderLayer(WIDTH, GatedMLP(WIDTH, 48), crosses=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embedding(tokens)
        for layer in self.encoder:
            memory = self.run(layer, memory)
        x = self.embedding(tokens.roll(1, -1))
        for layer in self.decoder:
            x = self.run(layer, x, memory)
        return self.head(x)


class ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.first_norm(self.first(x)))
        return F.silu(self.second_norm(self.second(x)))


class UNet(Checkpointed):
    """Convolutions with batch statistics, down and up again, with connections across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(3, 12), ConvBlock(12, 16), ConvBlock(16, 16)])
        self.middle = ConvBlock(16, 16)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(16, 16, 2, stride=2) for _ in range(2)])
        self.up = nn.ModuleList([ConvBlock(32, 16), ConvBlock(28, 12)])
        self.output = nn.Conv2d(12, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        kept = []
        x = image
        for index, block in enumerate(self.down):
            x = self.run(block, x if index == 0 else F.avg_pool2d(x, 2))
            kept.append(x)
        x = self.run(self.middle, x)
        for grow, block, across in zip(self.grow, self.up, kept[-2::-1], strict=True):
            x = self.run(block, torch.cat([grow(x), across], 1))
        return self.output(x)


class Recurrent(Checkpointed):
    """LSTM and GRU layers: they compute with `_flat_weights`, and return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        kinds = [nn.LSTM, nn.GRU, nn.LSTM, nn.GRU, nn.LSTM]
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for kind in kinds)
        self.both_ways = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in (*self.layers, self.both_ways):
            x = self.run(layer, x)[0]
        return self.head(x)


class MultiheadEncoder(Checkpointed):
    """nn.TransformerEncoder: nn.MultiheadAttention uses the weight of its `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.checkpointing == "none":
            x = self.encoder(x)
        else:
            for layer in self.encoder.layers:
                x = self.run(layer, x)
        return self.head(x)


class LoraLinear(nn.Linear):
    """A frozen Linear with a trainable detour of low rank."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    @staticmethod
    def adapt(linear: nn.Linear, rank: int = 1) -> None:
        """Makes an nn.Linear one of these, in place."""
        linear.__class__ = LoraLinear
        linear.lora_a = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        linear.lora_b = nn.Parameter(torch.randn(linear.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


def adapt(model: nn.Module) -> None:
    """Freezes a model, and adds what is trained instead: adapters, and the norms of convolutions."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            LoraLinear.adapt(module)
    trained = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        if "lora_" in name or id(parameter) in trained:
            parameter.requires_grad_(True)


Batch = tuple[Tensor, Tensor]  # what the model takes, what it should give


def token_batches(count: int, length: int = 12) -> list[Batch]:
    """Batches of 2 rows of tokens, with the token behind each."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (2, length + 1), generator=generator) for _ in range(count)]
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]


def image_batches(count: int) -> list[Batch]:
    """Batches of 2 images, to be reproduced."""
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(2, 3, 16, 16, generator=generator) for _ in range(count)]
    return [(image, image) for image in images]


def token_loss(output: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), wanted.flatten())


def image_loss(output: Tensor, wanted: Tensor) -> Tensor:
    return F.mse_loss(output, wanted)


@dataclass(frozen=True)
class Case:
    """A kind of model. `share` of its weights is the budget: as little as still holds the blocks it is cut into."""

    name: str
    make: Callable[[], Checkpointed]
    batches: Callable[[int], list[Batch]] = token_batches
    loss: Callable[[Tensor, Tensor], Tensor] = token_loss
    share: float = 0.4

    def on(self, device: torch.device, count: int = 3) -> list[Batch]:
        """So many batches, on the device."""
        return to_device(self.batches(count), device)  # type: ignore[no-any-return]

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Output and loss."""
        output = model(batch[0])
        return output, self.loss(output, batch[1])

    def build(self, checkpointing: str = "none", training: str = "full") -> Checkpointed:
        """The same weights every time."""
        torch.manual_seed(0)
        model = self.make()
        model.checkpointing = checkpointing
        if training == "adapters":
            adapt(model)
        return model.eval() if training == "inference" else model


CASES = [
    Case("dense", Decoder),
    Case("encoder_decoder", EncoderDecoder),
    Case("experts", lambda: Decoder(layers=5, experts=4)),
    Case("unet", UNet, image_batches, image_loss, 0.5),
    Case("recurrent", Recurrent),
    Case("tied", lambda: Decoder(tied=True)),
    Case("multihead", MultiheadEncoder),
]

DENSE = CASES[0]
