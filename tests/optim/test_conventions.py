"""Does an optimizer of ours behave as PyTorch users expect? Groups, schedulers, closures, hooks, clipping, bad use."""

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn

import headrace.optim
from headrace.optim import AdamW, kernel, threads, update
from tests.optim.references import copies, give_gradients, parameters, ties_up
from tests.support.compare import assert_same

SMALL = ((5, 3), (7,))


def pair(
    dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[list[nn.Parameter], list[nn.Parameter], Any, Any]:
    ours = parameters(dtype, SMALL)
    theirs = copies(ours, torch.float32)
    return ours, theirs, AdamW(ours, **settings), torch.optim.AdamW(theirs, fused=True, **settings)


def test_groups_with_their_own_settings_and_live_edits() -> None:
    ours, theirs = parameters(shapes=SMALL), parameters(shapes=SMALL)

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": [params[0]], "lr": 0.1, "weight_decay": 0.0}, {"params": [params[1]], "betas": (0.5, 0.9)}]

    optimizer, reference = AdamW(groups(ours)), torch.optim.AdamW(groups(theirs), fused=True)
    for step in range(6):
        give_gradients(ours, theirs, step)
        for each in (optimizer, reference):
            each.param_groups[1]["lr"] = 0.01 * (step + 1)
            each.param_groups[0]["weight_decay"] = 0.1 * step
            each.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
def test_schedulers(lr: Any) -> None:
    ours, theirs = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer = AdamW(ours, lr=copy.copy(lr))
    reference = torch.optim.AdamW(theirs, lr=copy.copy(lr), fused=True)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 5) for each in (optimizer, reference)]
    for step in range(8):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_same(ours, theirs)


def test_closure_runs_once_and_its_result_is_returned() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, calls = AdamW([weight]), []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert calls == [True]


def test_parameters_without_gradient_are_left_alone() -> None:
    """Also after a step in which they had one: no stale update (Megatron's HybridDeviceOptimizer made it)."""
    ours = parameters(shapes=SMALL)
    optimizer = AdamW(ours)
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    kept = ours[0].detach().clone()
    optimizer.zero_grad()
    ours[1].grad = torch.ones(7)
    optimizer.step()
    assert torch.equal(ours[0], kept)
    assert optimizer.state[ours[0]]["step"] == 1
    assert optimizer.state[ours[1]]["step"] == 2


def test_frozen_and_tied_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    reference = copy.deepcopy(model)
    optimizer = AdamW(model.parameters())
    other = torch.optim.AdamW(reference.parameters(), fused=True)
    for step in range(3):
        for each, stepper in ((model, optimizer), (reference, other)):
            stepper.zero_grad()
            each(torch.full((2, 4), 0.1 * step + 0.1)).square().sum().backward()
            stepper.step()
    assert_same(list(model.parameters()), list(reference.parameters()))


def test_add_param_group_and_hooks() -> None:
    ours = parameters(shapes=SMALL)
    optimizer, seen = AdamW([ours[0]]), []
    optimizer.add_param_group({"params": [ours[1]], "lr": 0.5})
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    assert seen == ["before", "after"]
    assert len(optimizer.state) == 2
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [ours[0]]})


