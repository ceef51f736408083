"""Do several micro-batches that go through the model together give what they give one after the other?

Weights and gradients then cross the link as often as for one micro-batch.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.matrix.models import CASES, CHECKPOINTING, Case
from tests.matrix.test_transformers import ARCHITECTURES, Inputs, batches_of, built, forward
from tests.support.compare import Outcome, assert_same, on_cpu
from tests.support.loops import adamw, to_device
from tests.support.offloaded import budget_bytes, count_settled_round

COUNT = 3
STEPS = 3

Loss = Callable[[nn.Module, Any], Tensor]


@pytest.fixture(autouse=True)
def no_loops() -> Iterator[None]:
    """A model that falls back to the loop would make these tests say nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "micro-batches go through")
        yield


def train(
    model: nn.Module,
    steps: Sequence[Sequence[Any]],
    loss: Loss,
    handle: headrace.Offloaded | None = None,
    between: Callable[[int], None] = lambda step: None,
) -> Outcome:
    """Steps of several micro-batches: together with a handle, one after the other without."""
    outcome = Outcome()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step, batches in enumerate(steps):
        if step != 1:  # gradients may be there already
            optimizer.zero_grad()
        if handle is not None:
            losses = handle.forward_backward(batches, lambda batch: loss(model, batch))
        else:
            losses = []
            for batch in batches:
                one = loss(model, batch)
                one.backward()
                losses.append(one.detach())
        outcome.outputs += [on_cpu(one) for one in losses]
        outcome.read_gradients(model)
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0, foreach=False)
        if step != 0:
            optimizer.step()
        between(step)
    optimizer.zero_grad()
    return outcome.read(model)


def assert_equal(
    make: Callable[[], nn.Module],
    steps: Sequence[Sequence[Any]],
    loss: Loss,
    device: torch.device,
    share: float,
    **options: Any,
) -> tuple[headrace.Offloaded, nn.Module]:
    plain = train(make().to(device), steps, loss)
    model = make()
    handle = headrace.offload(model, device=device, device_memory=budget_bytes(model, share), **options)
    assert_same(train(model, steps, loss, handle), plain)
    stats = handle.stats()
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
    return handle, model


def assert_together(
    make: Callable[[], nn.Module],
    steps: Sequence[Sequence[Any]],
    loss: Loss,
    device: torch.device,
    share: float,
    **options: Any,
) -> tuple[headrace.Offloaded, nn.Module]:
    handle, model = assert_equal(make, steps, loss, device, share, **options)
    assert_moves_as_for_one(handle, model, steps[0], loss)
    return handle, model


def assert_moves_as_for_one(handle: headrace.Offloaded, model: nn.Module, batches: Sequence[Any], loss: Loss) -> None:
    """Bytes over the link of a step with several micro-batches are those of one with one."""

    def moved(cycle: Callable[[], None]) -> tuple[int, int]:
        stats = count_settled_round(handle, cycle)
        assert handle.plan is not None
        rounds = len(handle.plan.cycles)
        return stats.onload_bytes // rounds, stats.offload_bytes // rounds

    def in_turn() -> None:
        model.zero_grad()
        loss(model, batches[0]).backward()

    def together() -> None:
        model.zero_grad()
        handle.forward_backward(batches, lambda batch: loss(model, batch))

    one_in, one_out = moved(in_turn)
    all_in, all_out = moved(together)
    assert one_in > 0
    assert all_in <= 1.02 * one_in  # plans may keep other blocks
    # Of weights that several blocks use, the gradient of each micro-batch and each block leaves by itself.
    assert all_out <= 1.02 * one_out + len(batches) * sum(uses * p.nbytes for p, uses in used_often(model, batches[0]))


def used_often(model: nn.Module, batch: Any) -> list[tuple[nn.Parameter, int]]:
    """Trained parameters that several modules have, or that are in a module which is called several times."""
    uses: Counter[nn.Parameter] = Counter()

    def note(module: nn.Module, *_: Any) -> None:
        uses.update(p for p in module._parameters.values() if p is not None and p.requires_grad)

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # checkpoints want gradients
        model(**batch) if isinstance(batch, dict) else model(batch[0])
    for handle in handles:
        handle.remove()
    return [(parameter, count) for parameter, count in uses.items() if count > 1]


def of_case(case: Case) -> Loss:
    return lambda model, batch: case.loss(model(batch[0]), batch[1]) / COUNT


PAIRS = [  # each kind of model and way of checkpointing with each of the others, and with each kind of training
    pytest.param(case, checkpointing, training, id=f"{case.name}-{checkpointing}-{training}")
    for number, case in enumerate(CASES)
    for place, checkpointing in enumerate(CHECKPOINTING)
    for training in [("full", "adapters")[(number + place) % 2]]
]


@pytest.mark.extended
@pytest.mark.parametrize(("case", "checkpointing", "training"), PAIRS)
def test_kind(case: Case, checkpointing: str, training: str, compute_device: torch.device) -> None:
    batches = case.on(compute_device, COUNT * STEPS)
    steps = [batches[COUNT * step : COUNT * (step + 1)] for step in range(STEPS)]
    if case.name == "unet" and checkpointing != "none":  # BatchNorm's statistics are written once more
        with warnings.catch_warnings(), pytest.warns(RuntimeWarning, match="modules write buffers"):
            assert_equal(lambda: case.build(checkpointing, training), steps, of_case(case), compute_device, case.share)
        return
    assert_together(lambda: case.build(checkpointing, training), steps, of_case(case), compute_device, case.share)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("make", "inputs", "checkpointing"),
    [
        pytest.param(make, inputs, checkpointing, id=f"{make.__name__}-{checkpointing}")
        for number, (make, inputs) in enumerate(ARCHITECTURES)
        for checkpointing in [CHECKPOINTING[number % 3]]
    ],
)
def test_transformers(
    make: Callable[[], nn.Module], inputs: Inputs, checkpointing: str, compute_device: torch.device
) -> None:
    def make_model() -> Any:
        model: Any = built(make)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name in ("dropout", "attention_dropout", "activation_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        if checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        return model.train()

    batches = to_device(batches_of(inputs), compute_device)
    assert_together(
        make_model,
        [batches[:2], batches[1:], batches],
        lambda model, batch: forward(model, batch)[1] / 3,
        compute_device,
        0.5,
    )


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
@pytest.mark.parametrize("name", ["dense", "encoder_decoder", "experts"])
def test_what_autograd_saves_waits_on_the_host(name: str, checkpointing: str, compute_device: torch.device) -> None:
    case = next(case for case in CASES if case.name == name)
    batches = case.on(compute_device, COUNT * 5)
    steps = [batches[COUNT * step : COUNT * (step + 1)] for step in range(5)]
    handle, _ = assert_equal(
        lambda: case.build(checkpointing), steps, of_case(case), compute_device, 0.6, activations={"min_bytes": 1024}
    )
    assert handle.activations is not None
    moved = handle.activations.stats()
    assert moved.planned_forwards + moved.similar_forwards >= len(steps) - 1
    assert 0 < 0.9 * moved.offload_bytes <= moved.onload_bytes <= moved.offload_bytes
