"""Does everything move when it always did? Copies and waits of whole steps, scenario by scenario, as text.

A golden text says nothing of how it is done inside: where one changes, the device sees something else. `pytest
tests/weights/test_lane_log.py --update-golden` writes them anew; say in the commit why. Updates beside a pass, blocks
on disk, packed transport and ranks are in none: when their copies go depends on how fast threads are.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.support.lane_log import LaneLog, Told, recording
from tests.support.models import Adapted, Layer, Stack, seeded

GOLDEN = Path(__file__).parents[1] / "golden" / "lanes"
WIDTH = 16
LAYERS = 5
STEPS = 4
BLOCK_BYTES = sum(-(-parameter.nbytes // 64) * 64 for parameter in Layer(WIDTH).parameters())
Scenario = Callable[[LaneLog], None]
SCENARIOS: list[Scenario] = []


def scenario(run: Scenario) -> Scenario:
    SCENARIOS.append(run)
    return run


def batch(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or (2, WIDTH), generator=torch.Generator().manual_seed(seed)).to("emu")


def told(layers: Iterable[nn.Module], **options: Any) -> Stack:
    return Stack((Told(layer, str(number)) for number, layer in enumerate(layers)), **options)


def stack(**options: Any) -> Any:
    return seeded(lambda: told((Layer(WIDTH) for _ in range(LAYERS)), **options))


def offload(model: Any, room: float = 2.5, **options: Any) -> headrace.Offloaded:
    """With room for so many blocks."""
    options = {"blocks": list(model.layers)} | options
    return headrace.offload(model, device="emu", device_memory=int(room * BLOCK_BYTES), **options)


def infer(log: LaneLog, model: nn.Module, x: Tensor | None = None, steps: int = STEPS) -> None:
    for step in range(steps):
        log.begin(f"inference {step}")
        with torch.no_grad():
            model(batch() if x is None else x)


def train(
    log: LaneLog,
    model: nn.Module,
    optimizer: Any = None,
    *,
    x: Tensor | None = None,
    micro_batches: int = 1,
    steps: int = STEPS,
) -> None:
    for step in range(steps):
        for _ in range(micro_batches):
            log.begin(f"step {step}")
            model(batch() if x is None else x).square().mean().backward()
        if optimizer is not None:
            log.begin("update")
            optimizer.step()
        model.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)


@scenario
def inference(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        infer(log, model)


@scenario
def inference_with_all_resident(log: LaneLog) -> None:
    model = stack()
    with offload(model, LAYERS + 1):
        infer(log, model)


@scenario
def inference_of_what_nearly_fits(log: LaneLog) -> None:
    model = stack()
    with offload(model, LAYERS - 0.5):
        infer(log, model)


@scenario
def inference_loading_nothing_ahead(log: LaneLog) -> None:
    model = stack()
    with offload(model, prefetch=0):
        infer(log, model)


@scenario
def inference_with_a_resident_layer(log: LaneLog) -> None:
    model = stack()
    with offload(model, 3.5, resident=["layers.2"], blocks=[model.layers[k] for k in (0, 1, 3, 4)]):
        infer(log, model)


@scenario
def inference_in_another_dtype(log: LaneLog) -> None:
    model = stack()
    with offload(model, param_dtype=torch.bfloat16):
        infer(log, model, batch().bfloat16())


@scenario
def inference_with_writes_between(log: LaneLog) -> None:
    model = stack()
    with offload(model, LAYERS + 1):
        infer(log, model, steps=3)
        model.layers[1].inner.up.weight.data.add_(1)
        with torch.no_grad():
            model.layers[3].inner.down.bias.add_(1)
        infer(log, model, steps=2)


@scenario
def inference_after_refresh(log: LaneLog) -> None:
    model = stack()
    with offload(model) as handle:
        infer(log, model, steps=3)
        handle.refresh()
        infer(log, model, steps=2)


@scenario
def inference_with_copies_paused(log: LaneLog) -> None:
    model = stack()
    with offload(model) as handle:
        infer(log, model, steps=3)
        with handle.copies_paused():
            infer(log, model, steps=1)
        infer(log, model, steps=1)


@scenario
def inference_that_strays(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        infer(log, model, steps=3)
        model.layers = nn.ModuleList([*model.layers[:2], *model.layers[3:], model.layers[2]])
        infer(log, model)


@scenario
def inference_that_breaks_off(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        infer(log, model, steps=3)
        hook = model.layers[3].inner.up.register_forward_pre_hook(_fail)
        with contextlib.suppress(RuntimeError):
            infer(log, model, steps=1)
        hook.remove()
        infer(log, model)


def _fail(*_: object) -> None:
    raise RuntimeError("a layer fails")


@scenario
def training(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        train(log, model, sgd(model))


@scenario
def training_with_all_resident(log: LaneLog) -> None:
    model = stack()
    with offload(model, LAYERS + 1):
        train(log, model, sgd(model))


@scenario
def training_without_updates(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        train(log, model)


@scenario
def training_with_checkpoints(log: LaneLog) -> None:
    model = stack(checkpointing="non-reentrant")
    with offload(model):
        train(log, model, sgd(model))


@scenario
def training_with_reentrant_checkpoints(log: LaneLog) -> None:
    model = stack(checkpointing="reentrant")
    with offload(model):
        train(log, model, sgd(model))


@scenario
def training_of_micro_batches_in_turn(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        train(log, model, sgd(model), micro_batches=3)


@scenario
def training_of_micro_batches_together(log: LaneLog) -> None:
    model = stack()
    with offload(model) as handle:
        optimizer = sgd(model)
        for step in range(STEPS):
            log.begin(f"step {step}")
            handle.forward_backward([batch(seed=k) for k in range(3)], lambda x: model(x).square().mean())
            log.begin("update")
            optimizer.step()
            optimizer.zero_grad()


@scenario
def training_of_adapters(log: LaneLog) -> None:
    model = seeded(lambda: told(Adapted(Layer(WIDTH), WIDTH, 2) for _ in range(LAYERS)))
    with offload(model, 3.5):
        train(log, model, sgd(model))


@scenario
def training_with_sums_in_another_dtype(log: LaneLog) -> None:
    model = stack().bfloat16()
    with offload(model, 1.25, grad_dtype=torch.float32):
        train(log, model, x=batch().bfloat16(), micro_batches=2)


@scenario
def training_with_kept_gradients(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        train(log, model, steps=2)
        log.begin("step")
        model(batch()).square().mean().backward()
        kept = [parameter.grad for parameter in model.parameters()]
        train(log, model, steps=2)
        del kept


@scenario
def training_of_one_layer_thrice(log: LaneLog) -> None:
    layer = seeded(lambda: Layer(WIDTH))
    layers = [layer, Layer(WIDTH), layer, Layer(WIDTH), layer]
    model = seeded(lambda: told(layers))
    with offload(model, blocks=[layer, layers[1], layers[3]]):
        train(log, model, sgd(model))


@scenario
def training_with_validation_between(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        optimizer = sgd(model)
        for _ in range(3):
            train(log, model, optimizer, steps=1)
            infer(log, model, steps=1)


class Coder(nn.Module):
    """Its user calls another method than `forward`, which reads a weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Told(Layer(WIDTH), str(number)) for number in range(LAYERS))
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def encode(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden + self.shift)
        return hidden


