"""Does the accelerator update state that rests in host memory or on disk, within its budget, with its own bits?"""

import contextlib
import copy
import itertools
import mmap
import threading
import time
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
import headrace.optim
from headrace.errors import BudgetError, StateError
from headrace.memory.arena import Arena
from headrace.memory.disk import StagingRing
from headrace.memory.ledger import Tier
from headrace.optim import Adafactor, AdamW, Muon, disk_state, on_device, states
from headrace.optim.on_device import DeviceUpdates, device_bytes
from tests.optim.references import RULES, give_gradients, parameters
from tests.optim.test_disk import opened
from tests.optim.test_in_files import TOKENS, loss_of, models
from tests.optim.test_offloaded import model, train
from tests.support.compare import assert_same
from tests.support.held import comes_true
from tests.support.models import linears

SHAPES = ((40, 30), (9,), (130, 70), (), (3, 40, 41), (65536 + 5,))
MATRICES = ((40, 30), (130, 70), (64, 64))
EXTRAS: dict[str, dict[str, Any]] = {"host": {}, "8bit": {"state_dtype": "8bit"}, "disk": {"tier": "disk"}}
PLAIN = ("host", "disk")  # rules for whole parameters have no state in 8 bits
BY_ELEMENT, WHOLE = ("adamw", "adamw_amsgrad", "sgd_nesterov", "lion"), ("adafactor", "muon")
BUDGET = 3 * 24 * 32 * 4


def on_emu(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(weight.detach().to("emu")) for weight in weights]


def stock_settings(name: str) -> tuple[Any, dict[str, Any]]:
    own, _, settings = RULES[name]
    return getattr(headrace.optim, own), {key: one for key, one in settings.items() if key not in ("fused", "foreach")}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes parameters come in many pieces."""
    monkeypatch.setattr(on_device, "_MOST_PIECE_BYTES", 1 << 16)


@pytest.mark.core(name="adamw", extra="host")
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "extra"), [*itertools.product(BY_ELEMENT, EXTRAS), *itertools.product(WHOLE, PLAIN)])
def test_a_plain_model_whose_state_rests_on_the_host(
    emu_device: ModuleType, name: str, dtype: torch.dtype, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as with the state on the accelerator; of the state, nothing is there after a step."""
    monkeypatch.setattr(states, "LEAST_BYTES", 1)
    kind, settings = stock_settings(name)
    host = parameters(dtype, MATRICES if name == "muon" else SHAPES)
    here, there = on_emu(host), on_emu(host)
    where = {"disk": tmp_path} if extra == "disk" else {}
    stores, _ = opened(monkeypatch)
    bits = {} if extra == "disk" else EXTRAS[extra]
    stays = kind(here, device_fraction=1.0, **bits, **settings)
    rests = kind(there, update="device", **EXTRAS[extra], **where, **settings)
    for step in range(5):
        give_gradients(here, host, step)
        for one, other in zip(here, there, strict=True):
            other.grad = one.grad.clone()
        stays.step()
        before = torch.accelerator.memory_allocated()
        rests.step()
        assert torch.accelerator.memory_allocated() <= before + 512 * len(there)  # a checksum of weights for each
        if step == 2:
            rests.load_state_dict(copy.deepcopy(rests.state_dict()))
        if step == 3:  # somebody writes weights
            with torch.no_grad():
                here[0].fill_(0.5)
                there[0].fill_(0.5)
    assert_same(there, here)
    assert (sum(store.nbytes for store in stores) > 0) == (extra == "disk")
    resting = [value for entries in rests.state.values() for value in entries.values() if torch.is_tensor(value)]
    assert {value.device.type for value in resting} == {"cpu"}
    for index, entries in stays.state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(rests.state_dict()["state"][index][key]))


