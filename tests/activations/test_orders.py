"""May forwards and backwards come in any number and order, break off, and be looked at?"""

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.activations.stash import Stash
from headrace.runtime.autograd import top_hooks
from headrace.runtime.lanes import Lanes
from tests.activations.models import SAVED_BYTES, Layer, Stack, results, rows, step
from tests.support.compare import assert_same
from tests.support.instances import instances

Script = Callable[[nn.Module, torch.device, int], list[Tensor]]


def loss_of(model: nn.Module, device: torch.device, seed: int) -> Tensor:
    return model(rows(device, seed)).square().sum()


def sum_of_two(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    (loss_of(model, device, 0) + loss_of(model, device, 1)).backward()
    return results(model)


def forward_forward_backward_backward(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    losses = [loss_of(model, device, seed) for seed in range(3)]
    for loss in losses:
        loss.backward()
    return results(model, *losses)


def last_forward_first(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    losses = [loss_of(model, device, seed) for seed in range(3)]
    for loss in reversed(losses):
        loss.backward()
    return results(model)


def forward_without_backward(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    unused = loss_of(model, device, 0)
    loss_of(model, device, 1).backward()
    return results(model, unused)


def kept_graph(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    loss = loss_of(model, device, 0)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return results(model)


def parts_of_a_graph(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    x = rows(device)
    output = model(x)
    first = torch.autograd.grad(output[:8].sum(), x, retain_graph=True)[0]
    middle = torch.autograd.grad(output[8:].square().sum(), list(model.parameters())[-2:], retain_graph=True)
    output.sum().backward()
    return results(model, first, *middle)


def second_derivative(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    x = rows(device)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return results(model, gradient)


def changing_number(model: nn.Module, device: torch.device, index: int) -> list[Tensor]:
    for seed in range(1 + index % 3):
        loss_of(model, device, seed).backward()
    return results(model)


def changing_length(model: nn.Module, device: torch.device, index: int) -> list[Tensor]:
    model(rows(device, count=8 * (1 + index % 3))).sum().backward()
    return results(model)


def evaluation_between(model: nn.Module, device: torch.device, _round: int) -> list[Tensor]:
    loss = loss_of(model, device, 0)
    with torch.no_grad():
        other = loss_of(model, device, 1)
    with torch.inference_mode():
        third = model(rows(device, 2))
    loss.backward()
    return results(model, loss, other, third)


ORDERS = [
    sum_of_two,
    forward_forward_backward_backward,
    last_forward_first,
    forward_without_backward,
    kept_graph,
    parts_of_a_graph,
    second_derivative,
    changing_number,
    changing_length,
    evaluation_between,
]


@pytest.mark.core(budget=0)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("budget", [0, None])
def test_orders(order: Script, budget: int | None, compute_device: torch.device) -> None:
    plain, model = Stack().to(compute_device), Stack().to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=budget) as handle:
        for index in range(5):
            plain.zero_grad()
            model.zero_grad()
            assert_same(order(model, compute_device, index), order(plain, compute_device, index))
        assert handle.stats().offloads > 0
    assert handle.stats().host_held_bytes == 0


def test_a_backward_of_a_part_does_not_spoil_the_plan(compute_device: torch.device) -> None:
    """Whichever comes first: the plan that is kept is of the backward that goes furthest."""

    def part(model: Stack) -> None:
        torch.autograd.grad(loss_of(model, compute_device, 0), list(model.layers[6].parameters()))

    for partial in ((0, 1, 2), (1,), (3, 5)):
        model = Stack().to(compute_device)
        with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
            for index in range(8):
                if index in partial:
                    part(model)
                else:
                    step(model, rows(compute_device))
            assert handle.plan is not None
            assert len(handle.plan.offloaded) >= 6


# broken off ---------------------------------------------------------------------------------------------------------
class Trap(nn.Module):
    """Raises in forward or in backward when it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed: tuple[str, type[BaseException]] | None = None
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        if self.armed is not None and self.armed[0] == "forward":
            raise self.armed[1]("the trap")
        y = self.layer(x)
        if self.armed is not None and y.requires_grad:
            error = self.armed[1]

            def spring(_gradient: Tensor) -> None:
                raise error("the trap")

            y.register_hook(spring)
        return y


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_may_break_off(where: str, error: type[BaseException], compute_device: torch.device) -> None:
    kinds = iter([Layer, Layer, Trap, Layer, Layer] * 2)
    plain = Stack(5, lambda: next(kinds)()).to(compute_device)
    model = Stack(5, lambda: next(kinds)()).to(compute_device)
    expected = step(plain, rows(compute_device))
    trap = model.layers[2]
    assert isinstance(trap, Trap)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
        for index in range(6):
            trap.armed = (where, error) if index % 2 else None
            if trap.armed:
                with pytest.raises(error, match="the trap"):
                    step(model, rows(compute_device))
            else:
                assert_same(step(model, rows(compute_device)), expected)
            assert top_hooks(True) is None
        trap.armed = None
        assert_same(step(model, rows(compute_device)), expected)
        assert handle.stats().host_held_bytes == 0


def test_a_tensor_changed_in_place_is_noticed(compute_device: torch.device) -> None:
    class Changes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(x)
            z = y * 2
            y.detach().add_(1)
            return z

    for budget in (0, 2**30):
        model = nn.Sequential(nn.Linear(128, 128), Changes()).to(compute_device)
        with headrace.offload_activations(model, min_bytes=0, device_memory=budget):
            for _ in range(3):
                loss = model(rows(compute_device)).sum()
                with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
                    loss.backward()
                del loss
    if compute_device.type == "emu":
        from emulator import emu

        emu.take_reports()  # the copy to the host may be torn: nobody may use it


# around it ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_model_recomputes_it(reentrant: bool, compute_device: torch.device) -> None:
    model = Stack().to(compute_device)
    expected = step(model, rows(compute_device))
    calls: list[int] = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        for _ in range(3):
            model.zero_grad()
            loss = checkpoint(model, rows(compute_device), use_reentrant=reentrant).square().sum()
            loss.backward()
            assert_same(results(model, loss), expected)
    assert len(calls) == 6


def test_hooks_of_the_user_around_the_model_stay_theirs(compute_device: torch.device) -> None:
    model = Stack().to(compute_device)
    expected = step(model, rows(compute_device))
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.nbytes)
        return tensor

    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(rows(compute_device)).square().sum()
        loss.backward()
        assert_same(results(model, loss), expected)
    assert len(packed) > 8


def test_saved_tensors_can_be_looked_at(compute_device: torch.device) -> None:
    model = Stack().to(compute_device)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        for _ in range(3):
            output = model(rows(compute_device))
            assert torch.equal(output.grad_fn._saved_result, output)
            output.sum().backward()


def test_removed_between_forward_and_backward(compute_device: torch.device) -> None:
    model = Stack().to(compute_device)
    expected = step(model, rows(compute_device))
    model.zero_grad()
    handle = headrace.offload_activations(model, min_bytes=0, device_memory=0)
    loss = model(rows(compute_device)).square().sum()
    handle.remove()
    assert type(model) is Stack
    assert type(model.layers[0]) is Layer
    loss.backward()
    assert_same(results(model, loss), expected)
    moved = handle.stats().offloads
    assert_same(step(model, rows(compute_device)), expected)
    assert handle.stats().offloads == moved


def test_copies_and_pickles_are_plain(compute_device: torch.device) -> None:
    model = Stack().to(compute_device)
    expected = step(model, rows(compute_device))
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        pickled = pickle.loads(pickle.dumps(model.layers[0].cpu()))
        model.to(compute_device)
    for plain in (copied, loaded):
        assert type(plain) is Stack
        assert type(plain.layers[0]) is Layer
        assert_same(step(plain, rows(compute_device)), expected)
    assert type(pickled) is Layer


# refusals -----------------------------------------------------------------------------------------------------------
def test_settings_that_make_no_sense_are_refused() -> None:
    model = Stack(2)
    for settings, error, text in (
        ({"layers": 3}, ValueError, "2 layers"),
        ({"layers": -1}, ValueError, "layers=-1"),
        ({"layers": ["nowhere.*"]}, ValueError, "nowhere"),
        ({"modules": [nn.Linear(1, 1)]}, ValueError, "Linear"),
        ({"fraction": 1.5}, ValueError, "fraction=1.5"),
        ({"min_bytes": "many"}, ValueError, "min_bytes"),
        ({"most_in_flight": 0}, ValueError, "most_in_flight=0"),
    ):
        with pytest.raises(error, match=text):
            headrace.offload_activations(model, **settings)  # type: ignore[arg-type]
        assert type(model) is Stack
    with pytest.raises(TypeError, match="give a torch"):
        headrace.offload_activations(model.forward)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="give tensors"):
        headrace.mark_not_offload([1.0])  # type: ignore[arg-type]


def test_twice_is_refused() -> None:
    model = Stack(2)
    with (
        headrace.offload_activations(model),
        pytest.raises(headrace.StateError, match="offloaded already"),
    ):
        headrace.offload_activations(model)
    with headrace.offload(Stack(2), device="cpu") as _:
        pass


def test_host_memory_is_kept_to(compute_device: torch.device) -> None:
    model = Stack().to(compute_device)
    with (
        headrace.offload_activations(model, min_bytes=0, host_memory="64KiB"),
        pytest.raises(headrace.BudgetError, match="activations need"),
    ):
        step(model, rows(compute_device))


def test_a_backward_inside_of_the_forward(compute_device: torch.device) -> None:
    """It uses what the last layer uses too, for which the plan sends for what the forward has not saved yet."""

    class Penalised(Stack):
        def forward(self, x: Tensor) -> Tensor:
            first = torch.tanh(x * 2)
            torch.autograd.backward(first.sin().sum(), retain_graph=True)
            return super().forward(first) * first

    model = Penalised().to(compute_device)
    expected = step(model, rows(compute_device))
    for budget in (None, 0, 5 * SAVED_BYTES):
        with headrace.offload_activations(model, min_bytes=0, device_memory=budget, all_leave=budget is None) as handle:
            for _ in range(5):
                assert_same(step(model, rows(compute_device)), expected)
            assert handle.stats().offloads > 0
            assert handle.stats().host_held_bytes == 0


def test_the_collector_ends_a_backward_in_the_middle_of_a_move(
    compute_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that raised, and that somebody kept in a cycle: what it brought back goes after the move."""
    model = Stack().to(compute_device)
    expected, stashes = step(model, rows(compute_device)), instances(monkeypatch, Stash)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        for _ in range(3):
            step(model, rows(compute_device))
        kept = loss_of(model, compute_device, 0)
        (stash,) = stashes
        seen: list[str] = []

        def end() -> None:
            seen.append("ended")

        def move() -> None:
            stash.between_moves(end)
            assert not seen

        stash.guard(move)
        model.zero_grad()
        kept.backward()
        assert seen == ["ended"]
        assert_same(results(model, kept), expected)


def test_the_collector_waits_for_no_thread(compute_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come while a thread begins, in the midst of what waiting for another one would wait for."""
    model, may_end = Stack(2).to(compute_device), threading.Event()
    opened = instances(monkeypatch, Lanes)
    try:
        with headrace.offload_activations(model, min_bytes=0, device_memory=0) as handle:
            step(model, rows(compute_device))
        (lanes,) = opened
        job = lanes.run(may_end.wait, lanes.mark())
        kept = [handle]
        del handle

        def collect() -> None:
            if compute_device.index is not None:
                torch.accelerator.set_device_index(compute_device.index)
            kept.clear()
            gc.collect()

        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        collecting.join(5)
        assert not collecting.is_alive()
        with pytest.raises(RuntimeError, match="after shutdown"):
            lanes.run(may_end.wait, lanes.mark())
        assert not job.done()
    finally:
        may_end.set()
    job.result()


def test_a_destructor_does_not_wait_for_a_move(compute_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run it on a thread that the move waits for: one that reads or writes."""
    model = Stack().to(compute_device)
    expected, stashes = step(model, rows(compute_device)), instances(monkeypatch, Stash)
    with headrace.offload_activations(model, min_bytes=0, device_memory=0):
        (stash,) = stashes
        seen: list[str] = []
        thread = threading.Thread(target=lambda: stash.between_moves(lambda: seen.append("ended")), daemon=True)

        def move() -> None:
            thread.start()
            thread.join(5)
            assert not thread.is_alive()
            assert not seen

        stash.guard(move)
        assert_same(step(model, rows(compute_device)), expected)
        assert seen == ["ended"]
