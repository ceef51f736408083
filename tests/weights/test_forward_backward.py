"""What may go wrong, or otherwise, with several micro-batches that go through a model together?"""

import _thread
import dataclasses
import functools
import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.memory.arena import Arena
from headrace.runtime.autograd import in_backward
from headrace.weights.movement import batch_sums
from headrace.weights.passes.engine import Engine
from tests.support.compare import assert_same, assert_same_gradients, assert_same_weights
from tests.support.interrupts import interrupted_at
from tests.support.loops import random_batches
from tests.support.models import Layer, Stack, seeded

WIDTH = 16
COUNT = 3


class Model(Stack):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(Layer(WIDTH, 4 * WIDTH, activation=F.gelu, dropout=dropout) for _ in range(5))


def built(kind: Callable[[], nn.Module] = Model) -> Any:
    return seeded(kind)


def offloaded(model: Any, **options: Any) -> headrace.Offloaded:
    budget = 2 * sum(p.nbytes for p in model.layers[0].parameters()) + 4096
    options = {"device": "cpu", "device_memory": budget, "blocks": list(model.layers)} | options
    return headrace.offload(model, **options)


def batches(count: int = COUNT) -> list[Tensor]:
    return random_batches(count, 2, 4, WIDTH)


def in_turn(model: nn.Module, loss: Callable[[Tensor], Tensor], of: list[Tensor]) -> list[Tensor]:
    losses = []
    for batch in of:
        one = loss(batch)
        one.backward()
        losses.append(one.detach())
    return losses


