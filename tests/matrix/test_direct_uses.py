"""May a model use weights of modules that it does not call, now and then, in any way that a plain one may?"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.compare import Outcome, on_cpu
from tests.support.loops import infer, train
from tests.support.offloaded import assert_exact, offload

WIDTH = 16


class Direct(nn.Module):
    """Layers, of which `use` does something without calling them."""

    def __init__(self, use: Callable[["Direct", Tensor], Tensor]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.kept = [layer.weight for layer in self.layers]
        self.use = use
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.use(self, x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def now_and_then(model: Direct, x: Tensor) -> Tensor:
    """Not in the passes whose trace is learned."""
    return x if model.calls % 7 < 4 else F.linear(x, model.layers[4].weight)


def recomputed(model: Direct, x: Tensor) -> Tensor:
    inner = checkpoint(lambda y: torch.tanh(F.linear(y, model.layers[2].weight)), x, use_reentrant=False)
    assert isinstance(inner, Tensor)
    return inner


def all_in_turn(model: Direct, x: Tensor) -> Tensor:
    """More weights than the budget has room for."""
    for layer in model.layers:
        x = torch.tanh(F.linear(x, layer.weight, layer.bias))
    return x


def by_looks(model: Direct, x: Tensor) -> Tensor:
    """As if they were where the model computes."""
    weight = model.layers[3].weight
    assert weight.device == x.device
    return x.cpu().to(weight.device, weight.dtype)


@pytest.mark.parametrize("use", [now_and_then, recomputed, all_in_turn, by_looks])
def test_training(use: Callable[[Direct, Tensor], Tensor], compute_device: torch.device) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Direct(use)

    batches = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(9)]
    handle, _ = assert_exact(
        make, lambda model: train(model, [b.to(compute_device) for b in batches], squared), compute_device, 0.5
    )
    assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def as_sparse(model: Direct, x: Tensor) -> Tensor:
    return x + model.kept[3].to_sparse().sum()


def for_each_row(model: Direct, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: model.kept[3] @ row)(x)


def with_a_derivative(model: Direct, x: Tensor) -> Tensor:
    outputs = torch.func.jvp(lambda y: y @ model.kept[3].t(), (x,), (x,))
    return outputs[0] + outputs[1]


@pytest.mark.parametrize("use", [as_sparse, for_each_row, with_a_derivative])
def test_results_that_have_no_storage(use: Callable[[Direct, Tensor], Tensor]) -> None:
    """Of a home that somebody keeps, and that no call brought."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Direct(use)

    batches = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    assert_exact(make, lambda model: infer(model, batches, squared), torch.device("cpu"), 0.5)


def squared(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    output = model(batch)
    return output, output.square().mean()


def scaled(model: Direct, x: Tensor) -> Tensor:
    """Writes to all weights: to the homes, since nothing else takes part; and to one with a tensor of the device."""
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.mul_(0.5)
            layer.weight /= 0.25
        model.layers[1].weight.add_(x.mean())
    return x


def test_writes_in_a_pass(compute_device: torch.device) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Direct(scaled)

    batches = [torch.ones(2, WIDTH, device=compute_device)] * 4
    assert_exact(make, lambda model: infer(model, batches, squared), compute_device, 0.5)


def test_another_thread_sees_homes(compute_device: torch.device) -> None:
    """What is lent to the model as it computes is nobody else's."""
    seen: list[torch.device] = []

    def look(model: Direct, x: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: seen.append((model.layers[5].weight * 1).device))
        thread.start()
        thread.join()
        return x

    model = Direct(look)
    offload(model, compute_device, 0.5)
    model(torch.ones(2, WIDTH, device=compute_device))
    assert seen == [torch.device("cpu")]


CUTS = {"layers": "auto", "inside": ["layers.*.linear1", "layers.*.linear2"], "attention": ["layers.*.out_proj"]}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_encoders_fast_path(cut: str, padded: bool, compute_device: torch.device) -> None:
    """nn.TransformerEncoder looks at its first layer's weights, and its layers compute with those of their children."""
    if padded and compute_device.type != "cpu":
        return  # the emulated device has no nested tensors

    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 4).eval()

    mask = torch.tensor([[False, False, False], [False, False, True]]) if padded else None

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        for seed in range(4):
            x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed)).to(compute_device)
            with torch.no_grad():
                outcome.outputs.append(on_cpu(model(x, src_key_padding_mask=mask)))
        return outcome.read(model)

    assert_exact(make, script, compute_device, 0.6, blocks=CUTS[cut])
