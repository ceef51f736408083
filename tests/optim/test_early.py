"""Do updates that begin in backward give the same bits, and is the mode refused where it could not?"""

import copy
import gc
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.errors import StateError
from headrace.optim import Adafactor, AdamW, update
from headrace.optim.early import EarlyUpdates
from headrace.optim.update import Update
from headrace.runtime.autograd import without_overrides
from headrace.runtime.pending import Pending
from tests.optim.test_overlap import SETTINGS, BrokenError, batch, decoder, offloaded, raw, slow, train
from tests.support.compare import assert_same
from tests.support.held import weight_bytes
from tests.support.loops import loss_of


class InBackward:
    """Counts updates that were begun while backward ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        complete = EarlyUpdates.complete

        def counted(updates: EarlyUpdates, unit: Any, gradients: Any, arrived: Callable[[], None]) -> Sequence[Any]:
            begun = complete(updates, unit, gradients, arrived)
            self.count += len(begun)
            return begun

        monkeypatch.setattr(EarlyUpdates, "complete", counted)


@pytest.mark.core(dtype=torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("to_none", [True, False])
def test_backward_equals_none(
    emu_device: ModuleType, dtype: torch.dtype, to_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_backward = InBackward(monkeypatch)
    slow(monkeypatch, lambda count: 0.001 * (count % 4))
    trained = []
    for overlap in ("none", "backward"):
        model = decoder(dtype)
        with offloaded(model) as handle:
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            for step in range(10):
                loss_of(model, batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            assert handle.stats().onload_bytes > weight_bytes(model)
        trained.append([*model.parameters(), *(value for s in optimizer.state.values() for value in s.values())])
    assert_same(*trained)
    assert in_backward.count == len(list(model.parameters())) * 7  # all, from the fourth step on
    assert emu_device.take_reports() == []


def test_updates_that_are_over_are_not_kept() -> None:
    """Nobody waits for all of them where each begins in a backward: what is asked of them takes as long in any step."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with headrace.offload(model, device="cpu", device_memory="1MiB", blocks=list(model)):
        optimizer = AdamW(model.parameters(), overlap="backward")
        for _ in range(20):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        kept = [one for one in gc.get_objects() if type(one) is Pending]
        assert len(kept) <= 2 * len(model)


