"""After an exception in the middle of forward or backward: is the next step complete and exact?"""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.models import DENSE, Decoder
from tests.support.compare import Outcome, assert_same, same
from tests.support.held import Allocations, comes_true, is_counted
from tests.support.loops import adamw, train
from tests.support.offloaded import assert_streamed, offload, rounding_bytes


class StopError(Exception):
    """What a user's code might raise."""


class Fuse(torch.autograd.Function):
    """Does nothing in forward; raises in backward."""

    error: type[BaseException] = StopError

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> Any:
        raise Fuse.error("in backward")


class Fragile(Decoder):
    """Raises on its way when told so: in forward or in backward, at the beginning of a layer or inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks_at: tuple[str, int] | None = None
        self.error: type[BaseException] = StopError
        for index, layer in enumerate(self.layers):
            layer.attention.register_forward_pre_hook(lambda _module, args, at=index: self.visit(at, args))

    def visit(self, index: int, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.breaks_at == ("forward", index):
            raise self.error("in forward")
        if self.breaks_at == ("backward", index):
            Fuse.error = self.error
            return (Fuse.apply(args[0]), *args[1:])
        return None


def build(checkpointing: str) -> Fragile:
    torch.manual_seed(0)
    model = Fragile()
    model.checkpointing = checkpointing
    return model


def assert_homes_are_bound(model: nn.Module) -> None:
    """Whoever looks outside of forward and backward sees the parameters that the optimizer has."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        module = model.get_submodule(name.rpartition(".")[0])
        assert module._parameters[name.rpartition(".")[2]] is parameter
        assert parameter.device.type == "cpu"
        assert torch.isfinite(parameter).all()


@pytest.mark.core(checkpointing="non-reentrant", settled=True, where=("backward", 5))
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    "where", [("forward", 3), ("backward", 5), ("backward", 0)], ids=lambda where: f"{where[0]}{where[1]}"
)
@pytest.mark.parametrize(
    ("settled", "error"), [(False, StopError), (True, KeyboardInterrupt)], ids=["first", "settled"]
)
def test_next_step_is_complete(
    where: tuple[str, int],
    error: type[BaseException],
    checkpointing: str,
    settled: bool,
    compute_device: torch.device,
) -> None:
    batches = DENSE.on(compute_device)
    plain_model = build(checkpointing).to(compute_device)
    before = [train(plain_model, batches, DENSE.forward) for _ in range(2 * settled)]
    plain = train(plain_model, batches, DENSE.forward)

    model = build(checkpointing)
    handle = offload(model, compute_device)
    for expected in before:
        assert_same(train(model, batches, DENSE.forward), expected)
    model.breaks_at, model.error = where, error
    with pytest.raises(error):
        DENSE.forward(model, batches[0])[1].backward()
    model.breaks_at = None
    assert_homes_are_bound(model)
    model.zero_grad()
    assert_same(train(model, batches, DENSE.forward), plain)
    assert_streamed(handle, model)


def test_an_interrupted_pass_leaves_no_bytes_behind(compute_device: torch.device) -> None:
    batches = DENSE.on(compute_device)
    model = build("none")
    allocations = Allocations(compute_device)
    handle = offload(model, compute_device)
    train(model, batches, DENSE.forward)
    limit = handle.stats().device_budget_bytes + rounding_bytes(handle, model)
    for where in [("forward", 4), ("backward", 4), ("backward", 1)] * 2:
        model.breaks_at = where
        with pytest.raises(StopError):
            DENSE.forward(model, batches[0])[1].backward()
        model.breaks_at = None
        model.zero_grad()
        stats = handle.stats()
        assert stats.device_peak_bytes <= stats.device_budget_bytes
        assert comes_true(lambda: allocations.added_bytes <= limit)


def test_a_failed_backward_adds_a_gradient_whole_or_not_at_all(compute_device: torch.device) -> None:
    """As in a plain model, where those that came before the error have been added."""
    batches = DENSE.on(compute_device, 2)
    plain = build("none").to(compute_device)
    expected = Outcome()
    for batch in batches:
        DENSE.forward(plain, batch)[1].backward()
        expected.read_gradients(plain)

    model = build("none")
    offload(model, compute_device)
    DENSE.forward(model, batches[0])[1].backward()
    model.breaks_at = ("backward", 2)
    with pytest.raises(StopError):
        DENSE.forward(model, batches[1])[1].backward()
    model.breaks_at = None
    assert_homes_are_bound(model)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        before, both = (gradients[name] for gradients in expected.gradients)
        assert before is not None
        assert both is not None
        assert same(parameter.grad, before) or same(parameter.grad, both), name


def test_errors_in_hooks_and_losses(compute_device: torch.device) -> None:
    """An error between forward and backward, and one in a hook on a parameter."""
    batches = DENSE.on(compute_device)
    plain = train(build("none").to(compute_device), batches, DENSE.forward)
    model = build("none")
    handle = offload(model, compute_device)

    def fail(*_: Any) -> None:
        raise StopError("in a hook")

    DENSE.forward(model, batches[0])  # and the loop raises here
    hook: Any = model.head.weight.register_hook(fail)
    with pytest.raises(StopError):
        DENSE.forward(model, batches[0])[1].backward()
    hook.remove()
    model.zero_grad()
    assert_same(train(model, batches, DENSE.forward), plain)
    assert_streamed(handle, model)


def test_wrong_input_is_the_models_own_error(compute_device: torch.device) -> None:
    model = build("none")
    handle = offload(model, compute_device)
    tokens = DENSE.batches(1)[0][0].to(compute_device)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model(tokens, nothing=1)
    with torch.no_grad():
        model(tokens)
    assert handle.stats().onload_bytes > 0


def test_out_of_memory_is_survived(compute_device: torch.device) -> None:
    """A batch too large for the device, and then one that fits."""
    if not is_counted(compute_device):
        return  # nothing limits it
    from emulator import emu

    batches = DENSE.on(compute_device)
    plain = train(build("none").to(compute_device), batches, DENSE.forward)
    model = build("none")
    handle = offload(model, compute_device)
    optimizer = adamw(model.parameters())
    large = torch.zeros(64, 12, dtype=torch.int64, device=compute_device)
    with emu.configured(device_memory=torch.accelerator.memory_allocated() + 300_000):
        with pytest.raises(torch.OutOfMemoryError):
            model(large).sum().backward()
        gc.collect()
    optimizer.zero_grad()
    assert_same(train(model, batches, DENSE.forward), plain)
    assert_streamed(handle, model)
