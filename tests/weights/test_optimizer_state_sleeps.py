"""Does an optimizer's state sleep with its model, count in a shared budget of host memory, and stay the same?"""

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.memory.ledger import Tier
from headrace.optim.disk_state import DiskState
from tests.support.compare import on_cpu
from tests.support.held import weight_bytes
from tests.support.loops import steps
from tests.support.models import Layer, Stack, seeded

WIDTH = 64
LAYER_BYTES = weight_bytes(Layer(WIDTH))
BATCH = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
Make = Callable[[Any], headrace.optim.AdamW]
adamw: Make = partial(headrace.optim.AdamW, lr=1e-2)
MAKES: dict[str, Any] = {
    "adamw": adamw,
    "amsgrad": partial(adamw, amsgrad=True),
    "8bit": partial(adamw, state_dtype="8bit"),
    "beside_forward": partial(adamw, overlap="forward"),
    "beside_backward": partial(adamw, overlap="backward"),
    "on_device": partial(adamw, update="device"),
    "clipped": partial(adamw, max_grad_norm=0.1),
    "sgd": partial(headrace.optim.SGD, lr=0.1, momentum=0.9),
    "sgd_without_state": partial(headrace.optim.SGD, lr=0.1),
    "lion": partial(headrace.optim.Lion, lr=1e-3),
    "adafactor": partial(headrace.optim.Adafactor, lr=1e-2),
}


def stack(layers: int = 4, dtype: torch.dtype = torch.float32) -> Stack:
    return seeded(lambda: Stack(Layer(WIDTH) for _ in range(layers))).to(dtype)


def train(model: nn.Module, optimizer: Any, count: int, after: Callable[[int], None] = lambda step: None) -> list[Any]:
    """The losses and the weights of some steps. `after` is called after each."""
    batches = [BATCH.to(next(model.parameters()).dtype) + step for step in range(count)]
    return [*steps(model, optimizer, batches, after_step=after), *on_cpu(list(model.parameters()))]


def offload(model: nn.Module, device: torch.device, disk: Path | None, **settings: Any) -> headrace.Offloaded:
    settings.setdefault("device_memory", 3 * LAYER_BYTES)
    return headrace.offload(model, device=device, disk=disk, **settings)


