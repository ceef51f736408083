"""Do bfloat16 weights without masters train by stochastic rounding: without bias, and with the same bits everywhere?"""

import copy
import io
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import headrace
import headrace.optim
from headrace.optim import AdamW, disk_state, kernel, narrow, on_device, states, threads, update
from headrace.optim.kernel import Master
from tests.optim.references import RULES, copies, give_gradients, parameters
from tests.optim.test_disk import opened
from tests.optim.test_in_files import BUDGETS, TOKENS, loss_of, models
from tests.optim.test_offloaded import model, train
from tests.support.compare import assert_same

SHAPES = ((37, 13), (), (65536 + 5,), (3, 40, 41), (0,))
MATRICES = ((37, 13), (64, 64), (90, 70))
NAMES = ["adamw", "adam", "sgd", "sgd_momentum", "lion", "adafactor", "muon"]
KEPT = ("master", "master_remainder")


def make(name: str, weights: Any, **options: Any) -> Any:
    own, _, settings = RULES[name]
    common = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    return getattr(headrace.optim, own)(weights, **{"master_form": "none", **options}, **common)


def weights_of(name: str) -> list[nn.Parameter]:
    shapes = MATRICES if name == "muon" else [one for one in SHAPES if one != (0,) or name != "adafactor"]
    return parameters(torch.bfloat16, shapes)


def shown(optimizer: Any) -> list[torch.Tensor]:
    return [torch.as_tensor(one) for entries in optimizer.state.values() for _, one in sorted(entries.items())]


def special(count: int, generator: torch.Generator) -> torch.Tensor:
    """bfloat16 weights of all magnitudes; NaN, infinity and the largest finite value among them."""
    weight = torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator).short().view(torch.bfloat16)
    weight[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0])
    weight[6:9] = torch.tensor([0x7F7F, -0x81, 1], dtype=torch.int16).view(torch.bfloat16)
    return weight