def test_with_a_schedule_and_checkpoints(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    in_backward = InBackward(monkeypatch)
    trained = []
    for overlap in ("none", "backward"):
        model = decoder()
        model.layers[1].requires_grad_(False)
        for index, layer in enumerate(model.layers):
            if index % 2 == 0:
                forward = layer.forward
                layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        with offloaded(model):
            train(model, AdamW(model.parameters(), overlap=overlap, **SETTINGS), 8)
        trained.append(list(model.parameters()))
    assert_same(*trained)
    assert in_backward.count


def test_parameters_that_get_gradients_only_now_and_then(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_backward = InBackward(monkeypatch)
    trained = []
    for overlap in ("none", "backward"):
        model = decoder()
        layers = model.layers
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            for step in range(16):
                model.layers = layers if step % 5 < 4 else nn.ModuleList(layers[:3])
                loss_of(model, batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            model.layers = layers
        trained.append(list(model.parameters()))
    assert_same(*trained)
    assert in_backward.count


def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, batch(step)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


def scaled(model: nn.Module, optimizer: Any, step: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, batch(step))).backward()
    scaler.step(optimizer)


def accumulated(model: nn.Module, optimizer: Any, step: int) -> None:
    for part in range(2):
        loss_of(model, batch(2 * step + part)).backward()
    optimizer.step()


def late_rate(model: nn.Module, optimizer: Any, step: int) -> None:
    loss_of(model, batch(step)).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


LOOPS = {
    "clipping": (clipped, "gradients were changed after backward"),
    "GradScaler": (scaled, "gradients were changed after backward"),
    "accumulation": (accumulated, r"ran again before step\(\)"),
    "lr before step": (late_rate, "settings of param groups"),
}


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("loop", list(LOOPS))
def test_refused_before_anything_is_updated_wrongly(emu_device: ModuleType, loop: str) -> None:
    one_step, reason = LOOPS[loop]
    trained = []
    for overlap in ("none", "backward"):
        model = decoder()
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            one_step(model, optimizer, 0)  # none of it was in backward: right, whatever the loop does
            optimizer.zero_grad()
            if overlap == "backward":
                optimizer.synchronize()
                before = raw(model)
                with pytest.raises(StateError, match=f"{reason}.*nothing was updated.*forward"):
                    one_step(model, optimizer, 1)
                assert_same(raw(model), before)
        trained.append(list(model.parameters()) if overlap == "none" else before)
    assert_same(*trained)


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("loop", list(LOOPS))
def test_refused_later_too(emu_device: ModuleType, loop: str) -> None:
    """A loop that changes its ways is told so, once."""
    one_step, reason = LOOPS[loop]
    model = decoder()
    with offloaded(model):
        optimizer = AdamW(model.parameters(), overlap="backward", **SETTINGS)
        train(model, optimizer, 5)
        with pytest.raises(StateError, match=f"{reason}.*were updated already"):
            one_step(model, optimizer, 6)
        optimizer.zero_grad()
        train(model, optimizer, 5)


def test_a_failed_update_reaches_the_user(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    with offloaded(model):
        optimizer = AdamW(model.parameters(), overlap="backward", **SETTINGS)
        train(model, optimizer, 5)
        optimizer.synchronize()
        perform = update.perform
        count = iter(range(100))

        def failing(updates: Sequence[Update], scale: float) -> None:
            if next(count) == 2:
                raise BrokenError("the third block")
            perform(updates, scale)

        monkeypatch.setattr(update, "perform", failing)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        with without_overrides():  # look without waiting
            gradients = sum(parameter.grad is not None for parameter in optimizer.entries)
        assert gradients == len(optimizer.entries)  # though one update has failed by now, or will
        optimizer.zero_grad()
        with pytest.raises(BrokenError):
            optimizer.synchronize()
        train(model, optimizer, 2)


def test_a_state_loaded_after_a_backward_begins_anew(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that backward updated, the load undoes; a step with its gradients is refused, a new backward is not."""
    in_backward = InBackward(monkeypatch)
    model, expected = decoder(), decoder()
    with offloaded(model), offloaded(expected):
        optimizer, reference = (AdamW(m.parameters(), overlap="backward", **SETTINGS) for m in (model, expected))
        train(model, optimizer, 5)
        train(expected, reference, 5)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        loss_of(model, batch(5)).backward()
        assert in_backward.count
        for _ in range(2):
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            with pytest.raises(StateError, match="loaded between backward and step"):
                optimizer.step()
            optimizer.zero_grad()
            loss_of(model, batch(5)).backward()
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)
            optimizer.zero_grad()
            train(model, optimizer, 5)
            train(expected, reference, 5)
            assert_same(list(model.parameters()), list(expected.parameters()))
            weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
            loss_of(model, batch(5)).backward()


@pytest.mark.parametrize("kind", [AdamW, Adafactor])  # of which one tells of writes while they happen
@pytest.mark.parametrize("clears", [True, False])
def test_a_state_loaded_without_the_weights_that_backward_updated_is_refused(
    emu_device: ModuleType, clears: bool, kind: Any
) -> None:
    model = decoder()
    with offloaded(model):
        optimizer = kind(model.parameters(), overlap="backward", lr=0.01)
        train(model, optimizer, 3)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        first, one = next(iter(model.named_parameters()))
        loss_of(model, batch(3)).backward()
        optimizer.load_state_dict(state)
        updated = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, weights[name])]
        assert len(updated) > 1
        with torch.no_grad():
            one.copy_(weights[first])  # one of them is not enough
        if clears:
            optimizer.zero_grad()
        with pytest.raises(StateError, match=rf"but not the weights of {len(updated) - (first in updated)} parameters"):
            loss_of(model, batch(3)).backward()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        train(model, optimizer, 2)


@pytest.mark.parametrize("hooks", ["input", "late", "parameter"])
def test_a_backward_that_raised_after_updates_is_not_passed_over(emu_device: ModuleType, hooks: str) -> None:
    """A plain run would leave out its step; here most of it was done. Whoever loads what was before goes on."""
    model, fails = decoder(), [False]

    def fail(_: Any) -> None:
        if fails[0]:
            raise BrokenError

    with offloaded(model):
        optimizer = AdamW(model.parameters(), overlap="backward", **SETTINGS)
        watched = model.head.bias if hasattr(model.head, "bias") and model.head.bias is not None else model.head.weight
        if hooks == "late":
            watched.register_post_accumulate_grad_hook(fail)
        elif hooks == "parameter":
            watched.register_hook(fail)
        else:
            model.embedding.register_forward_hook(lambda _module, _inputs, output: output.register_hook(fail) and None)
        train(model, optimizer, 5)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        fails[0] = True
        with pytest.raises(BrokenError):
            loss_of(model, batch(5)).backward()
        fails[0] = False
        assert any(not torch.equal(p, weights[name]) for name, p in model.named_parameters())
        optimizer.zero_grad()
        with pytest.raises(StateError, match=r"(a backward raised|backward ran again).* were updated already"):
            loss_of(model, batch(5)).backward()
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        train(model, optimizer, 3)


def test_a_loss_term_on_parameters_is_in_their_update(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients get more than the model's part: no update begins before backward has ended."""
    in_backward, trained = InBackward(monkeypatch), []
    for overlap in ("none", "backward"):
        model = decoder()
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            for step in range(8):
                penalty = sum(p.pow(2).sum() for p in model.head.parameters())
                (loss_of(model, batch(step)).cpu() + penalty).backward()
                optimizer.step()
                optimizer.zero_grad()
        trained.append(list(model.parameters()))
    assert_same(*trained)
    assert 0 < in_backward.count < len(list(model.parameters())) * 5


@pytest.mark.parametrize("watches", [True, False])
def test_hooks_that_take_gradients(emu_device: ModuleType, watches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may: the optimizer has none for these parameters, and updates those of other blocks in backward."""

    def take(parameter: nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.01)
        parameter.grad = None

    in_backward = InBackward(monkeypatch)
    trained = []
    for overlap in ("none", "backward"):
        model = decoder()
        for parameter in model.layers[1].parameters():
            parameter.register_post_accumulate_grad_hook(take)
            if watches:
                parameter.register_hook(lambda gradient: gradient * 0.5)
        with offloaded(model):
            train(model, AdamW(model.parameters(), overlap=overlap, **SETTINGS), 8)
        trained.append(list(model.parameters()))
    assert_same(*trained)
    assert in_backward.count


def test_clipping_inside_is_refused() -> None:
    with pytest.raises(ValueError, match='overlap="backward" updates weights before the norm'):
        AdamW([nn.Parameter(torch.zeros(3))], overlap="backward", max_grad_norm=1.0)


def test_plain_parameters_step_as_ever() -> None:
    """Without an offloaded model there is nothing to run beside."""
    ours, theirs = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer, other = AdamW([ours], overlap="backward"), AdamW([theirs])
    for _ in range(3):
        ours.grad, theirs.grad = torch.ones(5), torch.ones(5)
        optimizer.step()
        other.step()
    assert torch.equal(ours, theirs)


@pytest.mark.emu("threads")
def test_a_dropped_optimizer_updates_nothing(emu_device: ModuleType) -> None:
    trained = []
    gc.disable()  # it is gone at once, and not when the collector finds it
    try:
        for overlap in ("none", "backward"):
            model = decoder()
            with offloaded(model):
                for _ in range(2):
                    optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
                    train(model, optimizer, 4)
                    del optimizer
                loss_of(model, batch(9)).backward()
            trained.append(list(model.parameters()))
    finally:
        gc.enable()
    assert_same(*trained)
