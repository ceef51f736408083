"""Which training runs do the tests of checkpoints save and go on with? Small ones, on each tier."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import headrace
import headrace.optim
from headrace.optim import disk_state

WIDTH, LAYERS = 64, 4


class Net(nn.Module):
    """Layers, a table that is tied to the head, dropout (so that random numbers count) and a buffer that changes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.head.weight = self.table.weight
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = hidden + self.dropout(torch.tanh(layer(hidden)))
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


@dataclass
class Run:
    """A model, its optimizer, and its handle."""

    model: Net
    optimizer: Any
    handle: headrace.Offloaded | None = None

    def step(self, steps: int = 1) -> None:
        device = next(self.model.parameters()).device
        for _ in range(steps):
            tokens = torch.randint(WIDTH, (8,)).to(device)
            self.model(tokens).float().pow(2).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        """Weights and optimizer state, as they are now."""
        if isinstance(self.optimizer, headrace.optim.optimizer.HostOptimizer):
            self.optimizer.synchronize()
        if self.handle is not None:
            self.handle.synchronize()
        state = self.optimizer.state_dict()["state"]
        entries = [value for number in sorted(state) for _, value in sorted(state[number].items())]
        return [value.detach().cpu().clone() for value in [*self.model.state_dict().values(), *entries]]


@contextmanager
def run(
    place: str,
    disk: Path,
    optimizer: str = "AdamW",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **settings: Any,
) -> Iterator[Run]:
    """A run whose weights and state are on the device, in host memory, or on disk."""
    torch.manual_seed(seed)
    model = Net(dtype)
    handle = None
    if place == "device":
        model.to(device)
        settings.pop("overlap", None)
    else:
        small: dict[str, Any] = {}
        if place == "disk":
            small = {"host_memory": f"{24 * dtype.itemsize}KiB", "disk": disk / "weights"}
            settings |= {"tier": "disk", "disk": disk / "state"}
        budget = {
            "device_memory": 3 * (WIDTH + 1) * WIDTH * dtype.itemsize + 4096,
            "blocks": [model.table, *model.layers],
        }
        handle = headrace.offload(model, device=device, **budget, **small)
    parameters: list[nn.Parameter] = [p for p in model.parameters() if p.dim() == 2 or optimizer != "Muon"]
    # Each run makes a ring, which has 200 MB otherwise.
    with mock.patch.object(disk_state, "STAGED_ELEMENTS", 2 * WIDTH**2):
        made = getattr(headrace.optim, optimizer)(parameters, lr=1e-2, **settings)
        try:
            yield Run(model, made, handle)
        finally:
            if handle is not None:
                handle.remove()
