"""Is a device budget that cannot do refused before anything is changed, and does the least that is allowed do?"""

import re

import pytest
import torch
from torch import nn

import headrace
from headrace.config import parse_bytes
from headrace.errors import BudgetError
from tests.support.compare import assert_same
from tests.support.models import Layer


class Own(nn.Module):
    """Computes with its weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(64, 32) / 8)
        self.down = nn.Parameter(torch.randn(32, 64) / 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.relu(hidden @ self.up.t()) @ self.down.t()


def tied_to_one() -> nn.Sequential:
    model = nn.Sequential(*(Layer(32, norm=False) for _ in range(4)))
    model[3].up.weight = model[0].up.weight
    return model


def tied_to_two() -> nn.Sequential:
    model = nn.Sequential(*(Own() for _ in range(5)))
    model[2].up, model[2].down = model[0].up, model[1].down
    model[2].scale = nn.Parameter(torch.ones(2048))
    return model


@pytest.mark.parametrize("make", [tied_to_one, tied_to_two])
def test_blocks_that_share_weights_have_room_together(compute_device: torch.device, make):
    """What one call needs at once, with the blocks whose weights it shares, is asked for by name; and it is enough."""

    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        for _ in range(3):
            model(torch.randn(4, 32).to(compute_device)).square().mean().backward()
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    plain = make()
    model = make()
    model.load_state_dict(plain.state_dict())
    settings = {"device": compute_device, "blocks": ["[0-9]"]}
    largest_bytes = sum(p.nbytes for p in model[1].parameters())
    with pytest.raises(BudgetError, match=r"blocks .*'0'.* and '\d', which share weights, need .* KiB") as refused:
        headrace.offload(model, device_memory=largest_bytes + 8000, **settings)
    assert type(model[1]) in (Layer, Own)
    needed = re.search(r"raise it to at least ([\d.]+ KiB)", str(refused.value))
    assert needed is not None
    with headrace.offload(
        model, device_memory=parse_bytes(needed[1].replace(" ", ""), name="needed"), **settings
    ) as handle:
        expected = run(plain.to(compute_device))
        assert_same(run(model), expected)
        stats = handle.stats()
        assert largest_bytes < stats.device_peak_bytes <= stats.device_budget_bytes
        assert stats.onload_bytes > sum(p.nbytes for p in model.parameters())


def test_what_comes_later_and_has_no_room_is_refused_whole(compute_device: torch.device):
    """What comes later stays on the device: the model goes on once it is gone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(32, norm=False) for _ in range(6)))
    hidden = torch.randn(4, 32)
    budget_bytes = 2 * sum(p.nbytes for p in model[0].parameters())
    with headrace.offload(model, device=compute_device, device_memory=budget_bytes) as handle:
        expected = model(hidden)
        for layer in model:
            layer.up.more = nn.Parameter(torch.zeros_like(layer.up.weight))
        for _ in range(2):
            with pytest.raises(BudgetError, match=r"'0.up.more' and 5 more\) need .* KiB beside block .* remove\(\)"):
                model(hidden)
        assert type(model[0].up.more) is nn.Parameter
        for layer in model:
            del layer.up.more
        assert torch.equal(model(hidden), expected)
        handle.remove()
    with headrace.offload(model, device=compute_device, device_memory=budget_bytes) as handle:
        assert torch.allclose(model(hidden), expected)
        assert handle.stats().device_peak_bytes <= budget_bytes


def test_the_minimum_that_an_error_names_is_enough(compute_device: torch.device):
    """Small weights stay where the budget is larger: the advised minimum counts those that stay with it."""
    model = nn.Sequential(nn.Embedding(64, 32), *(Layer(32) for _ in range(4)))
    for budget_bytes in (0, 1024, 8000):
        with pytest.raises(BudgetError, match="raise it to at least") as refused:
            headrace.offload(model, device=compute_device, device_memory=budget_bytes)
        needed = re.search(r"needs ([\d.]+ \w+) beside ([\d.]+ \w+) of .* at least ([\d.]+ KiB)$", str(refused.value))
        assert needed is not None
        largest_bytes, kept_bytes, enough_bytes = map(parse_bytes, needed.groups())
        assert enough_bytes / 1.01 <= largest_bytes + kept_bytes <= enough_bytes * 1.01
        with headrace.offload(model, device=compute_device, device_memory=enough_bytes) as handle:
            model(torch.zeros(1, dtype=torch.int64, device=compute_device)).sum().backward()
            assert 0 < handle.stats().device_peak_bytes <= enough_bytes