def test_state_is_made_when_it_is_needed() -> None:
    optimizer = AdamW(parameters(shapes=SMALL))
    assert not optimizer.state
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("norm", "scale"), [(0.5, 1), (1e6, 1), (1e-7, 1e-7)])
def test_clipping_equals_clip_grad_norm(dtype: torch.dtype, norm: float, scale: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, reference = AdamW(ours, max_grad_norm=norm), AdamW(theirs)
    for step in range(4):
        give_gradients(ours, theirs, step)
        for gradient in [one.grad for one in (*ours, *theirs) if one.grad is not None]:
            gradient.mul_(scale)  # the least of them are not far from what keeps the norm from being zero
        kept = [parameter.grad.clone() for parameter in ours if parameter.grad is not None]
        total = nn.utils.clip_grad_norm_(theirs, norm)
        optimizer.step()
        reference.step()
        assert optimizer.last_grad_norm == total.item()
        assert_same([parameter.grad for parameter in ours if parameter.grad is not None], kept)
    assert_same(ours, theirs)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("limit", [1.0, math.inf])
def test_a_step_with_infinite_gradients_changes_nothing(bad: float, limit: float) -> None:
    ours = parameters(torch.bfloat16, SMALL)
    optimizer = AdamW(ours, max_grad_norm=limit)
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    before = [parameter.detach().clone() for parameter in ours], copy.deepcopy(optimizer.state_dict())
    give_gradients(ours, copies(ours), 1)
    ours[1].grad[3] = bad  # type: ignore[index]
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert_same(ours, before[0])
    for key, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            assert torch.equal(value, before[1]["state"][key][name]), name


def test_grad_scaler_skips_and_unscales() -> None:
    ours, theirs = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, reference = AdamW(ours), torch.optim.AdamW(theirs, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        give_gradients(ours, theirs, step)
        if step != 1:
            reference.step()
        for parameter in ours:
            parameter.grad.mul_(8.0 if step != 1 else math.inf)  # type: ignore[union-attr]
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update(8.0)
    assert_same(ours, theirs)


def test_layouts_other_than_contiguous() -> None:
    bases = [
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 6)[:, ::2],
    ]
    for dtype in (torch.float32, torch.bfloat16):
        ours = [
            nn.Parameter(base.to(dtype).as_strided(base.shape, base.stride()) if False else base.to(dtype))
            for base in bases
        ]
        ours[2] = nn.Parameter(torch.randn(8, 6).to(dtype)[:, ::2])
        theirs = [nn.Parameter(weight.detach().float().contiguous()) for weight in ours]
        optimizer, reference = AdamW(ours), torch.optim.AdamW(theirs, fused=True)
        for step in range(3):
            give_gradients(ours, theirs, step)
            optimizer.step()
            reference.step()
        assert not ours[2].is_contiguous()
        assert_same(ours, [ties_up(weight) if dtype == torch.bfloat16 else weight for weight in theirs])


@pytest.mark.parametrize("form", ["split", "full"])
@pytest.mark.parametrize("how", ["copy_", "data", "load_state_dict"])
def test_weights_loaded_later_refresh_the_master(form: str, how: str) -> None:
    """Megatron's master stayed as it was: the loss was plausible at the first step and collapsed at the second."""
    model = nn.Linear(16, 16, dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=0.01, master_form=form)
    give_gradients(list(model.parameters()), copies(list(model.parameters())), 0)
    optimizer.step()
    # Other in each element: one that is as it was keeps the low bits of its master.
    loaded = {name: torch.rand_like(value) + 1 for name, value in model.state_dict().items()}
    if how == "load_state_dict":
        model.load_state_dict(loaded)
    for name, parameter in model.named_parameters():
        if how == "copy_":
            with torch.no_grad():
                parameter.copy_(loaded[name])
        elif how == "data":
            parameter.data = loaded[name].clone()
    exact = copies([loaded[name] for name, _ in model.named_parameters()], torch.float32)
    reference = torch.optim.AdamW(exact, lr=0.01, fused=True)
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries.pop("master", None)
        entries.pop("master_remainder", None)
    reference.load_state_dict(state)
    give_gradients(list(model.parameters()), exact, 1)
    optimizer.step()
    reference.step()
    assert_same(list(model.parameters()), [ties_up(w) if form == "split" else w.detach().bfloat16() for w in exact])


@pytest.mark.parametrize("form", ["split", "full"])
def test_weights_that_went_and_came_back_keep_the_master(form: str) -> None:
    """An evaluation with averaged weights, which are swapped in and out again, leaves no trace."""
    ours, exact = parameters(torch.bfloat16, SMALL), copies(parameters(torch.bfloat16, SMALL), torch.float32)
    optimizer, reference = AdamW(ours, master_form=form), torch.optim.AdamW(exact, fused=True)
    for step in range(4):
        give_gradients(ours, exact, step)
        optimizer.step()
        reference.step()
        own = [parameter.detach().clone() for parameter in ours]
        with torch.no_grad():
            for parameter, value in zip(ours, own, strict=True):
                parameter.zero_()
                parameter.copy_(value)
    assert_same(ours, [ties_up(w) if form == "split" else w.detach().bfloat16() for w in exact])


BAD = [
    ({"tier": "tape"}, "tier='tape' is not available; allowed: 'host'"),
    ({"tier": "tape"}, "allowed: 'host' or 'disk'"),
    ({"tier": "disk"}, "needs the directory"),
    ({"tier": "disk", "disk": ""}, "disk='' names no path"),
    ({"disk": "/nvme"}, "disk='/nvme'"),
    ({"overlap": "sideways"}, "overlap='sideways' is not available; allowed: 'none'"),
    ({"master_dtype": torch.float64}, "master_dtype=torch.float64"),
    ({"master_form": "both"}, "allowed: 'split' or 'full' or 'none'"),
    ({"state_dtype": torch.int8}, "state_dtype=torch.int8"),
    ({"device_fraction": -0.1}, "device_fraction=-0.1"),
    ({"device_fraction": 1.5}, r'neither in \[0, 1\] nor "auto"'),
    ({"device_fraction": 0.5}, "all parameters are on the CPU"),
    ({"device_fraction": float("nan")}, "device_fraction=nan"),
    ({"overlap_d2h_h2d": "no"}, "overlap_d2h_h2d='no' is not available; allowed: True or False"),
    ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
    ({"lr": -1.0}, "learning rate"),
    ({"betas": (1.0, 0.9)}, "beta"),
    ({"eps": -1.0}, "epsilon"),
    ({"weight_decay": -1.0}, "weight_decay"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(shapes=SMALL), **settings)


def test_unknown_setting() -> None:
    with pytest.raises(TypeError, match="fraction"):
        AdamW(parameters(shapes=SMALL), fraction=1.0)


def test_bad_parameters_and_gradients() -> None:
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    with pytest.raises(ValueError, match="more than one parameter group"):
        AdamW([{"params": [weight]}, {"params": [weight]}])
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients: parameter 0 of shape \(4, 2\)"):
        AdamW(embedding.parameters()).step()
    complex_weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    complex_weight.grad = torch.ones_like(complex_weight)
    with pytest.raises(RuntimeError, match="view_as_real"):
        AdamW([complex_weight]).step()


def test_copies_and_pickles_go_on_alike() -> None:
    for clone in (copy.deepcopy, lambda each: torch.load(_saved(each), weights_only=False)):
        ours = parameters(torch.bfloat16, SMALL)
        optimizer = AdamW(ours, max_grad_norm=1.0, master_form="full")
        give_gradients(ours, copies(ours), 0)
        optimizer.step()
        other = clone(optimizer)
        theirs = [parameter for group in other.param_groups for parameter in group["params"]]
        give_gradients(ours, theirs, 1)
        optimizer.step()
        other.step()
        assert_same(ours, theirs)


def _saved(optimizer: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(optimizer, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize(
    ("cores", "wanted"),
    [
        ({"affinity": 16, "machine": 16, "quota": None, "local_ranks": 1}, 16),
        ({"affinity": 16, "machine": 16, "quota": None, "local_ranks": 8}, 2),
        ({"affinity": 2, "machine": 16, "quota": None, "local_ranks": 8}, 2),  # bound by the launcher already
        ({"affinity": 16, "machine": 16, "quota": 3.5, "local_ranks": 1}, 4),
        ({"affinity": 4, "machine": 64, "quota": 16.0, "local_ranks": 1}, 4),
        ({"affinity": 1, "machine": 1, "quota": 0.5, "local_ranks": 4}, 1),
    ],
)
def test_number_of_threads(cores: dict[str, Any], wanted: int) -> None:
    assert threads.available_cores(**cores) == wanted


def test_an_error_in_a_helper_thread_is_raised() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second")

    with threads.limited_to(3), pytest.raises(KeyError, match="second"):
        threads.on_each(work, at_most=3)
    assert len(calls) == 3


def test_host_bytes_per_parameter() -> None:
    """bfloat16 weight, remainder, two float32 moments, bfloat16 gradient: 14 bytes, and a step needs no more."""
    weight = nn.Parameter(torch.zeros(1 << 20, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = AdamW([weight], max_grad_norm=1.0)
    optimizer.step()
    held = optimizer.held_bytes() + weight.nbytes + weight.grad.nbytes
    assert held <= 14.01 * weight.numel()
    checkpoint = optimizer.state_dict()["state"][0]
    assert checkpoint["exp_avg"] is optimizer.state[weight]["exp_avg"]  # no copy for a checkpoint


def test_public_names() -> None:
    assert sorted(headrace.optim.__all__) == ["Adafactor", "Adam", "AdamW", "Lion", "Muon", "SGD"]
    assert isinstance(kernel.available(), bool)


def test_weights_with_gaps_that_were_written_after_a_step_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (nn.Parameter(torch.ones(6, 8)[:, ::2]) for _ in range(2))
    optimizer, reference = AdamW([ours]), AdamW([theirs])
    give_gradients([ours], [theirs], 0)
    with monkeypatch.context() as patch:
        patch.setattr(update, "perform", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    with torch.no_grad():
        ours.fill_(3.0)
        theirs.fill_(3.0)
    optimizer.step()
    reference.step()
    assert_same([ours], [theirs])


def test_settings_that_groups_of_others_have_change_nothing() -> None:
    """`bias_correction` of apex and Transformer Engine is none of torch.optim's."""
    ours, theirs = parameters(torch.float32, SMALL), parameters(torch.float32, SMALL)
    groups = [{"params": ours, "bias_correction": False}]
    optimizer, reference = AdamW(groups, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, fused=True)
    give_gradients(ours, theirs, 0)
    optimizer.step()
    reference.step()
    assert_same(ours, theirs)