@pytest.mark.core(overlap="forward")
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_model(
    emu_device: ModuleType, dtype: torch.dtype, overlap: str, tier: str, tmp_path: Path
) -> None:
    """The same bits as a plain model on the accelerator whose state stays there, and no byte over the budget."""
    plain = model(dtype).to("emu")
    train(plain, AdamW(plain.parameters(), lr=0.01, device_fraction=1.0), 6)
    net = model(dtype)
    given = {"disk": tmp_path} if tier == "disk" else {}
    budget = BUDGET + device_bytes(dict.fromkeys(net.parameters(), False))
    with headrace.offload(net, device="emu", device_memory=budget, blocks=list(net)) as handle:
        optimizer = AdamW(net.parameters(), lr=0.01, update="device", overlap=overlap, tier=tier, **given)
        train(net, optimizer, 6)
        optimizer.synchronize()
        assert handle.stats().device_peak_bytes <= budget
        assert handle.stats().onload_bytes > 0
    assert_same(net.parameters(), [one.detach().cpu() for one in plain.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_weights_on_disk(emu_device: ModuleType, clip: float | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights that are updated in their files come and go through the accelerator, as does what is clipped."""
    plain, net = models(dtype)
    plain.to("emu")
    settings = {"lr": 0.01, "max_grad_norm": clip}
    theirs = AdamW(plain.parameters(), device_fraction=1.0, **settings)
    budget = (160 << 10) + device_bytes(dict.fromkeys(net.parameters(), False))
    limits = {"device_memory": budget, "host_memory": "256KiB", "disk": tmp_path}
    with headrace.offload(net, device="emu", blocks=[net.layers], **limits) as handle:
        ours = AdamW(net.parameters(), update="device", **settings)
        for _ in range(4):
            for one, optimizer in ((plain, theirs), (net, ours)):
                optimizer.zero_grad()
                loss_of(one, TOKENS.to("emu")).backward()
                optimizer.step()
        assert handle.stats().spill_bytes > 0
        assert handle.stats().device_peak_bytes <= budget
        assert_same(net.parameters(), [one.detach().cpu() for one in plain.parameters()])


def test_muon_within_an_offloaded_model(emu_device: ModuleType) -> None:
    """A rule for whole matrices brings one at a time, whatever takes place beside it."""
    plain = model(torch.bfloat16).to("emu")
    train(plain, Muon(plain.named_parameters(), lr=0.01, device_fraction=1.0), 4)
    net = model(torch.bfloat16)
    budget = BUDGET + device_bytes({one: one.dim() == 2 for one in net.parameters()})
    with headrace.offload(net, device="emu", device_memory=budget, blocks=list(net)) as handle:
        train(net, Muon(net.parameters(), lr=0.01, update="device"), 4)
        assert handle.stats().device_peak_bytes <= budget
    assert_same(net.parameters(), [one.detach().cpu() for one in plain.parameters()])


def test_the_memory_for_updates_is_part_of_the_budget(emu_device: ModuleType) -> None:
    net = linears(4, 64)
    block = 64 * 65 * 4
    with headrace.offload(net, device="emu", device_memory=3 * block, blocks=list(net)) as handle:
        assert device_bytes(dict.fromkeys(net.parameters(), False)) > block
        with pytest.raises(BudgetError, match=r'update="device".*raise it by'):
            AdamW(net.parameters(), update="device")
        net(torch.randn(2, 64, device="emu")).sum().backward()
        assert handle.stats().device_peak_bytes > 2 * block  # nothing was taken from the budget


def test_the_memory_of_an_optimizer_that_is_gone_is_lent_again(emu_device: ModuleType) -> None:
    net = model(torch.float32)
    budget = BUDGET + device_bytes(dict.fromkeys(net.parameters(), False))
    with headrace.offload(net, device="emu", device_memory=budget, blocks=list(net)):
        for _ in range(5):
            train(net, AdamW(net.parameters(), lr=0.01, update="device"), 1)


@pytest.mark.emu("random:0", device_memory=8 << 20)
def test_memory_that_the_device_does_not_have_stays_in_the_budget(emu_device: ModuleType) -> None:
    net = model(torch.float32)
    needed = device_bytes(dict.fromkeys(net.parameters(), False))
    with headrace.offload(net, device="emu", device_memory=BUDGET + needed, blocks=list(net)):
        taken = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(needed // 2, dtype=torch.uint8, device="emu"))
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                AdamW(net.parameters(), update="device")
        taken.clear()
        train(net, AdamW(net.parameters(), lr=0.01, update="device"), 2)


def test_a_model_that_was_removed_takes_its_memory_back(emu_device: ModuleType) -> None:
    net = model(torch.float32)
    budget = BUDGET + device_bytes(dict.fromkeys(net.parameters(), False))
    before = torch.accelerator.memory_allocated()
    with headrace.offload(net, device="emu", device_memory=budget, blocks=list(net)):
        optimizer = AdamW(net.parameters(), lr=0.01, update="device")
        train(net, optimizer, 2)
        assert torch.accelerator.memory_allocated() > before
    assert comes_true(lambda: torch.accelerator.memory_allocated() == before)
    with pytest.raises(ValueError, match="all parameters are on the CPU"):
        optimizer.step()


def test_memory_that_cannot_be_locked_is_used_as_it_is(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is placed once, not in each step."""
    made = []

    class Refused(Arena):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.pinned = False
            made.append(self)

    monkeypatch.setattr(states, "Arena", Refused)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    weight = nn.Parameter(torch.ones(300, device="emu"))
    optimizer = AdamW([weight], update="device")
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert len(made) == 1


def test_an_accelerator_is_needed() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = AdamW([weight], update="device")
    weight.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r'update="device".*leave update at "host"'):
        optimizer.step()
    with pytest.raises(ValueError, match="leave one of the two out"):
        AdamW([weight], update="device", device_fraction=0.5)


def test_gradients_that_are_not_finite_are_counted(emu_device: ModuleType) -> None:
    for kind in (AdamW, Muon):
        weights = [nn.Parameter(torch.ones(16, 40, device="emu")) for _ in range(2)]
        optimizer = kind(weights, update="device")
        for step in range(5):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            if step in (1, 3):
                weights[step // 2].grad[3, 7] = torch.nan if step == 1 else torch.inf
            optimizer.step()
        assert optimizer.not_finite_steps == 2


def test_an_interrupt_within_it_leaves_nothing_under_way(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step says that it is torn; what was submitted has ended by then."""
    monkeypatch.setattr(on_device, "_MOST_PIECE_BYTES", 1 << 12)
    weight = nn.Parameter(torch.ones(1 << 14, device="emu"))
    optimizer = AdamW([weight], update="device")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    submit, calls = DeviceUpdates._submit, []

    def interrupted(self: DeviceUpdates, piece: Any) -> None:
        calls.append(piece)
        if len(calls) == 5:
            raise KeyboardInterrupt
        submit(self, piece)

    monkeypatch.setattr(DeviceUpdates, "_submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.accelerator.current_stream().query()
    with pytest.raises(headrace.StateError, match="1 of 1 parameters had been updated"):
        optimizer.step()


@pytest.mark.parametrize("kind", [AdamW, Adafactor, Muon])
def test_tensors_with_gaps_between_their_elements(emu_device: ModuleType, kind: Any) -> None:
    """They are made dense by kernels, which the update waits for; on the host, state is made dense too."""
    host = parameters(torch.float32, MATRICES)
    here, there = (
        [nn.Parameter(torch.stack([one, one], -1)[..., 0].detach()) for one in on_emu(host)] for _ in range(2)
    )
    stays, rests = kind(here, device_fraction=1.0), kind(there, update="device")
    for step in range(4):
        give_gradients(here, host, step)
        for one, other in zip(here, there, strict=True):
            one.grad = torch.stack([one.grad, one.grad], -1)[..., 0]
            other.grad = torch.stack([one.grad, one.grad], -1)[..., 0]
        stays.step()
        rests.step()
        for entries in rests.state.values() if step == 2 else ():
            for key in ("momentum_buffer", "exp_avg", "row_var"):
                if key in entries:
                    entries[key] = torch.stack([entries[key], entries[key]], -1)[..., 0]
    assert_same(there, here)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_two_parameters_in_the_same_memory(emu_device: ModuleType, kind: Any) -> None:
    """One arrives when the other has left; as if the host updated them."""
    trained = []
    for update in ("device", "host"):
        net = model(torch.float32)
        net[1].weight = nn.Parameter(net[0].weight.detach())
        with headrace.offload(net, device="emu", device_memory="1MiB", blocks=[net]):
            train(net, kind(net.parameters(), lr=0.01, update=update), 3)
        trained.append(list(net.parameters()))
    assert_same(*trained)


def test_parameters_that_come_while_an_update_is_under_way(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that the update takes is given back before more is asked for."""
    net = linears(4, 64)
    biases, weights = [layer.bias for layer in net], [layer.weight for layer in net]
    few, all_bytes = device_bytes(dict.fromkeys(biases, False)), device_bytes(dict.fromkeys(weights, False))
    run, begun = DeviceUpdates.run, threading.Event()

    def slowly(*arguments: Any) -> None:
        begun.set()
        time.sleep(0.1)
        run(*arguments)

    monkeypatch.setattr(DeviceUpdates, "run", slowly)
    with headrace.offload(net, device="emu", device_memory=64 * 68 * 4 + all_bytes + few // 2, blocks=list(net)):
        optimizer = AdamW(biases, update="device", overlap="forward")
        net(torch.randn(2, 64, device="emu")).sum().backward()
        optimizer.step()
        begun.wait()
        optimizer.add_param_group({"params": weights})
        optimizer.step()
        optimizer.synchronize()
    assert all(len(optimizer.state[one]) > 0 for one in weights)


@pytest.mark.parametrize("shape", [(5000, 1, 1), (1, 5000)])
def test_matrices_of_one_row_or_column_have_room(emu_device: ModuleType, shape: tuple[int, ...]) -> None:
    """Each of their two factors is as large as a moment."""
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float16))
    layer = nn.Module()
    layer.weight = weight
    layer.forward = lambda inputs: inputs * layer.weight.sum()
    net = nn.Sequential(layer)
    with headrace.offload(net, device="emu", device_memory="1MiB", blocks=list(net)):
        optimizer = Adafactor([weight], update="device")
        for _ in range(2):
            net(torch.ones(1, dtype=torch.float16, device="emu")).sum().backward()
            optimizer.step()


def test_the_state_of_a_parameter_is_locked_at_once(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has only so many mappings of memory, and models of experts have many parameters."""
    made = []

    class Noted(Arena):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self.nbytes)

    monkeypatch.setattr(states, "Arena", Noted)
    weights = [nn.Parameter(torch.ones(64, device="emu", dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = AdamW(weights, update="device")
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert made == [mmap.PAGESIZE] * 3


def test_a_loaded_state_is_held_once(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor goes as soon as it is copied to page-locked memory, not when all parameters are updated."""
    weights = [nn.Parameter(torch.ones(64, device="emu")) for _ in range(3)]
    optimizer = AdamW(weights, update="device")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    loaded = [weakref.ref(entries[name]) for entries in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(loaded) == 6
    perform, alive = DeviceUpdates.perform, []

    def note_alive(self: DeviceUpdates, *arguments: Any) -> None:
        alive.append(sum(one() is not None for one in loaded))
        perform(self, *arguments)

    monkeypatch.setattr(DeviceUpdates, "perform", note_alive)
    optimizer.step()
    assert alive == [0]


def test_a_step_that_fails_leaves_a_loaded_state_as_it_is(
    emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step keeps it in another dtype."""
    weight = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16, device="emu"))
    weight.grad = torch.linspace(0.1, 0.9, 5000).to("emu", torch.bfloat16)
    theirs = AdamW([weight], state_dtype="8bit", update="device")
    theirs.step()
    optimizer = AdamW([weight], state_dtype=torch.bfloat16, update="device")
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    before = copy.deepcopy(optimizer.state_dict()["state"][0])
    assert before["exp_avg"].dtype == torch.float32

    def fail(*_: Any) -> None:
        raise StateError("as the test wants it")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceUpdates, "perform", fail)
        with pytest.raises(StateError, match="as the test wants it"):
            optimizer.step()
    after = optimizer.state_dict()["state"][0]
    assert before.keys() == after.keys()
    assert_same(list(before.values()), list(after.values()))
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].dtype == torch.bfloat16


def test_state_on_disk_passes_through_one_ring(
    emu_device: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is page-locked once, also when two accelerators update state in turn."""
    made = []

    class Noted(StagingRing):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(arguments)

    monkeypatch.setattr(disk_state, "StagingRing", Noted)
    state = disk_state.DiskState(tmp_path)
    for device in ("emu:1", "emu:0", "emu:1"):
        state.lock_for(torch.device(device))
    assert [device.type for _, _, device, _ in made] == ["cpu", "emu"]
    ledger = made[0][3]
    assert ledger.peak_bytes(Tier.HOST) == ledger.held_bytes(Tier.HOST) > 0  # one goes before the other is made


def test_an_error_before_anything_is_written(emu_device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised as it is, and the next step goes on."""
    weight = nn.Parameter(torch.ones(300, device="emu"))
    optimizer = AdamW([weight], update="device")
    weight.grad = torch.ones_like(weight)

    def refuse(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(DeviceUpdates, "_placed", refuse)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    assert (weight < 1).all()