@scenario
def training_through_another_method(log: LaneLog) -> None:
    model = seeded(Coder)
    with offload(model):
        for step in range(STEPS):
            log.begin(f"step {step}")
            model.encode(batch()).square().mean().backward()
            sgd(model).step()
            model.zero_grad()


@scenario
def training_of_a_model_that_is_offloaded_again(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        train(log, model, sgd(model), steps=2)
    with offload(model, 3.5):
        train(log, model, sgd(model), steps=3)


class Asking(nn.Module):
    """A layer that computes with the weight of another one as well."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = Layer(WIDTH)
        self.other = [other]

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(self.own(hidden), self.other[0].weight)


@scenario
def training_with_a_stray_use(log: LaneLog) -> None:
    first = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    model = seeded(lambda: told([first, Layer(WIDTH), Asking(first), Layer(WIDTH)]))
    with offload(model):
        train(log, model, sgd(model))


@scenario
def training_that_breaks_off_in_backward(log: LaneLog) -> None:
    model = stack()
    with offload(model):
        train(log, model, steps=3)
        hidden = model(batch()).square().mean()
        hidden.register_hook(lambda _: _fail())
        with contextlib.suppress(RuntimeError):
            hidden.backward()
        train(log, model, steps=3)


@scenario
def training_with_activations_on_the_host(log: LaneLog) -> None:
    model = stack()
    with offload(model, activations={"all_leave": True, "min_bytes": 0}):
        train(log, model, sgd(model))


class Table(nn.Module):
    """A table that is larger than all layers, of which few rows are used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, WIDTH)
        self.layers = nn.ModuleList(Told(Layer(WIDTH), str(number)) for number in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@scenario
def rows_of_a_table(log: LaneLog) -> None:
    model = seeded(Table)
    ids = torch.arange(0, 480, 11)
    with offload(model, 4, blocks=list(model.layers)):
        infer(log, model, ids.to("emu"))
        train(log, model, sgd(model), x=ids.to("emu"))


class Routed(nn.Module):
    """Two experts of eight for each token: modules in a list, or stacked weights."""

    def __init__(self, *, stacked: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 8, bias=False)
        self.experts: Any
        if stacked:
            self.experts = headrace.experts(Stacked(), argument="chosen")
        else:
            self.experts = headrace.experts(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)))

    def forward(self, tokens: Tensor) -> Tensor:
        shares, chosen = self.gate(tokens).softmax(-1).topk(2)
        if isinstance(self.experts, Stacked):
            return tokens + self.experts(tokens, chosen, shares)
        found = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            at, place = torch.where(chosen == expert)
            found = found.index_add(0, at, self.experts[expert](tokens[at]) * shares[at, place, None])
        return tokens + found


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, WIDTH, WIDTH) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        found = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            at, place = torch.where(chosen == expert)
            found = found.index_add(0, at, tokens[at] @ self.weight[expert] * shares[at, place, None])
        return found


def routed(*, stacked: bool) -> Any:
    return seeded(lambda: told(Routed(stacked=stacked) for _ in range(3)))


EXPERTS_BYTES = 3 * (5 * 1088 + 512)


@scenario
def experts_that_are_modules(log: LaneLog) -> None:
    _run_experts(log, routed(stacked=False))


@scenario
def experts_of_stacked_weights(log: LaneLog) -> None:
    _run_experts(log, routed(stacked=True))


def _run_experts(log: LaneLog, model: Any) -> None:
    with headrace.offload(model, device="emu", device_memory=EXPERTS_BYTES):
        for seed in range(3):
            infer(log, model, batch(seed=seed), steps=1)
        train(log, model, sgd(model), steps=3)


@pytest.mark.emu("lazy")
@pytest.mark.usefixtures("emu_device")
@pytest.mark.parametrize("run", SCENARIOS, ids=lambda run: run.__name__)
def test_lane_log(run: Scenario, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    with recording(monkeypatch) as log:
        log.begin("offload()")
        run(log)
    golden = GOLDEN / f"{run.__name__}.txt"
    if request.config.getoption("--update-golden"):
        golden.write_text(log.text())
    assert log.text() == golden.read_text()