@pytest.mark.core(name=["adamw", "sgd", "lion"], gradients=torch.bfloat16)
@pytest.mark.parametrize("name", ["adamw", "adam_decay", "sgd", "sgd_nesterov", "lion"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"])
@pytest.mark.parametrize(("gradients", "scale"), [(torch.float32, 1.0), (torch.bfloat16, 0.37)])
def test_kernel_equals_its_replacement(name: str, state_dtype: Any, gradients: torch.dtype, scale: float) -> None:
    if not kernel.available():
        pytest.skip("the native kernel was not built")
    results = []
    for native in (True, False):
        generator = torch.Generator().manual_seed(3)
        count = 70_003
        weight = nn.Parameter(special(count, generator))
        optimizer = make(name, [weight], state_dtype=state_dtype)
        master = optimizer._master_of(weight)
        rule = optimizer._rule(optimizer.param_groups[0], 3.0)
        columns = ("first", "second", "maximum")
        made = [master.zeros(dtype) for dtype in optimizer._states.dtypes(rule, master).values()]
        item = update.Update(
            rule=rule,
            weight=weight.detach(),
            gradient=torch.randn(count, generator=generator).to(gradients),
            form=master.form,
            stream=5,
            place=1000,
            offset=(1 << 32) - 5000,  # places wrap around
            **dict(zip(columns[: len(rule.moments)] + columns[2:] * bool(rule.maximum), made, strict=True)),
        )
        update.perform([item], scale, native=native)
        results.append([one.nan_to_num() if one.is_floating_point() else one for one in item.columns.values()])
        assert master.form is Master.NONE
    assert_same(*results)


def test_vector_levels_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """With arithmetic that is exact on all of them: in loops of their own (AdamW), and in stages (SGD)."""
    library = kernel.native_library()
    if library is None:
        pytest.skip("the native kernel was not built")
    found = []
    for level in range(library.headrace_optim_best_level() + 1):
        monkeypatch.setattr(kernel, "level", lambda level=level: level)
        for kind, settings in (
            (AdamW, {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}),
            (headrace.optim.SGD, {}),
        ):
            weight = nn.Parameter(torch.ones(70_003, dtype=torch.bfloat16))
            optimizer = kind([weight], lr=2.0**-10, master_form="none", **settings)
            for _ in range(3):
                weight.grad = torch.ones_like(weight)
                optimizer.step()
            found.append(weight.detach())
    assert len(set(found[0].tolist())) > 3
    for one in found[1:]:
        assert torch.equal(one, found[0])


def test_what_is_not_finite_stays_so() -> None:
    """A NaN does not become infinite, and infinity stays. Beyond the largest finite value there is infinity alone."""
    weight = nn.Parameter(torch.tensor([1.0, torch.inf, -torch.inf, 1.0, 3.3895e38], dtype=torch.bfloat16))
    optimizer = headrace.optim.SGD([weight], lr=1.0, master_form="none")
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight.tolist() == [1.0, torch.inf, -torch.inf, 1.0, weight[4].item()]
    assert weight[4].isfinite()
    weight.grad = torch.tensor([torch.nan, 0.0, 0.0, torch.inf, -1e38], dtype=torch.bfloat16)
    optimizer.step()
    assert weight[0].isnan()
    assert weight[1:].tolist() == [torch.inf, -torch.inf, -torch.inf, torch.inf]
    assert optimizer.not_finite_steps == 1


@pytest.mark.parametrize("share", [0.125, 0.5, 0.9375])
def test_rounding_has_no_bias(share: float) -> None:
    """Up with the probability of the place between two neighbours; elements, steps and parameters are independent."""
    count, steps = 1 << 14, 8
    weights = [nn.Parameter(torch.ones(count, dtype=torch.bfloat16)) for _ in "ab"]
    optimizer = headrace.optim.SGD(weights, lr=2.0**-7, master_form="none")
    ups = []
    for _ in range(steps):
        for weight in weights:
            weight.data.fill_(1.0)
            weight.grad = torch.full_like(weight, -share)
        optimizer.step()
        ups += [((weight.detach().double() - 1) * 2**7) for weight in weights]
    all_ups = torch.cat(ups)
    assert set(all_ups.tolist()) == {0.0, 1.0}
    deviation = (share * (1 - share)) ** 0.5
    assert abs(all_ups.mean().item() - share) < 5 * deviation / len(all_ups) ** 0.5
    normal = (torch.stack(ups) - share) / deviation
    for other in (normal.roll(1, 1), normal.roll(8, 1), normal.roll(1, 0), normal.roll(2, 0)):
        assert abs((normal * other).mean().item()) < 5 / normal.numel() ** 0.5


def test_matrices_are_rounded_differently_at_each_step() -> None:
    """A decay to the middle between two neighbours, of two parameters."""
    weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in "ab"]
    optimizer = headrace.optim.Muon(weights, lr=2.0**-9, weight_decay=1.0, master_form="none")
    found = set()
    for _ in range(3):
        for weight in weights:
            weight.data.fill_(1.0)
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        found |= {tuple((weight.detach() < 1).flatten().tolist()) for weight in weights}
    assert len(found) == 6
    assert all(0.4 < sum(one) / len(one) < 0.6 for one in found)


def test_small_updates_are_not_lost() -> None:
    """A decay that rounding to nearest would lose in each step is there on average."""
    weight = nn.Parameter(torch.ones(1 << 14, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=1e-4, weight_decay=1.0, master_form="none")
    for _ in range(100):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert weight.double().mean().item() == pytest.approx((1 - 1e-4) ** 100, abs=5 * 2.0**-8 / 2**7)


@pytest.mark.core(name=["adamw", "sgd", "adafactor", "muon"], native=True)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("native", [True, False])
def test_threads_tiers_and_resuming_change_nothing(
    name: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers depend on nothing but the step, the parameter and the element's place."""
    if not native:
        monkeypatch.setattr(kernel, "native_library", lambda: None)
        monkeypatch.setattr(kernel, "warn_if_missing", lambda: None)
    monkeypatch.setattr(disk_state, "STAGED_ELEMENTS", 1 << 15)
    monkeypatch.setattr(states, "LEAST_BYTES", 1)
    here, there = weights_of(name), weights_of(name)
    one, other = make(name, here), make(name, there, tier="disk", disk=tmp_path)
    for step in range(4):
        give_gradients(here, there, step)
        with threads.limited_to(1):
            one.step()
        with threads.limited_to(3), monkeypatch.context() as patch:
            patch.setattr(narrow, "_AT_ONCE", 1000)
            other.step()
        assert all(set(entries).isdisjoint(KEPT) for entries in one.state.values())
        if step == 1:
            saved = io.BytesIO()
            torch.save(other.state_dict(), saved)
            saved.seek(0)
            other = make(name, there, tier="disk", disk=tmp_path)
            other.load_state_dict(torch.load(saved, weights_only=True))
    assert_same(here, there)
    assert_same(shown(one), shown(other))
    assert {float(entries["step"]) for entries in one.state.values()} == {4.0}
    assert not torch.equal(here[0], weights_of(name)[0])


@pytest.mark.emu("random:0")
@pytest.mark.core(name="adamw", extra="host")
@pytest.mark.parametrize(
    ("name", "extra"), [*itertools.product(("adamw", "lion"), ("host", "disk", "8bit")), ("muon", "host")]
)
def test_the_accelerator_rounds_as_the_host(
    emu_device: ModuleType, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State that stays there, in part or as a whole, and state that comes to it in pieces: one and the same bits."""
    monkeypatch.setattr(on_device, "_MOST_PIECE_BYTES", 1 << 16)
    given = {"host": {}, "disk": {"tier": "disk", "disk": tmp_path}, "8bit": {"state_dtype": "8bit"}}[extra]
    bits = given if extra == "8bit" else {}
    ways: list[dict[str, Any]] = [{"device_fraction": 1.0, **bits}, {"update": "device", **given}]
    results = []
    for options in ways:
        host = parameters(torch.bfloat16, MATRICES[:2] if name == "muon" else SHAPES[:4])
        weights = [nn.Parameter(one.detach().to("emu")) for one in host]
        optimizer = make(name, weights, **options)
        for step in range(3):
            give_gradients(weights, host, step)
            before = torch.accelerator.memory_allocated()
            optimizer.step()
            if "update" in options:
                assert torch.accelerator.memory_allocated() <= before  # there is no checksum either
        results.append(weights)
    assert_same(*results)


@pytest.mark.emu("random:0")
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_weights_on_an_accelerator_are_those_on_the_host(emu_device: ModuleType, share: float) -> None:
    host = parameters(torch.bfloat16, ((64, 64), (40, 30)))
    there = [nn.Parameter(one.detach().to("emu")) for one in host]
    optimizers = make("sgd", host), make("sgd", there, device_fraction=share)
    for step in range(3):
        give_gradients(there, host, step)
        for optimizer in optimizers:
            optimizer.step()
    assert_same([one.detach().cpu() for one in there], host)


@pytest.mark.core(overlap="forward")
@pytest.mark.emu("random:0")
@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_an_offloaded_model(emu_device: ModuleType, overlap: str, tmp_path: Path) -> None:
    """As a plain one, with state on disk."""
    plain, net = (model(torch.bfloat16) for _ in "ab")
    with headrace.offload(net, device="emu", device_memory="1MiB", blocks=list(net)):
        optimizer = AdamW(net.parameters(), lr=0.01, master_form="none", overlap=overlap, tier="disk", disk=tmp_path)
        train(net, optimizer, 4)
        optimizer.synchronize()
    with headrace.offload(plain, device="emu", device_memory="1MiB", blocks=list(plain)):
        train(plain, AdamW(plain.parameters(), lr=0.01, master_form="none"), 4)
    assert_same(net.parameters(), plain.parameters())


def test_weights_on_disk_are_updated_in_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_state, "STAGED_ELEMENTS", 1 << 12)
    plain, net = models(torch.bfloat16)
    limits = {**BUDGETS, "disk": tmp_path}
    with headrace.offload(net, device="cpu", blocks=[net.layers], **limits):
        ours = AdamW(net.parameters(), lr=0.01, master_form="none", tier="disk", disk=tmp_path)
        theirs = AdamW(plain.parameters(), lr=0.01, master_form="none")
        for _ in range(3):
            for one, optimizer in ((plain, theirs), (net, ours)):
                optimizer.zero_grad()
                loss_of(one, TOKENS).backward()
                optimizer.step()
        assert_same(net.parameters(), plain.parameters())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_state_has_the_bytes_of_the_moments_alone(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 bytes of a parameter less than with "split", 4 less than with "full": in host memory, on disk and saved."""
    stores, _ = opened(monkeypatch)
    elements, held = 1 << 16, {}
    for form in ("none", "split", "full"):
        weight = nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))
        given = {"tier": "disk", "disk": tmp_path} if tier == "disk" else {}
        optimizer = AdamW([weight], master_form=form, **given)
        expected = 0 if tier == "disk" else optimizer._state_bytes()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        if tier == "disk":
            held[form] = stores[-1].nbytes
        else:
            held[form] = optimizer.held_bytes() - 4  # the number of steps
            assert expected == held[form]
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        size = {"none": 8, "split": 10, "full": 12}[form] * elements
        assert size <= len(saved.getvalue()) < size + 8192
    assert held == {"none": 8 * elements, "split": 10 * elements, "full": 12 * elements}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("form", ["split", "full"])
def test_state_of_other_forms(name: str, tier: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters that are loaded are dropped, and those of the other form begin with the weights that are there."""
    monkeypatch.setattr(states, "LEAST_BYTES", 1)
    given = {"tier": "disk", "disk": tmp_path} if tier == "disk" else {}
    ours = parameters(torch.bfloat16, MATRICES[:2])
    optimizer = make(name, ours, master_form=form)
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    theirs = copies(ours)
    alone = make(name, theirs, **given)
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        for key in KEPT:
            entries.pop(key, None)
    fresh = copies(ours)
    reference = make(name, fresh)
    reference.load_state_dict(copy.deepcopy(state))
    for step in (1, 2):
        give_gradients(theirs, fresh, step)
        alone.step()
        reference.step()
    assert_same(theirs, fresh)
    assert all(set(entries).isdisjoint(KEPT) for entries in alone.state.values())
    # and back
    exact, back = copies(theirs, torch.float32), copies(theirs)
    state = copy.deepcopy(alone.state_dict())
    again, wide = make(name, back, master_form=form, **given), make(name, exact)
    again.load_state_dict(copy.deepcopy(state))
    wide.load_state_dict(state)
    give_gradients(back, exact, 3)
    again.step()
    wide.step()
    for weight, wanted in zip(back, exact, strict=True):
        entries = again.state[weight]
        kept = entries["master"] if form == "full" else None
        if kept is None:
            bits = (weight.detach().view(torch.int16).to(torch.int32) << 16) + entries["master_remainder"]
            kept = bits.view(torch.float32)
        assert torch.equal(kept, wanted.detach())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_checkpoints_go_on(tier: str, tmp_path: Path) -> None:
    """As if nothing had been in between; float32 weights that are loaded are rounded to the nearest."""
    given = {"tier": "disk", "disk": tmp_path} if tier == "disk" else {}

    def trained(net: nn.Module, optimizer: Any, steps: range) -> list[torch.Tensor]:
        for step in steps:
            give_gradients(list(net.parameters()), copies(list(net.parameters())), step)
            optimizer.step()
        return [one.detach().clone() for one in net.parameters()]

    nets = [nn.Linear(80, 60).bfloat16() for _ in "abc"]
    one, other, wide = (AdamW(net.parameters(), lr=0.01, master_form="none", **given) for net in nets)
    trained(nets[0], one, range(2))
    headrace.save(tmp_path / "saved", nets[0], one)
    headrace.load(tmp_path / "saved", nets[1], other)
    assert_same(trained(nets[1], other, range(2, 4)), trained(nets[0], one, range(2, 4)))
    exact = nn.Linear(80, 60)
    headrace.save(tmp_path / "wide", exact, AdamW(exact.parameters()))
    headrace.load(tmp_path / "wide", nets[2], wide)
    assert_same(nets[2].parameters(), [one.detach().bfloat16() for one in exact.parameters()])
    assert all(set(entries).isdisjoint(KEPT) for entries in wide.state.values())


def test_weights_written_by_somebody_count() -> None:
    """Whatever way: there is nothing beside them."""
    ours, theirs = parameters(torch.bfloat16, SHAPES[:3]), parameters(torch.bfloat16, SHAPES[:3])
    one, other = make("adamw", ours), make("adamw", theirs)
    for step in range(3):
        give_gradients(ours, theirs, step)
        one.step()
        other.step()
        for weight, again in zip(ours, theirs, strict=True):
            weight.data.mul_(2)
            again.data = again.data * 2
    assert_same(ours, theirs)


def test_weights_of_other_dtypes_have_what_they_had() -> None:
    """float16 weights have a whole master, float32 ones are their own; one that becomes bfloat16 drops its master."""
    ours = [*parameters(torch.float16, SHAPES[:2]), *parameters(torch.float32, SHAPES[:2])]
    theirs = copies(ours)
    one, other = make("adamw", ours), make("adamw", theirs, master_form="full")
    for step in range(3):
        give_gradients(ours, theirs, step)
        one.step()
        other.step()
    assert_same(ours, theirs)
    assert_same(shown(one), shown(other))
    ours[0].data = ours[0].data.bfloat16()
    ours[0].grad = torch.ones_like(ours[0])
    one.step()
    assert set(one.state[ours[0]]).isdisjoint(KEPT)