def assert_equals_the_loop(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Tensor], Tensor],
    count: int = COUNT,
    **options: Any,
) -> headrace.Offloaded:
    """Three steps; a warning that it goes in the loop is an error."""
    plain, model = built(make), built(make)
    handle = offloaded(model, **options)
    ours = torch.optim.SGD(model.parameters(), lr=1e-4)
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-4)
    for _ in range(3):
        with warnings.catch_warnings(action="error"):
            losses = handle.forward_backward(batches(count), lambda batch: loss(model, batch))
        wanted = in_turn(plain, lambda batch: loss(plain, batch), batches(count))
        assert_same(losses, wanted)
        assert_same_gradients(model, plain, some_missing=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    if count > 1:
        assert handle.stats().micro_batches_together == 3 * count
    return handle


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


# what is exact --------------------------------------------------------------------------------------------------------
@pytest.mark.core(count=4)
@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_weights_come_once_for_any_number(count: int) -> None:
    handle = assert_equals_the_loop(Model, square, count)
    layers = [block for block in handle.settled_blocks("a look") if block.index >= 0]
    assert len(layers) == 5
    model = layers[0]
    handle.reset_stats()
    trained: Any = built()
    other = offloaded(trained)
    for _ in range(4):
        other.forward_backward(batches(count), lambda batch: square(trained, batch))
        trained.zero_grad()
    other.reset_stats()
    other.forward_backward(batches(count), lambda batch: square(trained, batch))
    stats = other.stats()
    assert stats.onload_bytes <= 2 * 5 * model.nbytes
    assert stats.offload_bytes == sum(p.nbytes for p in trained.parameters())


def test_no_host_memory_is_made_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a weight of two blocks wait there, one of each block and micro-batch; locking pages would stall."""
    made: list[bool] = []

    class Seen(Arena):
        def __init__(self, *given: Any, **settings: Any) -> None:
            made.append(in_backward())
            super().__init__(*given, **settings)

    def tied() -> nn.Module:
        model = Model()
        model.layers[3].up.weight = model.layers[0].up.weight
        return model

    monkeypatch.setattr(batch_sums, "Arena", Seen)
    assert_equals_the_loop(tied, square)
    assert made == [False] * (3 * 2 * COUNT)


@pytest.mark.extended
@pytest.mark.emu("random:0")
@pytest.mark.parametrize(("tied", "file", "stride"), [(True, "batch_sums.py", 11), (False, "flow.py", 1)])
def test_ctrl_c_while_gradients_leave(emu_device: Any, tied: bool, file: str, stride: int) -> None:
    """What the copies under way read and write is not free before they end: the emulated device looks for races."""
    plain, trained = (seeded(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))) for _ in range(2))
    for model in (plain, trained) if tied else ():
        model[3].weight = model[0].weight
    handle = headrace.offload(trained, device="emu", device_memory=5 * 64 * 65 * 4 // 2)
    plain.to("emu")
    given = [batch.to("emu") for batch in random_batches(3, 3, 64)]
    in_turn(plain, lambda batch: square(plain, batch), given)
    for _ in range(4):
        handle.forward_backward(given, lambda batch: square(trained, batch))
        trained.zero_grad()
    came = True
    for moment in itertools.count(1, stride):
        if not came:
            break
        came = interrupted_at(
            moment, lambda: handle.forward_backward(given, lambda batch: square(trained, batch)), file
        )
        trained.zero_grad()
    assert moment > 20
    handle.forward_backward(given, lambda batch: square(trained, batch))
    assert handle.stats().micro_batches_together > 0
    assert_same_gradients(trained, plain)


@pytest.mark.core(together=4)
@pytest.mark.parametrize(("together", "rounds"), [(1, 6), (2, 3), (4, 2), (6, 1), (9, 1)])
def test_some_go_together_and_then_the_next(together: int, rounds: int) -> None:
    """Without a step in between, the blocks at the turn of a round stay: 3 of 2 * 5 visits bring nothing. Sums begin
    with the gradients of the rounds before, which come to the device for it, also those of the call before.
    """
    plain, trained = built(), built()
    handle = offloaded(trained)
    losses = handle.forward_backward(batches(6), lambda batch: square(trained, batch), together=together)
    assert_same(losses, in_turn(plain, lambda batch: square(plain, batch), batches(6)))
    assert_same_gradients(trained, plain, some_missing=True)
    for _ in range(4):
        handle.forward_backward(batches(6), lambda batch: square(trained, batch), together=together)
    handle.reset_stats()
    handle.forward_backward(batches(6), lambda batch: square(trained, batch), together=together)
    stats = handle.stats()
    nbytes = sum(p.nbytes for p in trained.parameters())
    assert stats.offload_bytes == rounds * nbytes
    continued = 0 if together == 1 else rounds * nbytes
    assert rounds * nbytes < stats.onload_bytes - continued <= rounds * 2 * nbytes
    assert stats.micro_batches_together == (0 if together == 1 else 6)


class InPairs(Model):
    """Each checkpoint recomputes two layers before the backward of either."""

    def forward(self, x: Tensor) -> Tensor:
        for first in range(0, 4, 2):
            x = checkpoint(lambda x, at=first: self.layers[at + 1](self.layers[at](x)), x, use_reentrant=True)
        return self.layers[4](x)


@pytest.mark.parametrize("kind", [Model, InPairs])
@pytest.mark.parametrize("resident", [(), (0, 4)])
def test_sums_begin_with_the_gradients_of_calls_before(kind: type[Model], resident: tuple[int, ...]) -> None:
    """Values at which ((a + b) + c) + d and (a + b) + (c + d) differ: in blocks that come, and in those that stay."""
    plain, trained = built(kind), built(kind)
    largest = sum(p.nbytes for p in trained.layers[0].parameters())
    handle = offloaded(
        trained,
        resident=[trained.layers[index] for index in resident],
        device_memory=(2 + len(resident)) * largest + 4096,
    )
    for _ in range(3):
        handle.forward_backward(batches(4), lambda batch: square(trained, batch.requires_grad_()), together=2)
    for _ in range(3):
        in_turn(plain, lambda batch: square(plain, batch.requires_grad_()), batches(4))
    assert_same_gradients(trained, plain, some_missing=True)


def test_a_gradient_that_a_hook_takes_away_does_not_come_back() -> None:
    plain, trained = built(), built()
    handle = offloaded(trained)

    def cleared(model: Any) -> Callable[[Tensor], Tensor]:
        """Clears a gradient of the first layer when backward comes to its output."""
        weight = model.layers[0].up.weight

        def loss(batch: Tensor) -> Tensor:
            def clear(_: Tensor) -> None:
                weight.grad = None

            between = model.layers[0](batch)
            between.register_hook(clear)
            for layer in model.layers[1:]:
                between = layer(between)
            return between.square().mean()

        return loss

    handle.forward_backward(batches(2), lambda batch: square(trained, batch))
    in_turn(plain, lambda batch: square(plain, batch), batches(2))
    handle.forward_backward(batches(1), cleared(trained))
    in_turn(plain, cleared(plain), batches(1))
    assert_same_gradients(trained, plain, some_missing=True)


class Skips(Model):
    """What the first layers make is used by the last ones, and by the loss, several times each."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, layer in enumerate(self.layers):
            if index >= 3:
                x = x + kept[index - 3] * kept[0] + kept[0].mT.mT
            x = layer(x)
            kept.append(x)
        return torch.stack(kept).sum(0) * kept[1] + kept[1]


def test_tensors_that_bypass_blocks() -> None:
    assert_equals_the_loop(Skips, square)


class Cross(nn.Module):
    """Every layer reads what the first one made, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(WIDTH), *(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(4))])

    def forward(self, x: Tensor) -> Tensor:
        memory = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x, memory)) + memory * layer(memory, memory).tanh()
        return x


def test_a_memory_that_all_layers_read() -> None:
    assert_equals_the_loop(Cross, square, blocks="auto", device_memory="48KiB")


class Prompted(Model):
    """A tensor of the user's own, and not of the model, is used by several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts = [torch.randn(WIDTH, requires_grad=True) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x * self.prompts[index % 2]) + self.prompts[0]
        return x


def test_leaves_of_the_users_own() -> None:
    plain, model = built(Prompted), built(Prompted)
    handle = offloaded(model)
    with warnings.catch_warnings(action="error"):
        handle.forward_backward(batches(), lambda batch: square(model, batch))
    in_turn(plain, lambda batch: square(plain, batch), batches())
    assert_same_gradients(model, plain, some_missing=True)
    for prompt, wanted in zip(model.prompts, plain.prompts, strict=True):
        assert prompt.grad is not None
        assert torch.equal(prompt.grad, wanted.grad)


class Unlike(Model):
    """How many layers a micro-batch goes through depends on it; some are used by none of the last ones."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != 2 or float(x.detach().flatten()[0]) > 0:
                x = layer(x)
        return x


def test_micro_batches_that_take_different_ways() -> None:
    signs = [float(batch.flatten()[0]) > 0 for batch in batches(4)]
    assert len(set(signs)) == 2
    assert_equals_the_loop(Unlike, square, 4)


class Routed(nn.Module):
    """Calls its experts in an order that depends on the input. `shift` stays on the device, and others have it, too."""

    def __init__(self, shift: nn.Parameter) -> None:
        super().__init__()
        self.shift = shift
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for expert in x[0, 0, :4].argsort().tolist():
            x = x + self.experts[expert](x).tanh()
        return x + self.shift * x.tanh()


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_micro_batches_that_call_blocks_in_another_order(checkpointing: str) -> None:
    """A reentrant checkpoint's backward gives the gradients of all that it computes again: in the loop's order, too."""

    def make() -> Stack:
        shift = nn.Parameter(torch.randn(WIDTH))
        return Stack((Layer(WIDTH), Routed(shift), Routed(shift), Layer(WIDTH)), checkpointing=checkpointing)

    model, plain = built(make), built(make)
    blocks = [block for layer in model.layers for block in getattr(layer, "experts", [layer])]
    of = [100 * batch for batch in batches(5)]
    assert len({tuple(batch[0, 0, :4].argsort().tolist()) for batch in of}) > 2
    handle = offloaded(model, blocks=blocks)
    for _ in range(2):
        losses = handle.forward_backward(of, lambda batch: square(model, batch))
        assert_same(losses, in_turn(plain, lambda batch: square(plain, batch), of))
        assert_same_gradients(model, plain)
    stats = handle.stats()
    assert stats.micro_batches_together == 2 * len(of)
    assert stats.onload_bytes > 0
    assert stats.device_peak_bytes <= stats.device_budget_bytes


def test_a_frozen_part_and_a_call_without_gradients() -> None:
    def make() -> nn.Module:
        model = Model()
        model.layers[1].requires_grad_(False)
        return model

    def distilled(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = model(batch * 2)
        return F.mse_loss(model(batch), wanted)

    assert_equals_the_loop(make, distilled)


def test_weights_that_travel_in_another_dtype() -> None:
    model, other = built(), built()
    handle = offloaded(model, param_dtype=torch.bfloat16)
    reference = offloaded(other, param_dtype=torch.bfloat16)
    few = [batch.bfloat16() for batch in batches()]
    for _ in range(2):  # then added to what is there
        handle.forward_backward(few, lambda batch: square(model, batch))
        in_turn(other, lambda batch: square(other, batch), few)
        assert_same_gradients(model, other, some_missing=True)
    # Sums leave in the dtype of the homes, of twice the bytes, instead of three gradients.
    assert 2 * reference.stats().offload_bytes == COUNT * handle.stats().offload_bytes


def test_autocast_and_other_states_of_the_thread_go_along() -> None:
    plain, model = built(), built()
    handle = offloaded(model)
    packed = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t),
    ):
        losses = handle.forward_backward(batches(), lambda batch: square(model, batch))
        wanted = in_turn(plain, lambda batch: square(plain, batch), batches())
    assert losses[0].dtype == wanted[0].dtype
    assert_same_gradients(model, plain, some_missing=True)
    assert packed


def test_updates_beside_the_next_forward() -> None:
    plain, model = built(), built()
    handle = offloaded(model)
    ours = headrace.optim.AdamW(model.parameters(), lr=0.01, overlap="forward", max_grad_norm=0.5)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    for _ in range(4):
        losses = handle.forward_backward(batches(), lambda batch: square(model, batch))
        wanted = in_turn(plain, lambda batch: square(plain, batch), batches())
        assert_same(losses, wanted)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, plain)


# random numbers -------------------------------------------------------------------------------------------------------
def test_random_numbers_of_the_first_are_those_of_the_loop() -> None:
    plain, model = built(lambda: Model(0.5)), built(lambda: Model(0.5))
    handle = offloaded(model)
    torch.manual_seed(3)
    losses = handle.forward_backward(batches(), lambda batch: square(model, batch))
    after = torch.rand(4)
    again = handle.forward_backward([batches()[0]] * 3, lambda batch: square(model, batch))
    torch.manual_seed(3)
    assert torch.equal(losses[0], in_turn(plain, lambda batch: square(plain, batch), batches(1))[0])
    assert torch.equal(torch.rand(4), after)
    assert len({float(loss) for loss in again}) == 3  # each has its own

    torch.manual_seed(3)
    model.zero_grad()
    assert [float(loss) for loss in handle.forward_backward(batches(), lambda batch: square(model, batch))] == [
        float(loss) for loss in losses
    ]


def test_a_model_that_draws_none_leaves_the_generator_as_the_loop_does() -> None:
    model = built()
    handle = offloaded(model)
    before = torch.get_rng_state()
    handle.forward_backward(batches(), lambda batch: square(model, batch))
    assert torch.equal(torch.get_rng_state(), before)


# what cannot be cut ---------------------------------------------------------------------------------------------------
class Shift(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[0]


class InPlace(Model):
    """What a layer was given is written to after it, and used again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Shift(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) + 1
        y = self.layers[1](x)
        x.mul_(2)
        return self.layers[2](y) + x


class Hooked(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(_hooked(x))
        return x


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 0.5)
    return x


class Penalised(Model):
    """The gradient of its output with respect to something inside is a part of the loss."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layers[0](x)
        output = self.layers[1](inner)
        (slope,) = torch.autograd.grad(output.sum(), inner, create_graph=True)
        return output + slope


def test_hooks_on_what_lies_between_fire_as_ever() -> None:
    assert_equals_the_loop(Hooked, square)


class Recurrent(nn.Module):
    """Uses its weights three times in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.layer(x).tanh()
        return x


class CalledTwice(Stack):
    """A loop adds what the first call gives a weight to the second one's gradient one by one, and not its sum."""

    def __init__(self) -> None:
        super().__init__(Recurrent() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return x


@pytest.mark.parametrize("kind", [InPlace, Penalised, CalledTwice])
def test_others_go_in_the_loop_and_say_so(kind: type[Stack]) -> None:
    plain, model = built(kind), built(kind)
    handle = offloaded(model)
    called: list[int] = []

    def loss(batch: Tensor) -> Tensor:
        called.append(1)
        return square(model, batch)

    with pytest.warns(RuntimeWarning, match="one after the other"):
        losses = handle.forward_backward(batches(), loss)
    wanted = in_turn(plain, lambda batch: square(plain, batch), batches())
    assert_same(losses, wanted)
    assert_same_gradients(model, plain, some_missing=True)
    assert handle.stats().micro_batches_in_turn == COUNT
    assert f"{COUNT} one after the other" in str(handle.report())
    called.clear()
    with pytest.warns(RuntimeWarning, match="one after the other"):  # it is known now
        handle.forward_backward(batches(), loss)
    assert len(called) == COUNT


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Tensor


class TakesSlotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Slotted) -> Tensor:
        return self.layer(given.value).tanh()


class PassesSlotted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TakesSlotted() for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(Slotted(value))
        return value


def test_blocks_are_given_dataclasses_with_slots() -> None:
    assert_equals_the_loop(PassesSlotted, square)


@dataclasses.dataclass
class Loss:
    """A callable that has no hash."""

    model: nn.Module

    def __call__(self, batch: Tensor) -> Tensor:
        return square(self.model, batch)


def test_what_is_known_of_loss_functions() -> None:
    """It is known of their code, keeps none of them alive, and says nothing about others."""
    model = built()
    handle = offloaded(model)

    def together(loss: Callable[[Tensor], Tensor]) -> int:
        handle.reset_stats()
        handle.forward_backward(batches(), loss)
        return handle.stats().micro_batches_together

    with pytest.warns(RuntimeWarning, match="one after the other"):
        assert together(lambda batch: penalised(model, batch)) == 0
    kept = []
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            loss = Loss(model)
            kept.append(weakref.ref(loss))
            assert together(functools.partial(loss)) == together(loss) == COUNT
    del loss
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3
    with pytest.warns(RuntimeWarning, match="the loss uses a weight directly"):
        assert together(lambda batch: penalised(model, batch)) == 0


def test_hooks_of_parameters_see_the_gradient_of_each_micro_batch() -> None:
    plain, model = built(), built()
    handle = offloaded(model)
    seen: dict[int, int] = {}
    for number, one in enumerate((model, plain)):
        one.layers[1].up.weight.register_hook(
            lambda gradient, number=number: (
                seen.update({number: seen.get(number, 0) + 1}) or gradient.clamp(-1e-4, 1e-4)
            )
        )
    with pytest.warns(RuntimeWarning, match="hooks of parameter 'layers.1.up.weight' see each gradient"):
        handle.forward_backward(batches(), lambda batch: square(model, batch))
    in_turn(plain, lambda batch: square(plain, batch), batches())
    assert seen == {0: COUNT, 1: COUNT}
    assert_same_gradients(model, plain, some_missing=True)


def test_buffers_are_as_the_loop_leaves_them_after_falling_back() -> None:
    class Counted(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.calls = nn.Buffer(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = built(Counted)
    handle = offloaded(model)
    with pytest.warns(RuntimeWarning, match="one after the other"):
        handle.forward_backward(batches(), lambda batch: square(model, batch))
    assert float(model.calls) == COUNT


# errors ---------------------------------------------------------------------------------------------------------------
def works_still(handle: headrace.Offloaded, model: Any) -> None:
    plain = built()
    model.zero_grad()
    handle.forward_backward(batches(), lambda batch: square(model, batch))
    in_turn(plain, lambda batch: square(plain, batch), batches())
    assert_same_gradients(model, plain, some_missing=True)
    assert not [thread for thread in threading.enumerate() if thread.name == "headrace-micro-batch"]


@pytest.fixture
def trained() -> Iterator[tuple[headrace.Offloaded, Any]]:
    model = built()
    with offloaded(model) as handle:
        yield handle, model


@pytest.mark.parametrize("calls", range(1, 3 * 5, 3))
def test_an_error_in_forward(trained: tuple[headrace.Offloaded, Any], calls: int) -> None:
    handle, model = trained
    left = [calls]

    def fails(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise ZeroDivisionError("in forward")

    hooks = [layer.register_forward_hook(fails) for layer in model.layers]
    begun: list[int] = []
    closed: list[int] = []

    def loss(batch: Tensor) -> Tensor:
        begun.append(1)
        try:
            return square(model, batch)
        finally:
            closed.append(1)

    with pytest.raises(ZeroDivisionError, match="in forward"):
        handle.forward_backward(batches(), loss)
    assert 1 <= len(closed) == len(begun) <= COUNT
    assert all(p.grad is None for p in model.parameters())
    for hook in hooks:
        hook.remove()
    works_still(handle, model)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("calls", range(1, 3 * 5, 3))
@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_backward(trained: tuple[headrace.Offloaded, Any], calls: int, kind: type[BaseException]) -> None:
    handle, model = trained
    left = [calls]

    def fails(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise kind("in backward")

    hooks = [layer.register_full_backward_hook(fails) for layer in model.layers]
    with pytest.raises(kind):
        handle.forward_backward(batches(), lambda batch: square(model, batch))
    assert all(p.grad is None for p in model.parameters())
    for hook in hooks:
        hook.remove()
    works_still(handle, model)


@pytest.mark.parametrize("calls", range(1, 3 * 5, 3))
def test_ctrl_c_in_forward(trained: tuple[headrace.Offloaded, Any], calls: int) -> None:
    handle, model = trained
    left = [calls]

    def interrupts(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            _thread.interrupt_main()

    hooks = [layer.register_forward_hook(interrupts) for layer in model.layers]
    with pytest.raises(KeyboardInterrupt):
        handle.forward_backward(batches(), lambda batch: square(model, batch))
    assert left[0] <= 0
    assert all(p.grad is None for p in model.parameters())
    for hook in hooks:
        hook.remove()
    works_still(handle, model)


class Marked(torch.autograd.Function):
    """Keeps an object as long as its node lives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Any) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, None


def test_ctrl_c_just_after_the_forward_leaves_no_graph(
    trained: tuple[headrace.Offloaded, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, model = trained
    kept: list[Any] = []

    def marks(_module: Any, _args: Any, output: Tensor) -> Any:
        mark = Loss(model)
        kept.append(weakref.ref(mark))
        return Marked.apply(output, mark)  # type: ignore[no-untyped-call]

    model.layers[1].register_forward_hook(marks)
    end = Engine.end_pass

    def interrupts(engine: Engine) -> None:
        end(engine)
        raise KeyboardInterrupt

    handle.forward_backward(batches(), lambda batch: square(model, batch))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "end_pass", interrupts)
        with pytest.raises(KeyboardInterrupt):
            handle.forward_backward(batches(), lambda batch: square(model, batch))
    assert len(kept) > COUNT
    gc.collect()
    assert all(reference() is None for reference in kept)
    model.zero_grad()
    works_still(handle, model)


def test_what_is_no_loss_or_no_micro_batch_is_refused(trained: tuple[headrace.Offloaded, Any]) -> None:
    handle, model = trained
    with pytest.raises(ValueError, match="micro_batches is empty"):
        handle.forward_backward([], lambda batch: square(model, batch))
    with pytest.raises(ValueError, match=r"shape \(2, 4, 16\) for micro-batch 0"):
        handle.forward_backward(batches(), lambda batch: model(batch))
    with pytest.raises(ValueError, match="NoneType"):
        handle.forward_backward(batches(), lambda batch: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="computed with gradients on"):
        handle.forward_backward(batches(), lambda batch: square(model, batch).detach())
    for count, together in ((1, None), (3, 1), (5, 2), (5, None)):

        def last_is_a_tuple(batch: Tensor, of: list[Tensor]) -> Any:
            return square(model, batch) if batch is not of[-1] else (square(model, batch),)

        few = batches(count)
        with pytest.raises(ValueError, match=f"'tuple'> for micro-batch {count - 1};"):
            handle.forward_backward(few, lambda batch, few=few: last_is_a_tuple(batch, few), together=together)
    for together in (0, -1, 2.0, True, "all"):
        with pytest.raises(
            ValueError if type(together) is int else TypeError, match=f"together={together!r}; give how many"
        ):
            handle.forward_backward(batches(), lambda batch: square(model, batch), together=together)  # type: ignore[arg-type]
    works_still(handle, model)
    handle.remove()
    with pytest.raises(headrace.StateError, match=r"after remove\(\)"):
        handle.forward_backward(batches(), lambda batch: square(model, batch))


def test_a_call_within_a_pass_is_refused(trained: tuple[headrace.Offloaded, Any]) -> None:
    handle, model = trained

    def nested(batch: Tensor) -> Tensor:
        handle.forward_backward(batches(), lambda other: square(model, other))
        return square(model, batch)

    with pytest.raises(headrace.StateError, match="within a forward or backward"):
        handle.forward_backward(batches(), nested)
    works_still(handle, model)


def test_nothing_is_kept_of_what_is_over(trained: tuple[headrace.Offloaded, Any]) -> None:
    handle, model = trained
    gone: list[Any] = []

    def loss(batch: Tensor) -> Tensor:
        own = batch * 1
        gone.append(weakref.ref(own))
        return square(model, own)

    handle.forward_backward(batches(), loss)
    gc.collect()
    assert [reference() for reference in gone] == [None] * COUNT


# what micro-batches would see of each other ---------------------------------------------------------------------------
class Noting(Model):
    """What one layer notes, another one reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.detach().abs().mean()
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class Captured(Model):
    """A block's output is kept outside of the graph's own ways, and used by the loss."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.__dict__["features"][0] = x
        for layer in self.layers[1:]:
            x = layer(x)
        return x + self.__dict__["features"][0]


class Filling(nn.Module):
    """Every layer appends to a list that it is given."""

    class Part(Layer):
        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:  # type: ignore[override]
            x = super().forward(x)
            kept.append(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Part(WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, kept)
        return torch.stack(kept).sum(0)


def penalised(model: nn.Module, batch: Tensor) -> Tensor:
    return square(model, batch) + 0.01 * model.layers[2].up.weight.abs().sum()  # type: ignore[union-attr,operator]


def switched(model: nn.Module, batch: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        wanted = model(batch)
    model.train()
    return F.mse_loss(model(batch), wanted)


@pytest.mark.parametrize(
    ("kind", "loss"),
    [(Noting, square), (Captured, square), (Filling, square), (lambda: Model(0.5), switched), (Model, penalised)],
    ids=["attribute", "capture", "list", "mode", "penalty"],
)
def test_what_would_be_shared_goes_in_the_loop(
    kind: Callable[[], nn.Module], loss: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    reference, model = built(kind), built(kind)
    for one in (reference, model):
        one.__dict__["features"] = [None]
    looped, handle = offloaded(reference), offloaded(model)
    torch.manual_seed(2)
    wanted = in_turn(reference, lambda batch: loss(reference, batch), batches())
    torch.manual_seed(2)
    with pytest.warns(RuntimeWarning, match="one after the other"):
        losses = handle.forward_backward(batches(), lambda batch: loss(model, batch))
    assert_same(losses, wanted)
    assert_same_gradients(model, reference, some_missing=True)
    looped.remove()


class Counting(Model):
    """What is written before the first block is read after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class CountingAnew(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return Model.forward(self, x) * self.calls


class Centred(Counting):
    """What is written and read between two blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = Model.forward(self, x)
        with torch.no_grad():
            self.calls.mul_(0.5).add_(x.mean())
        return x - self.calls


class Normed(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = nn.BatchNorm1d(4)  # type: ignore[assignment]


def siamese(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - model(batch * 2)).square().mean()


@pytest.mark.parametrize(
    ("kind", "loss", "together"),
    [
        (Counting, square, False),
        (CountingAnew, square, False),
        (Normed, siamese, False),
        (Normed, square, True),
        (Centred, square, True),
    ],
)
def test_buffers_that_forwards_write(
    kind: type[Model], loss: Callable[[nn.Module, Tensor], Tensor], together: bool, compute_device: torch.device
) -> None:
    """Micro-batches go together where each buffer is used in one turn alone, and end with those of the loop."""
    reference, model = built(kind), built(kind)
    with offloaded(reference, device=compute_device), offloaded(model, device=compute_device) as handle:
        for step in range(2):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always", RuntimeWarning)
                losses = handle.forward_backward(batches(), lambda batch: loss(model, batch))
            assert [str(one.message).partition("buffer '")[2] != "" for one in warned] == [True] * (not together)
            wanted = in_turn(reference, lambda batch: loss(reference, batch), batches())
            assert_same(losses, wanted)
            assert_same_gradients(model, reference, some_missing=True)
            assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))
            assert handle.stats().micro_batches_together == (COUNT * (step + 1) if together else 0)


def test_a_mode_of_the_users_own_goes_along() -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is F.gelu else result

    plain, model = built(), built()
    handle = offloaded(model)
    with Doubled():
        losses = handle.forward_backward(batches(), lambda batch: square(model, batch))
        wanted = in_turn(plain, lambda batch: square(plain, batch), batches())
    assert handle.stats().micro_batches_together == COUNT
    assert_same(losses, wanted)
    assert_same_gradients(model, plain, some_missing=True)


@pytest.mark.parametrize("fails", [False, True])
def test_no_graph_is_kept(trained: tuple[headrace.Offloaded, Any], fails: bool) -> None:
    handle, model = trained
    nodes: list[Any] = []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.own = type("Own", (), {})()
            nodes.append(weakref.ref(ctx.own))
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient

    def loss(batch: Tensor) -> Tensor:
        result = Kept.apply(model(Kept.apply(batch.clone().requires_grad_())))
        if fails and len(nodes) == 2 * COUNT:
            raise ZeroDivisionError
        return result.square().mean()

    if fails:
        with pytest.raises(ZeroDivisionError):
            handle.forward_backward(batches(), loss)
    else:
        handle.forward_backward(batches(), loss)
    gc.collect()
    assert len(nodes) == 2 * COUNT
    assert [reference() for reference in nodes] == [None] * len(nodes)
