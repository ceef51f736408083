"""Does Muon take a whole model: matrices by Muon, the rest by AdamW, with their own bits, states and checkpoints?"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.optim import Muon
from tests.support.compare import assert_same, on_cpu


class Model(nn.Module):
    """An embedding, matrices, what is no matrix, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)) for _ in "abc"
        )
        self.lm_head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.lm_head(hidden)  # type: ignore[no-any-return]


SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.05}


def tokens(step: int) -> torch.Tensor:
    return (torch.arange(16).view(2, 8) * (step + 3)) % 32


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range = range(3)) -> None:
    for step in steps:
        loss = model(tokens(step).to(device_of(model))).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def divided(model: nn.Module) -> list[torch.optim.Optimizer]:
    """What Muon is to do, in PyTorch."""
    named = dict(model.named_parameters())
    muon = [p for name, p in named.items() if p.dim() == 2 and name.startswith("layers.")]
    others = [p for name, p in named.items() if p.dim() != 2 or not name.startswith("layers.")]
    adamw = torch.optim.AdamW(others, lr=0.003, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.05, fused=True)
    return [torch.optim.Muon(muon, **SETTINGS), adamw]


def ours(parameters: Any, **options: Any) -> Muon:
    return Muon(parameters, **SETTINGS, adamw_lr=0.003, adamw_betas=(0.8, 0.9), adamw_eps=1e-6, **options)


@pytest.fixture
def expected() -> Model:
    model = Model()
    train(model, divided(model))
    return model


@pytest.mark.parametrize("options", [{}, {"overlap": "forward"}, {"overlap": "backward"}, {"tier": "disk"}], ids=str)
def test_of_an_offloaded_model(options: dict[str, Any], expected: Model, tmp_path: Path) -> None:
    model = Model()
    with headrace.offload(model, device="cpu", device_memory=12_000):
        train(model, [ours(model.parameters(), **options, **({"disk": tmp_path} if "tier" in options else {}))])
        assert_same(on_cpu(model.state_dict()), expected.state_dict())


@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_of_a_plain_model_by_its_names(fraction: float, expected: Model, emu_device: Any) -> None:
    model = Model().to("emu:1")
    train(model, [ours(model.named_parameters(), device_fraction=fraction)])
    assert_same(on_cpu(model.state_dict()), expected.state_dict())


def test_groups() -> None:
    model = Model()
    optimizer = Muon(model.parameters(), lr=0.5)  # no names: every matrix
    sizes = [(len(group["params"]), group.get("use_muon", True), group["lr"]) for group in optimizer.param_groups]
    assert sizes == [(8, True, 0.5), (12, False, 0.5)]
    optimizer.add_param_group({"params": [torch.zeros(3, 3), torch.zeros(3)], "lr": 0.25})
    optimizer.add_param_group({"params": [torch.zeros(3, 3)], "use_muon": False})
    sizes = [(len(group["params"]), group.get("use_muon", True), group["lr"]) for group in optimizer.param_groups[2:]]
    assert sizes == [(1, True, 0.25), (1, False, 0.25), (1, False, 0.5)]
    with pytest.raises(ValueError, match=r"use_muon.*shape \(3,\)"):
        Muon([{"params": [torch.zeros(3)], "use_muon": True}])
    with pytest.raises(ValueError, match=r"no matrix.*AdamW"):
        Muon([torch.zeros(3)])


def test_state_dicts_and_pickles_go_on(expected: Model) -> None:
    model = Model()
    first = ours(model.named_parameters())
    train(model, [first], range(1))
    train(model, [copy.deepcopy(first)], range(0))
    second = ours(model.named_parameters())
    second.load_state_dict(first.state_dict())
    train(model, [second], range(1, 3))
    assert_same(on_cpu(model.state_dict()), expected.state_dict())


def test_a_copy_takes_groups_as_the_first_does() -> None:
    """Also one that goes by AdamW, with the settings of that."""
    first = Muon([nn.Parameter(torch.zeros(4, 4))], adamw_lr=0.25)
    for one in (first, copy.deepcopy(first)):
        one.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        assert [(group["use_muon"], group["lr"]) for group in one.param_groups[1:]] == [(False, 0.25)]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_checkpoints_go_on(tier: str, expected: Model, tmp_path: Path) -> None:
    settings = {"tier": tier, "disk": tmp_path / "state"} if tier == "disk" else {}
    first, second = Model(), Model()
    with headrace.offload(first, device="cpu", device_memory=12_000):
        optimizer = ours(first.parameters(), **settings)
        train(first, [optimizer], range(2))
        headrace.save(tmp_path / "checkpoint", first, optimizer)
    with headrace.offload(second, device="cpu", device_memory=12_000):
        optimizer = ours(second.parameters())
        headrace.load(tmp_path / "checkpoint", second, optimizer)
        train(second, [optimizer], range(2, 3))
        assert_same(on_cpu(second.state_dict()), expected.state_dict())
