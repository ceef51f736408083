"""Does an update that runs beside passes give the same bits, and is it waited for wherever it must be?"""

import contextlib
import copy
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace import StateError
from headrace.optim import AdamW, norms
from headrace.optim.devices import Member
from headrace.optim.overlap import Updater
from headrace.optim.updates import Updates
from headrace.runtime.autograd import without_overrides
from headrace.runtime.holders import gradient_is_shared
from headrace.runtime.threads import Gate
from tests.support.compare import assert_same, same
from tests.support.held import weight_bytes
from tests.support.interrupts import interrupted_at
from tests.support.loops import loss_of
from tests.support.models import Decoder, linears

TOKENS = torch.arange(16).reshape(2, 8) % 32
SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def decoder(dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return Decoder().to(dtype)


def batch(step: int) -> torch.Tensor:
    return (TOKENS * (step + 1) + step) % 32


@contextlib.contextmanager
def offloaded(model: nn.Module) -> Iterator[headrace.Offloaded]:
    with headrace.offload(model, device="emu", device_memory=weight_bytes(model) // 2) as handle:
        yield handle


def train(model: nn.Module, optimizer: Any, steps: int, *, clip: float | None = None, micro_batches: int = 1) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        for part in range(micro_batches):
            loss_of(model, batch(step * micro_batches + part)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def slow(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> list[int]:
    """Updates take longer: by `seconds` of how many came before."""
    begun: list[int] = []
    perform = Updates._apply

    def slowly(self: Updates, members: Sequence[Member], scale: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            begun.append(len(begun))
            time.sleep(seconds(len(begun)))
        perform(self, members, scale)

    monkeypatch.setattr(Updates, "_apply", slowly)
    return begun


@pytest.mark.core(dtype=torch.bfloat16)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_equals_none(
    emu_device: ModuleType, clip: float | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = slow(monkeypatch, lambda count: 0.001 * (count % 4))
    trained = []
    for overlap in ("none", "forward"):
        model = decoder(dtype)
        with offloaded(model) as handle:
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            train(model, optimizer, 12, clip=clip)
            assert handle.stats().onload_bytes > weight_bytes(model)
        trained.append([*model.parameters(), *(value for s in optimizer.state.values() for value in s.values())])
    assert_same(*trained)
    assert len(begun) >= 12 * 7  # every block of every step, on a thread of its own
    assert emu_device.take_reports() == []


def test_accumulated_micro_batches(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, lambda count: 0.001)
    trained = []
    for overlap in ("none", "forward"):
        model = decoder()
        with offloaded(model):
            train(model, AdamW(model.parameters(), overlap=overlap, **SETTINGS), 4, micro_batches=3, clip=1.0)
        trained.append(list(model.parameters()))
    assert_same(*trained)


class Held:
    """Updates that do not begin before they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.waited = 0
        perform = Updates._apply

        def held(optimizer: Updates, members: Sequence[Member], scale: float) -> None:
            if not self.gate.is_set():
                self.waited += 1
                assert self.gate.wait(60)
            perform(optimizer, members, scale)

        monkeypatch.setattr(Updates, "_apply", held)

    def release_soon(self) -> None:
        threading.Timer(0.05, self.gate.set).start()


def test_stats_that_need_not_wait_for_updates(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    with offloaded(model) as handle:
        optimizer = AdamW(model.parameters(), overlap="forward", **SETTINGS)
        train(model, optimizer, 1)
        before = handle.stats()
        updates = Held(monkeypatch)
        loss_of(model, batch(1)).backward()
        optimizer.step()
        under_way = handle.stats(wait_for_updates=False)
        assert not updates.gate.is_set()
        assert under_way.steps == 2
        assert under_way.onload_bytes > before.onload_bytes
        assert under_way.compute_seconds > before.compute_seconds
        updates.release_soon()
        assert handle.stats().not_finite_steps == 0
        assert updates.gate.is_set()
        assert updates.waited > 0


LOOKS: dict[str, Callable[[Any, Any, Any], object]] = {
    "forward": lambda model, optimizer, handle: loss_of(model, TOKENS).item(),
    "evaluation": lambda model, optimizer, handle: torch.no_grad()(model)(TOKENS).cpu(),
    "state_dict": lambda model, optimizer, handle: {k: v.clone() for k, v in model.state_dict().items()},
    "parameters": lambda model, optimizer, handle: [p.detach().clone() for p in model.parameters()],
    "optimizer.state": lambda model, optimizer, handle: [s["exp_avg"].clone() for s in optimizer.state.values()],
    "optimizer.state_dict": lambda model, optimizer, handle: copy.deepcopy(optimizer.state_dict()),
    "handle.synchronize": lambda model, optimizer, handle: (handle.synchronize(), raw(model)),
    "optimizer.synchronize": lambda model, optimizer, handle: (optimizer.synchronize(), raw(model)),
    "handle.remove": lambda model, optimizer, handle: (handle.remove(), raw(model)),
    "deepcopy": lambda model, optimizer, handle: list(copy.deepcopy(model).parameters()),
    "held data": lambda model, optimizer, handle: [p.data.clone() for p in held(optimizer)],
    "held parameter": lambda model, optimizer, handle: [p.sum().item() for p in held(optimizer)],
    "held list": lambda model, optimizer, handle: torch._foreach_norm(held(optimizer)),
    "held gradient": lambda model, optimizer, handle: [p.grad.zero_() for p in held(optimizer)] and raw(model),
    "zero_grad": lambda model, optimizer, handle: (optimizer.zero_grad(set_to_none=False), raw(model)),
    "model.zero_grad": lambda model, optimizer, handle: (model.zero_grad(set_to_none=False), raw(model)),
    "step": lambda model, optimizer, handle: (optimizer.step(), optimizer.synchronize(), raw(model)),
}


def held(optimizer: Any) -> list[nn.Parameter]:
    """The Parameter objects, without asking the model for them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def raw(model: nn.Module) -> list[torch.Tensor]:
    """What lies in memory now, whoever is writing there."""
    with without_overrides():
        parts = [p for part in model.modules() for p in part._parameters.values() if p is not None]
        return [p.detach().clone() for p in parts]


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("look", list(LOOKS))
def test_whoever_looks_waits(emu_device: ModuleType, look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    held_back = None
    for overlap in ("none", "forward"):
        model = decoder()
        with offloaded(model) as handle:
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            train(model, optimizer, 2)
            loss_of(model, TOKENS).backward()
            if overlap == "forward":
                optimizer.synchronize()
                before = raw(model)
                held_back = Held(monkeypatch)
            optimizer.step()
            if held_back is not None:
                assert_same(raw(model), before)
                held_back.release_soon()
            seen.append(LOOKS[look](model, optimizer, handle))
    assert held_back is not None
    assert held_back.waited
    torch.testing.assert_close(*seen, rtol=0, atol=0)


def test_zero_grad_to_none_does_not_wait(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    with offloaded(model):
        optimizer = AdamW(model.parameters(), overlap="forward", **SETTINGS)
        loss_of(model, TOKENS).backward()
        held_back = Held(monkeypatch)
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        assert not held_back.gate.is_set()
        held_back.gate.set()


def test_gradient_memory_is_used_again(emu_device: ModuleType) -> None:
    model = decoder()
    with offloaded(model) as handle:
        optimizer = AdamW(model.parameters(), overlap="forward", **SETTINGS)
        train(model, optimizer, 2)
        before = handle.stats().host_bytes
        train(model, optimizer, 6)
        assert handle.stats().host_bytes == before


class BrokenError(RuntimeError):
    pass


def break_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    perform = Updates._apply
    count = iter(range(100))

    def failing(self: Updates, members: Sequence[Member], scale: float) -> None:
        if next(count) == 2:
            raise BrokenError("the third block")
        perform(self, members, scale)

    monkeypatch.setattr(Updates, "_apply", failing)


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("where", ["forward", "synchronize", "step"])
def test_a_failed_update_reaches_the_user_and_can_be_made_up_for(
    emu_device: ModuleType, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    for overlap in ("none", "forward"):
        model = decoder()
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            train(model, optimizer, 2)
            loss_of(model, TOKENS).backward()
            if overlap == "forward":
                with monkeypatch.context() as patch:
                    break_the_third(patch)
                    optimizer.step()
                    optimizer.zero_grad()
                    asks = {
                        "forward": lambda model=model: loss_of(model, TOKENS),
                        "step": optimizer.step,
                        "synchronize": optimizer.synchronize,
                    }
                    with pytest.raises(BrokenError):
                        asks[where]()
                    optimizer.synchronize()  # told once
            optimizer.step()  # what was not updated has its gradient still
            optimizer.zero_grad()
            train(model, optimizer, 2)
        trained.append(list(model.parameters()))
    assert_same(*trained)


def test_two_optimizers_on_one_model(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, lambda count: 0.001)
    trained = []
    for overlap in ("none", "forward"):
        model = decoder()
        with offloaded(model):
            matrices = [p for p in model.layers.parameters() if p.dim() == 2]
            others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
            optimizers = [
                headrace.optim.Muon(matrices, lr=0.01, overlap=overlap),
                AdamW(others, overlap=overlap, **SETTINGS),
            ]
            for step in range(6):
                loss_of(model, batch(step)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        trained.append(list(model.parameters()))
    assert_same(*trained)


def test_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the compute device is the CPU itself."""
    slow(monkeypatch, lambda count: 0.001)
    trained = []
    for overlap in ("none", "forward"):
        model = decoder()
        with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2):
            train(model, AdamW(model.parameters(), overlap=overlap, **SETTINGS), 6, clip=0.5)
        trained.append(list(model.parameters()))
    assert_same(*trained)


def test_weights_written_between_steps_refresh_the_master(emu_device: ModuleType) -> None:
    trained = []
    for overlap in ("none", "forward"):
        model = decoder(torch.bfloat16)
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)
            train(model, optimizer, 2)
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
            train(model, optimizer, 2)
        trained.append(list(model.parameters()))
    assert_same(*trained)


@pytest.mark.core(dtype=torch.bfloat16)
@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [False, True])
def test_norms_taken_while_gradients_come(
    emu_device: ModuleType, overlap: str, dtype: torch.dtype, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping inside equals clipping before; also when somebody changes gradients in between."""
    taken = 0
    norm = norms.foreach_norm

    def counted(tensors: Sequence[torch.Tensor], *arguments: Any) -> Any:
        nonlocal taken
        if threading.current_thread() is not threading.main_thread():
            taken += len(tensors)  # they are not kept: norms of what others have, too, do not count
        return norm(tensors, *arguments)

    monkeypatch.setattr(norms, "foreach_norm", counted)
    trained = []
    for inside in (True, False):
        model = decoder(dtype)
        with offloaded(model):
            optimizer = AdamW(model.parameters(), overlap=overlap, max_grad_norm=0.05 if inside else None, **SETTINGS)
            for step in range(7):
                for part in range(1 + step % 2):
                    loss_of(model, batch(step + part)).backward()
                if changes:
                    model.layers[1].up.weight.grad.mul_(3)
                if not inside:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        trained.append(list(model.parameters()))
    assert_same(*trained)
    assert taken > 4 * len(trained[0])


def test_norms_that_are_late_are_waited_for(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may be done long before the last norm: then each is taken once, and no gradient counts as another's."""
    norm, begin = norms.foreach_norm, AdamW._begin
    stepping, taken, shared = Gate(), [], []

    def late(tensors: Sequence[torch.Tensor]) -> Any:
        if late_now and threading.current_thread() is not threading.main_thread():
            stepping.wait()
            time.sleep(0.002)
        taken.extend(tensor.numel() for tensor in tensors)
        return norm(tensors)

    def beginning(optimizer: Any) -> Any:
        if late_now:
            stepping.open()
        return begin(optimizer)

    def is_shared(parameter: torch.Tensor) -> bool:
        shared.append(gradient_is_shared(parameter))
        return shared[-1]

    late_now = False
    monkeypatch.setattr(norms, "foreach_norm", late)
    monkeypatch.setattr(AdamW, "_begin", beginning)
    monkeypatch.setattr("headrace.optim.optimizer.gradient_is_shared", is_shared)
    model = decoder()
    with offloaded(model):
        optimizer = AdamW(model.parameters(), overlap="forward", max_grad_norm=0.05, **SETTINGS)
        for step in range(6):
            late_now = step == 5
            taken.clear()
            shared.clear()
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sorted(taken) == sorted(parameter.numel() for parameter in model.parameters())
    assert shared == [False] * len(taken)


@pytest.mark.emu("threads")
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_norms_after_a_grad_scaler(emu_device: ModuleType, overlap: str) -> None:
    """Its unscaling leaves no trace in gradients of itself, and the norms taken in backward are those from before."""
    trained = []
    for inside in (False, True):
        model = decoder()
        with offloaded(model):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            options: dict[str, Any] = {"overlap": overlap, "max_grad_norm": 0.5} if inside else {}
            optimizer = AdamW(model.parameters(), **options, **SETTINGS)
            for step in range(3):
                scaler.scale(loss_of(model, batch(step)).cpu()).backward()
                scaler.unscale_(optimizer)
                if not inside:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        trained.append(list(model.parameters()))
    assert_same(*trained)


@pytest.mark.emu("threads")
def test_settings_in_tensors_are_those_of_their_step(emu_device: ModuleType) -> None:
    trained = []
    for overlap in ("none", "forward"):
        model = decoder()
        with offloaded(model):
            beta, rate = torch.tensor(0.9), torch.tensor(0.01)
            optimizer = AdamW(model.parameters(), lr=rate, betas=(beta, torch.tensor(0.999)), overlap=overlap)
            for step in range(3):
                loss_of(model, batch(step)).backward()
                gate = threading.Event()
                optimizer._updates.updater.run(lambda gate=gate: gate.wait() and None)
                if overlap == "none":
                    gate.set()
                optimizer.step()
                optimizer.zero_grad()
                beta.mul_(0.8)
                rate.mul_(0.9)
                gate.set()
        trained.append(list(model.parameters()))
    assert_same(*trained)


@pytest.mark.core(every=31)
@pytest.mark.parametrize("every", [31, 7])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_ctrl_c_at_any_moment_of_a_step_is_told(overlap: str, every: int) -> None:
    """Weights and state are those of before the step, or those of after it; or the next step says that they are not."""
    model = linears(3, 16)
    with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2) as handle:
        optimizer = AdamW(model.parameters(), overlap=overlap, **SETTINGS)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(3, 16)).square().sum().backward()
            optimizer.step()

        def weights() -> list[torch.Tensor]:
            return [weight.clone() for weight in model.state_dict().values()]

        step()
        begin = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        wanted = []
        for _ in range(4):
            step()
            wanted.append(weights())
        moment, told, found = 1, [], []
        came = True
        while came:
            model.load_state_dict(begin[0])
            optimizer.load_state_dict(copy.deepcopy(begin[1]))
            step()  # the first one after a load updates nothing in backward
            came = interrupted_at(moment, step, str(Path(headrace.__file__).parent / "optim"))
            moment += every
            optimizer.synchronize()
            now = weights()
            found.append([all(map(same, now, those)) for those in wanted[:2]])
            try:
                step()
            except StateError as error:
                told.append(str(error))
            else:
                assert_same(weights(), wanted[found[-1].index(True) + 1])
        assert found[-1] == [False, True]
        assert [True, False] in found
        assert told
        assert all("parameters had been updated" in one or "parameters were updated already" in one for one in told)
        gc.collect()  # of the interrupts' frames
        handle.reset_stats()
        model(torch.ones(3, 16))
        stats = handle.stats()
        assert stats.onload_bytes > 0
        assert stats.device_peak_bytes <= stats.device_budget_bytes


def test_ctrl_c_just_after_an_update_began_in_backward_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = linears(3, 16)
    with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2):
        optimizer = AdamW(model.parameters(), overlap="backward", **SETTINGS)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(3, 16)).square().sum().backward()
            optimizer.step()

        for _ in range(4):
            step()
        run = Updater.run

        def interrupted(self: Updater, job: Callable[[], None], device: torch.device) -> None:
            monkeypatch.undo()
            run(self, job, device)
            raise KeyboardInterrupt

        monkeypatch.setattr(Updater, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step()
        with pytest.raises(StateError, match=r"a step was cut short .* 2 of 2 parameters had been updated"):
            step()


def steps_of_two(overlaps: Sequence[str], steps: int) -> list[nn.Parameter]:
    """AdamW and then SGD over all parameters of one model."""
    model = decoder(torch.bfloat16)
    with offloaded(model):
        optimizers = [
            AdamW(model.parameters(), overlap=overlaps[0], **SETTINGS),
            headrace.optim.SGD(model.parameters(), lr=0.1, overlap=overlaps[1]),
        ]
        for step in range(steps):
            loss_of(model, batch(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("second", ["none", "forward"])
@pytest.mark.parametrize("first", ["forward", "backward"])
def test_two_optimizers_of_the_same_parameters(
    emu_device: ModuleType, first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their updates come in the order of the calls, however long the first one's take."""
    slow(monkeypatch, lambda count: 0.002 * (count % 3))
    assert_same(steps_of_two((first, second), 5), steps_of_two(("none", "none"), 5))


@pytest.mark.parametrize("first", ["none", "forward", "backward"])
def test_an_update_in_backward_that_would_overtake_is_refused(emu_device: ModuleType, first: str) -> None:
    with pytest.raises(headrace.StateError, match=r"by another optimizer, .*; nothing was updated"):
        steps_of_two((first, "backward"), 2)
