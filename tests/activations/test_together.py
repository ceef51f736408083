"""Are adapters, text generation, wrapped models and overlapped optimizers exact with activations offloaded?"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace
from headrace.optim import AdamW
from tests.activations.models import SAVED_BYTES, Stack, rows, step
from tests.matrix.test_peft import adapted, batches, forward
from tests.matrix.test_transformers import built, llama, mixtral, text_inputs
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import train
from tests.support.offloaded import budget_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

EVERYTHING: dict[str, Any] = {"min_bytes": 0, "device_memory": 0}


def offloaded(model: nn.Module, device: torch.device, *, with_weights: bool) -> tuple[Any, Any]:
    """The handle, and that of the activations."""
    if not with_weights:
        handle = headrace.offload_activations(model.to(device), **EVERYTHING)
        return handle, handle
    both = headrace.offload(model, device=device, device_memory=budget_bytes(model, 0.5), activations=EVERYTHING)
    return both, both.activations


# adapters and generation ----------------------------------------------------------------------------------------------
@pytest.mark.core(with_weights=True)
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("adapted_first", [True, False])
def test_adapters(adapted_first: bool, with_weights: bool, compute_device: torch.device) -> None:
    """Put on before offloading or after, trained, and switched off."""
    plain = train(adapted(built(llama)).to(compute_device), batches(compute_device), forward)
    model: Any = built(llama)
    if adapted_first:
        model = adapted(model)
    handle, activations = offloaded(model, compute_device, with_weights=with_weights)
    with handle:
        if not adapted_first:
            model = adapted(model)
        assert_same(train(model, batches(compute_device), forward), plain)
        assert activations.stats().offloads > 0
        assert activations.stats().host_held_bytes == 0
        with model.disable_adapter(), torch.no_grad():
            off = forward(model, batches(compute_device)[0])[0].cpu()
    with torch.no_grad():
        base = built(llama).to(compute_device)
        assert torch.equal(off, forward(base, batches(compute_device)[0])[0].cpu())


@pytest.mark.core(with_weights=True)
@pytest.mark.parametrize("with_weights", [False, True])
def test_generation_between_steps(with_weights: bool, compute_device: torch.device) -> None:
    """Passes without gradients, of many lengths: nothing leaves in them, and the plan for training stays."""

    def run(model: Any) -> tuple[list[Tensor], list[Tensor]]:
        tokens, losses = [], []
        prompt = text_inputs(7)["input_ids"][:, :4].to(compute_device)
        for batch in [*batches(compute_device), *batches(compute_device)]:
            loss = forward(model, batch)[1]
            tokens.append(model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False).cpu())
            loss.backward()
            losses.append(loss.detach().cpu())
        return tokens, [*losses, *(p.grad.cpu() for p in model.parameters())]

    expected = run(built(llama).to(compute_device))
    model = built(llama)
    handle, activations = offloaded(model, compute_device, with_weights=with_weights)
    with handle:
        tokens, results = run(model)
        stats = activations.stats()
    assert_same(tokens, expected[0])
    assert_same(results, expected[1])
    assert stats.recorded_forwards + stats.planned_forwards == 6
    assert stats.planned_forwards >= 4
    assert stats.offload_bytes >= stats.onload_bytes > 0


@pytest.mark.core(with_weights=True)
@pytest.mark.parametrize("with_weights", [False, True])
def test_experts_of_transformers(with_weights: bool, compute_device: torch.device) -> None:
    """They save other bytes at every step: one is recorded, and the others keep to a ceiling."""
    many = [*batches(compute_device), *batches(compute_device)]
    plain = train(built(mixtral).to(compute_device), many, forward)
    model = built(mixtral)
    handle, activations = offloaded(model, compute_device, with_weights=with_weights)
    with handle:
        assert_same(train(model, many, forward), plain)
        stats = activations.stats()
    assert stats.recorded_forwards == 1
    assert stats.offloads > 0
    assert stats.host_held_bytes == 0


# wrapped --------------------------------------------------------------------------------------------------------------
class Wrapper(nn.Module):
    """As trainers have them: the model is a child, and what is behind it is in the call too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).sin()  # type: ignore[no-any-return]


@pytest.fixture
def _one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def check_wrapped(wrap: Callable[[nn.Module], nn.Module], device: torch.device, *, wrapped_first: bool) -> None:
    model, inner = wrap(Stack().to(device)), Stack().to(device)
    outer = wrap(inner) if wrapped_first else inner
    with headrace.offload_activations(outer, **EVERYTHING) as handle:
        outer = outer if wrapped_first else wrap(outer)
        for seed in range(4):
            assert_same(step(outer, rows(device, seed)), step(model, rows(device, seed)))
        plan = handle.plan
        assert plan is not None
        assert plan.host_bytes >= 6 * SAVED_BYTES
        assert handle.stats().planned_forwards >= 2


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_wrapped(wrapped_first: bool, compute_device: torch.device) -> None:
    check_wrapped(Wrapper, compute_device, wrapped_first=wrapped_first)


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_data_parallel(wrapped_first: bool) -> None:
    """On the CPU, as gloo has no collectives for the emulated device."""
    check_wrapped(nn.parallel.DistributedDataParallel, torch.device("cpu"), wrapped_first=wrapped_first)


@pytest.mark.filterwarnings("ignore::UserWarning:accelerate")
def test_prepared_by_accelerate() -> None:
    import accelerate

    def run(model: nn.Module, prepare: Callable[..., Any]) -> list[Tensor]:
        model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=False))
        for seed in range(4):
            model(rows("cpu", seed)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    expected = run(Stack(), lambda *both: both)
    model = Stack()
    with headrace.offload_activations(model, **EVERYTHING) as handle:
        assert_same(run(model, accelerate.Accelerator(cpu=True).prepare), expected)
        assert handle.stats().planned_forwards >= 2


# optimizers -----------------------------------------------------------------------------------------------------------
@pytest.mark.core(checkpointing="non-reentrant")
@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_updates_beside_the_passes(overlap: str, checkpointing: str, compute_device: torch.device) -> None:
    """Weights come, gradients go, updates run and activations leave and come back, all at once."""

    def run(model: nn.Module, overlap: str) -> list[Tensor]:
        optimizer = AdamW(model.parameters(), lr=1e-2, overlap=overlap)
        losses = []
        for seed in range(6):
            loss = model(rows(compute_device, seed)).square().mean()
            loss.backward()
            losses.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        return [*losses, *(p.detach().cpu().clone() for p in model.parameters())]

    def train_with(activations: Any, overlap: str) -> tuple[list[Tensor], Any]:
        model = Stack(checkpointing=checkpointing)
        with headrace.offload(
            model, device=compute_device, device_memory=weight_bytes(model) // 3, activations=activations
        ) as handle:
            got = run(model, overlap)
            return got, None if handle.activations is None else handle.activations.stats()

    expected, _ = train_with(False, "none")
    got, stats = train_with(EVERYTHING, overlap)
    assert_same(got, expected)
    assert stats.planned_forwards >= 4
    assert stats.onload_bytes >= 4 * 6 * SAVED_BYTES
    assert stats.host_held_bytes == 0
