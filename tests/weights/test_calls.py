"""What does a visit cost the host? Python calls of ours, which the machine's speed does not change.

The limits are only ever lowered. `benchmarks/overhead.py` has what it comes to in time.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from benchmarks.overhead import PARAMETERS, WIDTH, Layer
from headrace.runtime import lanes
from tests.support.models import seeded

PACKAGE = str(Path(headrace.__file__).parent)
EXPERTS = 8


class Clock:
    """Goes on by as much each time that it is asked: how long something took does not depend on what else ran."""

    def __init__(self) -> None:
        self._moments = itertools.count()

    def perf_counter(self) -> float:
        return next(self._moments) * 1e-5


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made of times."""
    clock = Clock()
    monkeypatch.setattr(lanes, "time", clock)
    monkeypatch.setattr(lanes.ThreadLanes, "tick", lambda _: clock.perf_counter())


LIMITS = {  # of a layer of 12 parameters, in forward and backward together where it is trained
    "training streamed": 277,
    "training resident": 106,
    "inference streamed": 90,
    "inference resident": 24,
}


def calls_in(run: Callable[[], object]) -> Counter[str]:
    """How often each function of the package is called on this thread."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[f"{code.co_filename.removeprefix(PACKAGE)}: {code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def train(model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()


@torch.inference_mode()
def infer(model: nn.Module, x: torch.Tensor) -> None:
    model(x)


def calls_of_pass(kind: str, layers: int) -> Counter[str]:
    """What one pass calls when its plan is learned."""
    run = train if kind.startswith("training") else infer
    model = seeded(lambda: nn.Sequential(*(Layer() for _ in range(layers))))
    block_bytes = sum(parameter.nbytes for parameter in model[0].parameters()) + PARAMETERS * 64
    room = 4 if kind.endswith("streamed") else layers + 1
    x = torch.ones(4, WIDTH)
    with headrace.offload(model, device="cpu", device_memory=room * block_bytes, blocks=list(model)) as handle:
        for _ in range(6):
            run(model, x)
            model.zero_grad()
        before = handle.stats().onload_bytes
        calls = calls_in(lambda: run(model, x))
        assert (handle.stats().onload_bytes > before) is kind.endswith("streamed")
    return calls


@pytest.mark.parametrize("kind", LIMITS)
def test_calls_of_a_visit(kind: str) -> None:
    few, many = calls_of_pass(kind, 8), calls_of_pass(kind, 16)
    each = Counter({name: (many[name] - few[name]) / 8 for name in many})
    assert each.total() <= LIMITS[kind], "\n".join(f"{count:6.1f} {name}" for name, count in each.most_common(40))


LLAMA_LIMITS = {"training": 333, "inference": 116}  # of a streamed layer, whose 14 modules are called


def calls_of_llama(run: Callable[[nn.Module, torch.Tensor], None], layers: int) -> Counter[str]:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4, vocab_size=256
    )
    model = seeded(lambda: LlamaForCausalLM(config))
    head_bytes = 3 * model.lm_head.weight.nbytes
    layer_bytes = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    tokens = torch.arange(8)[None]
    with headrace.offload(model, device="cpu", device_memory=head_bytes + 4 * layer_bytes) as handle:
        for _ in range(6):
            run(model, tokens)
            model.zero_grad()
        before = handle.stats().onload_bytes
        calls = calls_in(lambda: run(model, tokens))
        assert handle.stats().onload_bytes - before > layer_bytes * (layers - 4)
    return calls


def train_llama(model: nn.Module, tokens: torch.Tensor) -> None:
    model(tokens, labels=tokens, use_cache=False).loss.backward()


@torch.inference_mode()
def infer_llama(model: nn.Module, tokens: torch.Tensor) -> None:
    model(tokens, use_cache=False)


@pytest.mark.parametrize("kind", LLAMA_LIMITS)
def test_calls_of_a_layer_of_transformers(kind: str) -> None:
    run = train_llama if kind == "training" else infer_llama
    few, many = calls_of_llama(run, 8), calls_of_llama(run, 16)
    each = Counter({name: (many[name] - few[name]) / 8 for name in many})
    assert each.total() <= LLAMA_LIMITS[kind], "\n".join(f"{count:6.1f} {name}" for name, count in each.most_common(40))


class Routed(nn.Module):
    """Of its experts, the same two are called by every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts[1](self.norm(x)) + self.experts[4](x)


def calls_of_experts(layers: int) -> Counter[str]:
    """Of each layer."""
    model = seeded(lambda: nn.Sequential(*(Routed() for _ in range(layers)))).eval()
    used_bytes = layers * (3 * (4 * WIDTH * WIDTH + 64) + 128)
    with headrace.offload(model, device="cpu", device_memory=used_bytes) as handle:
        for _ in range(5):
            infer(model, torch.ones(4, WIDTH))
        assert handle.stats().expert_uses == 5 * 2 * layers
        calls = calls_in(lambda: infer(model, torch.ones(4, WIDTH)))
    return Counter({name: count / layers for name, count in calls.items()})


def test_calls_of_an_expert_do_not_grow_with_the_model() -> None:
    few, many = calls_of_experts(8), calls_of_experts(32)
    assert many.total() <= 1.1 * few.total(), (many - few).most_common(10)


class InTurn(nn.Module):
    """Calls two of its experts in each pass, and comes to all of them in turn."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + self.experts[self.calls % len(self.experts)](x)
            self.calls += 1
        return x


def calls_of_loads(experts: int) -> Counter[str]:
    """Of each expert that comes, and makes another one go, where the device has room for half of them."""
    model = seeded(lambda: nn.Sequential(InTurn(experts), InTurn(experts))).eval()
    with headrace.offload(model, device="cpu", device_memory=experts * (4 * WIDTH * WIDTH + 128)) as handle:
        for _ in range(experts):
            infer(model, torch.ones(4, WIDTH))
        before = handle.stats().expert_loads
        calls = calls_in(lambda: [infer(model, torch.ones(4, WIDTH)) for _ in range(8)])
        assert handle.stats().expert_loads - before == 8 * 4
    return Counter({name: count / (8 * 4) for name, count in calls.items()})


def test_calls_of_an_expert_that_comes_do_not_grow_with_the_experts() -> None:
    few, many = calls_of_loads(16), calls_of_loads(128)
    assert many.total() <= 1.1 * few.total(), (many - few).most_common(10)
