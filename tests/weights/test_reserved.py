"""How much more does PyTorch's allocator reserve than it gave out? No more than docs/design/device_memory.md found.

The bounds are what is measured today, on a smaller model of the same shape. They do not say that it is little: they say
that it becomes no more unnoticed. They are only ever lowered.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headrace

WIDTH, INNER, VOCABULARY, LAYERS = 1024, 3584, 64 << 10, 10
LENGTHS = (1024, 768, 1024, 256, 1500)
PASSES = 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kind: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16}
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, dtype=torch.bfloat16) for _ in range(2))
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, **kind) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // 4, **kind) for _ in range(2))
        self.gate, self.up, self.down = (nn.Linear(*size, **kind) for size in [(WIDTH, INNER)] * 2 + [(INNER, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.out(self.query(h) + F.pad(self.key(h) + self.value(h), (0, WIDTH - WIDTH // 4)))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def inference(model: nn.Module, tokens: Tensor) -> None:
    with torch.no_grad():
        model(tokens)


def training(model: nn.Module, tokens: Tensor) -> None:
    output = model(tokens)
    F.cross_entropy(
        output.flatten(0, 1).float(), torch.zeros(tokens.shape[1], dtype=torch.long, device="emu")
    ).backward()
    model.zero_grad()


@pytest.mark.core(ratio=1.70)
@pytest.mark.emu("lazy", dry_run=True, race_detector=False, allocator="caching", device_memory=64 << 30)
@pytest.mark.parametrize(
    ("run", "lengths", "ratio"),
    [(inference, LENGTHS[:1], 1.48), (inference, LENGTHS, 1.70), (training, LENGTHS, 1.29)],
    ids=["inference", "inference-mixed", "training-mixed"],
)
def test_reserved_over_allocated(emu_device: ModuleType, run: Any, lengths: tuple[int, ...], ratio: float) -> None:
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cpu")
    with headrace.offload(model, device="emu", device_memory="256MiB"):
        for step in range(PASSES):
            run(model, torch.zeros(1, lengths[step % len(lengths)], dtype=torch.long))
        stats = emu_device.stats()
    assert stats["peak_reserved_bytes"] <= ratio * stats["peak_allocated_bytes"]