def small_bytes(optimizer: Any) -> int:
    """What stays in memory: numbers of steps, and tensors of less than 16 KiB."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return sum(4 + 16 * one.numel() for one in parameters if one.numel() < 1 << 14)


@pytest.mark.core(dtype=torch.bfloat16, name=["adamw", "beside_backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_training(compute_device: torch.device, tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    if name == "on_device" and compute_device.type == "cpu":
        pytest.skip("an accelerator updates")
    results = []
    for sleeps in (False, True):
        model = stack(dtype=dtype)
        room = 20 if name == "on_device" else 3
        handle = offload(model, compute_device, tmp_path, device_memory=room * LAYER_BYTES)
        optimizer = MAKES[name](model.parameters())

        def sleep(step: int, handle: Any = handle, optimizer: Any = optimizer) -> None:
            held = optimizer.held_bytes()
            handle.sleep(host=True)
            gc.collect()
            assert optimizer.held_bytes() <= small_bytes(optimizer)
            if step % 2:
                handle.wake()
                assert optimizer.held_bytes() == held
                handle.sleep(host=step == 3)

        results.append(train(model, optimizer, 5, sleep if sleeps else lambda step: None))
        handle.remove()
    assert all(map(torch.equal, *results))


def asleep(device: torch.device, tmp_path: Path) -> tuple[nn.Module, Any, Any, headrace.Offloaded]:
    """A model and its optimizer that sleep after two steps, and the state that the optimizer should have."""
    model = stack()
    handle = offload(model, device, tmp_path)
    optimizer = adamw(model.parameters())
    train(model, optimizer, 2)
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    handle.sleep(host=True)
    assert optimizer.held_bytes() <= small_bytes(optimizer)
    return model, optimizer, expected, handle


def has_state(optimizer: Any, expected: Any) -> bool:
    found = optimizer.state_dict()["state"]
    return found.keys() == expected.keys() and all(
        torch.equal(found[number][name], value) for number, state in expected.items() for name, value in state.items()
    )


@pytest.mark.parametrize("seen", ["state_dict", "copy", "pickle", "load", "saved", "after_remove", "cleared"])
def test_state_that_is_asked_for_while_it_sleeps(compute_device: torch.device, tmp_path: Path, seen: str) -> None:
    model, optimizer, expected, handle = asleep(compute_device, tmp_path)
    if seen == "copy":
        optimizer = copy.deepcopy(optimizer)
    elif seen == "pickle":
        optimizer = pickle.loads(pickle.dumps(optimizer))
    elif seen == "load":
        other = adamw(stack().parameters())
        other.load_state_dict(optimizer.state_dict())
        handle.sleep(host=True)
        optimizer.load_state_dict(other.state_dict())
    elif seen == "saved":
        headrace.save(tmp_path / "checkpoint", model, optimizer)
        handle.sleep(host=True)
        train(model, optimizer, 1)
        headrace.load(tmp_path / "checkpoint", model, optimizer)
        handle.sleep(host=True)
    elif seen == "after_remove":
        handle.remove()
    elif seen == "cleared":
        optimizer.state.clear()
        expected = {}
    assert has_state(optimizer, expected)


def test_an_entry_that_is_removed_while_it_sleeps(compute_device: torch.device, tmp_path: Path) -> None:
    """Its parameter begins anew, as with torch.optim, and one that has no state gets no entry."""
    model, optimizer, expected, handle = asleep(compute_device, tmp_path)
    handle.wake()
    shown = optimizer.state
    handle.sleep(host=True)
    shown.pop(next(model.parameters()))
    handle.wake()
    del expected[0]
    assert has_state(optimizer, expected)


def test_strides_that_change_while_it_sleeps(compute_device: torch.device, tmp_path: Path) -> None:
    """Each element keeps its own state, also if the state goes to sleep again in between."""
    model, optimizer, expected, handle = asleep(compute_device, tmp_path)
    for weight in filter(lambda weight: weight.dim() == 2, model.parameters()):
        weight.data = weight.data.t().contiguous().t()
    handle.wake()
    assert has_state(optimizer, expected)
    handle.sleep(host=True)
    for weight in model.parameters():
        weight.data = weight.data.contiguous()
    handle.sleep(host=True)
    assert has_state(optimizer, expected)


def _cycle(handle: headrace.Offloaded, optimizer: Any) -> None:
    handle.sleep(host=True)
    optimizer.step()  # without gradients: it wakes up


@pytest.mark.parametrize("error", [KeyboardInterrupt, headrace.DiskError], ids=["ctrl_c", "full"])
@pytest.mark.parametrize("during", ["keep", "fetch", "synchronize"])
def test_a_move_that_is_cut_short(
    compute_device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    during: str,
    error: type[BaseException],
) -> None:
    """Nothing is lost, whether it went to sleep or woke up, and later steps count."""
    plain, model = stack(), stack()
    own = adamw(plain.parameters())
    handle = offload(model, compute_device, tmp_path)
    optimizer = adamw(model.parameters())
    for each in ((plain, own), (model, optimizer)):
        train(*each, 2)
    calls: list[Any] = []
    move = getattr(DiskState, during)

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == (1 if during == "synchronize" else 5):
            raise error("as the test wants")
        return move(*args)

    with monkeypatch.context() as patch:
        patch.setattr(DiskState, during, fail)
        with pytest.raises(error):
            _cycle(handle, optimizer)
    expected = train(plain, own, 2)
    assert all(map(torch.equal, train(model, optimizer, 2), expected))
    handle.sleep(host=True)
    assert has_state(optimizer, own.state_dict()["state"])


def _note_bytes(seen: list[int], optimizer: Any, _step: int) -> None:
    seen.append(optimizer.held_bytes())


@pytest.mark.core(name=["adamw", "adafactor"])
@pytest.mark.parametrize("name", ["adamw", "8bit", "sgd_without_state", "adafactor"])
def test_a_shared_budget_counts_it(compute_device: torch.device, tmp_path: Path, name: str) -> None:
    """Blocks move to disk for it before the first step, so that all that is held never exceeds the budget."""
    plain, model = stack(16), stack(16)
    own = MAKES[name](plain.parameters())
    expected = train(plain, own, 3)
    make, wide = MAKES[name], name == "adamw"
    budget_bytes = 3 * weight_bytes(model) + (14 if wide else 4) * LAYER_BYTES
    with headrace.budget(device_memory=3 * LAYER_BYTES, host_memory=budget_bytes) as shared:
        handle = headrace.offload(model, device=compute_device, disk=tmp_path)
    assert handle.stats().disk_bytes == 0
    optimizer = make(model.parameters())
    reserved_bytes = handle._ledger.held_bytes(Tier.HOST, "optimizer states")
    steps_bytes = 4 * len(list(model.parameters()))  # of the numbers of steps
    seen: list[int] = []
    note = partial(_note_bytes, seen, optimizer)
    results = train(model, optimizer, 3, note)
    assert all(map(torch.equal, results, expected))
    assert shared.host_peak_bytes <= budget_bytes
    assert (handle.stats().disk_bytes > 0) == wide  # for gradients
    assert max(seen) - steps_bytes <= reserved_bytes
    assert (
        handle._ledger.held_bytes(Tier.HOST, "optimizer states") == seen[-1] - steps_bytes
        or name == "sgd_without_state"
    )
    handle.sleep(host=True)
    assert handle._ledger.held_bytes(Tier.HOST, "optimizer states") == max(0, optimizer.held_bytes() - steps_bytes)
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    assert handle._ledger.held_bytes(Tier.HOST, "optimizer states") >= optimizer.held_bytes() - steps_bytes
    assert all(map(torch.equal, train(model, optimizer, 1), train(plain, own, 1)))
    del optimizer, note
    gc.collect()
    assert handle._ledger.held_bytes(Tier.HOST, "optimizer states") == 0


def test_another_model_makes_room(compute_device: torch.device, tmp_path: Path) -> None:
    """Its blocks move to disk for the state, which stays when that model is called again."""
    first, second, plain = stack(16), stack(16), stack(16)
    expected = train(plain, adamw(plain.parameters()), 2)
    budget_bytes = 4 * weight_bytes(first) + 14 * LAYER_BYTES  # weights, gradients and moments of one
    with headrace.budget(device_memory=3 * LAYER_BYTES, host_memory=budget_bytes) as shared:
        other = headrace.offload(first.requires_grad_(False), device=compute_device, disk=tmp_path)
        handle = headrace.offload(second, device=compute_device)
    assert other.stats().disk_bytes == 0
    optimizer = adamw(second.parameters())
    assert all(map(torch.equal, train(second, optimizer, 2), expected))
    assert weight_bytes(first) / 2 < other.stats().disk_bytes
    assert shared.host_peak_bytes <= budget_bytes
    with torch.no_grad():
        assert torch.equal(first(BATCH).cpu(), stack(16)(BATCH))
    assert handle.stats().disk_bytes == 0


def test_there_is_no_room(compute_device: torch.device) -> None:
    model = stack()
    with headrace.budget(device_memory=3 * LAYER_BYTES, host_memory=2 * weight_bytes(model)):
        headrace.offload(model, device=compute_device)
    with pytest.raises(
        headrace.BudgetError,
        match=r'optimizer states need .* host_memory allows .*; raise it to .*, or give the optimizer tier="disk"',
    ):
        adamw(model.parameters())
