"""Does Ctrl-C in the middle of a load leave a model that computes what it should?"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.memory.buffers import DeviceBuffers
from headrace.weights.movement.block import Block
from headrace.weights.movement.leaves import Leaves
from headrace.weights.movement.residency import Residency
from headrace.weights.passes.call import Call
from headrace.weights.passes.engine import Engine
from tests.support.compare import assert_same, assert_same_gradients
from tests.support.models import some_tokens
from tests.units.models import Decoder

BUDGET_BYTES = 9 << 10  # a fifth of the Decoder: blocks come and go all the time


def step(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


class Interrupts:
    """Raises KeyboardInterrupt at the n-th call of a method, before or after its work."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int, after: bool) -> None:
        self.count = 0
        held = getattr(owner, name)
        method = held.fget if isinstance(held, property) else held

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == at and not after:
                raise KeyboardInterrupt
            result = method(*args, **kwargs)
            if self.count == at:
                raise KeyboardInterrupt
            return result

        patch.setattr(owner, name, property(interrupted) if isinstance(held, property) else interrupted)


def steps(model: torch.nn.Module, batch: torch.Tensor) -> None:
    for _ in range(3):
        step(model, batch).backward()


@pytest.mark.core(at=4)
@pytest.mark.parametrize("at", [1, 2, 4, 9])
@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("copy", False),
        ("copy", True),
        ("prepare_copies", True),
        ("_submit", True),
        ("point", False),
        ("point", True),
        ("release", False),
    ],
)
def test_the_next_step_is_right(
    compute_device: torch.device, where: str, after: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that was being loaded must not be taken for one that is there."""
    model, plain = Decoder(), Decoder()
    plain.load_state_dict(model.state_dict())
    plain.to(compute_device)
    batch = some_tokens().to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=BUDGET_BYTES) as handle:
        step(model, batch).backward()
        model.zero_grad()
        owners: dict[str, Any] = {"_submit": Residency, "prepare_copies": Block, "point": Leaves}
        owners["release"] = DeviceBuffers
        with monkeypatch.context() as patch:
            interrupts = Interrupts(patch, owners.get(where, type(handle._lanes)), where, at=at, after=after)
            with pytest.raises(KeyboardInterrupt):
                steps(model, batch)
            assert interrupts.count >= at
        model.zero_grad()
        for _ in range(2):
            loss, expected = step(model, batch), step(plain, batch)
            assert torch.equal(loss, expected)
            loss.backward()
            expected.backward()
        assert_same_gradients(model, plain)
        handle.reset_stats()
        steps(model, batch)
        assert handle.stats().device_peak_bytes <= BUDGET_BYTES


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [(Call, "__init__"), (Engine, "_claim"), (Engine, "pause_method"), (Engine, "_begin_pass")]
)
def test_another_thread_may_call_the_model_next(
    compute_device: torch.device, owner: Any, name: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = Decoder(), some_tokens().to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=BUDGET_BYTES), torch.no_grad():
        expected = model(batch)
        with monkeypatch.context() as patch:
            Interrupts(patch, owner, name, at=1, after=after)
            with pytest.raises(KeyboardInterrupt):
                model(batch)
        with ThreadPoolExecutor(1) as other:
            if compute_device.index is not None:
                other.submit(torch.accelerator.set_device_index, compute_device.index)
            found = other.submit(torch.no_grad()(model), batch).result()
        assert torch.equal(found, expected)


@pytest.mark.parametrize("caught_in_a_hook", [False, True])
def test_a_recomputation_that_was_interrupted_as_it_ended_is_over(
    monkeypatch: pytest.MonkeyPatch, *, caught_in_a_hook: bool
) -> None:
    """Before, it seemed to be under way for good: later calls counted as calls within it, and remove() was refused.

    Also where the interrupt breaks off a nested backward alone, and the one around it completes.
    """
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    handle = headrace.offload(model, device="cpu", device_memory=9000, blocks=layers)
    x = torch.ones(2, 32, requires_grad=True)
    leave = Engine._leave

    def interrupted(engine: Engine) -> None:
        if engine.passes.calls[-1].recomputes:
            monkeypatch.undo()
            raise KeyboardInterrupt
        leave(engine)

    def loss() -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=True).sum()

    nested = loss()

    def strike(_gradient: Any = None) -> None:
        monkeypatch.setattr(Engine, "_leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            nested.backward()

    if caught_in_a_hook:
        around = model(x)
        around.register_hook(strike)
        around.sum().backward()
    else:
        strike()
    model.zero_grad()
    loss().backward()
    stats = handle.stats()
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
    handle.remove()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    loss().backward()
    assert_same(gradients, [parameter.grad for parameter in model.parameters()])
