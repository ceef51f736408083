"""Does optimizer state survive what frameworks do to it? Stock torch.optim, torch.save, DCP, moves to other devices."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace.optim
from headrace.optim import AdamW, kernel
from headrace.optim.consolidation import OnAnotherRank
from tests.optim.references import RULES, copies, give_gradients, parameters, ties_up
from tests.support.compare import assert_same

SMALL = ((5, 3), (7, 9))


def reloaded(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Adafactor", "Muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resuming_in_the_middle_changes_nothing(name: str, dtype: torch.dtype, optimizer_first: bool) -> None:
    """A new process loads model and optimizer, in either order, and goes on bit for bit."""
    settings: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    ours = parameters(dtype, SMALL)
    optimizer = getattr(headrace.optim, name)(ours, **settings)
    for step in range(3):
        give_gradients(ours, copies(ours), step)
        optimizer.step()
    saved, weights = reloaded(optimizer.state_dict()), [weight.detach().clone() for weight in ours]
    theirs = [nn.Parameter(torch.zeros_like(weight)) for weight in ours]
    other = getattr(headrace.optim, name)(theirs, **settings)
    if optimizer_first:
        other.load_state_dict(saved)
    with torch.no_grad():
        for parameter, weight in zip(theirs, weights, strict=True):
            parameter.copy_(weight)
    if not optimizer_first:
        other.load_state_dict(saved)
    for step in range(3, 6):
        give_gradients(ours, theirs, step)
        optimizer.step()
        other.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("to_stock", [True, False])
def test_stock_adamw_and_back(to_stock: bool) -> None:
    ours, theirs = parameters(shapes=SMALL), parameters(shapes=SMALL)
    first = AdamW(ours) if to_stock else torch.optim.AdamW(ours, fused=True)
    for step in range(3):
        give_gradients(ours, theirs, step)
        first.step()
    with torch.no_grad():
        for parameter, weight in zip(theirs, ours, strict=True):
            parameter.copy_(weight)
    second = torch.optim.AdamW(theirs, fused=True) if to_stock else AdamW(theirs)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    if to_stock:
        second.param_groups[0]["fused"], second.param_groups[0]["foreach"] = True, None
    for step in range(3, 6):
        give_gradients(ours, theirs, step)
        first.step()
        second.step()
    assert_same(ours, theirs)


def test_moments_of_narrow_weights_stay_float32() -> None:
    ours = parameters(torch.bfloat16, SMALL)
    optimizer = AdamW(ours)
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    other = AdamW(parameters(torch.bfloat16, SMALL))
    other.load_state_dict(saved)
    for entries in other.state.values():
        assert entries["exp_avg"].dtype == entries["exp_avg_sq"].dtype == torch.float32
        assert entries["master_remainder"].dtype == torch.int16
    stock = torch.optim.AdamW(parameters(torch.bfloat16, SMALL))
    stock.load_state_dict(saved)  # loads, and casts, as it always did
    AdamW(parameters(torch.bfloat16, SMALL)).load_state_dict(stock.state_dict())


def exact(optimizer: Any) -> list[torch.Tensor]:
    """The masters of bfloat16 weights, in either form."""
    found = []
    for weight, state in optimizer.state.items():
        bits = weight.detach().view(torch.int16).to(torch.int32) << 16
        found.append(state["master"] if "master" in state else (bits + state["master_remainder"]).view(torch.float32))
    return found


@pytest.mark.core(tier="host")
@pytest.mark.parametrize(("source", "target"), [("split", "full"), ("full", "split")])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_master_forms_load_each_other(
    source: str, target: str, tier: str, native: bool, optimizer_first: bool, monkeypatch: Any, tmp_path: Path
) -> None:
    """They round ties to different sides, so the weights may differ; masters and moments may not."""
    if not native:
        monkeypatch.setattr(kernel, "native_library", lambda: None)
    options = {"tier": "disk", "disk": tmp_path} if tier == "disk" else {}
    gaps = nn.Parameter(torch.randn(8, 6).to(torch.bfloat16)[:, ::2])
    ours = [*parameters(torch.bfloat16, SMALL), gaps]
    optimizer = AdamW(ours, master_form=source)
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for weight, tied, entries in zip(ours, exact(optimizer), saved["state"].values(), strict=True):
        bits = tied.clone().view(torch.int32)
        bits.view(-1)[::2] = bits.view(-1)[::2] & ~0xFFFF | 0x8000
        with torch.no_grad():
            weight.copy_(ties_up(bits.view(torch.float32)) if source == "split" else bits.view(torch.float32))
        if source == "split":
            entries["master_remainder"].copy_(bits)
        else:
            entries["master"].copy_(bits.view(torch.float32))
    theirs = copies(ours)
    others = [nn.Parameter(torch.zeros_like(weight)) for weight in theirs[:-1]]
    others.append(nn.Parameter(torch.zeros(8, 6, dtype=torch.bfloat16)[:, ::2]))
    other = AdamW(others, master_form=target, **options)
    optimizer.load_state_dict(saved)
    if optimizer_first:
        other.load_state_dict(copy.deepcopy(saved))
    with torch.no_grad():
        for parameter, weight in zip(others, theirs, strict=True):
            parameter.copy_(weight)
    if not optimizer_first:
        other.load_state_dict(copy.deepcopy(saved))
    for step in range(2):
        give_gradients(ours, others, step)
        optimizer.step()
        other.step()
        assert_same(exact(other), exact(optimizer))
    assert_same(
        [state["exp_avg_sq"] for state in other.state.values()],
        [state["exp_avg_sq"] for state in optimizer.state.values()],
    )


def test_mismatches_are_refused_and_change_nothing() -> None:
    ours = parameters(shapes=SMALL)
    optimizer = AdamW([("embedding", ours[0]), ("head", ours[1])])
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    saved = optimizer.state_dict()
    wrong = copy.deepcopy(saved)
    wrong["state"][1]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"'exp_avg' of parameter 'head' has shape \(2, 2\).*\(7, 9\)"):
        optimizer.load_state_dict(wrong)
    fewer = copy.deepcopy(saved)
    fewer["param_groups"][0]["params"] = [0]
    with pytest.raises(ValueError, match="doesn't match the size"):
        optimizer.load_state_dict(fewer)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    with pytest.raises(ValueError, match="no 'betas', which AdamW has: another kind of optimizer was saved"):
        optimizer.load_state_dict(torch.optim.SGD(ours, lr=0.1, momentum=0.9).state_dict())
    assert optimizer.state[ours[1]]["exp_avg"].shape == (7, 9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_distributed_checkpoint_state_dicts(dtype: torch.dtype) -> None:
    """DCP steps a fresh optimizer with a learning rate of 0 to make its state; the weights must not move."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 4, dtype=dtype)

    first, second = model(), model()
    optimizer, other = AdamW(first.parameters()), AdamW(second.parameters())
    for step in range(2):
        give_gradients(list(first.parameters()), copies(list(first.parameters())), step)
        optimizer.step()
    optimizer.zero_grad()
    second.load_state_dict(first.state_dict())
    before = copies(list(second.parameters()))
    set_optimizer_state_dict(second, other, copy.deepcopy(get_optimizer_state_dict(first, optimizer)))
    assert_same(list(second.parameters()), before)
    for step in range(2, 4):
        give_gradients(list(first.parameters()), list(second.parameters()), step)
        optimizer.step()
        other.step()
    assert_same(list(first.parameters()), list(second.parameters()))


def test_accelerate_prepares_it() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    ours, theirs = parameters(shapes=SMALL), parameters(shapes=SMALL)
    optimizer, reference = accelerator.prepare(AdamW(ours)), torch.optim.AdamW(theirs, fused=True)
    for step in range(2):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


def test_every_rule_is_covered_by_the_reference_table() -> None:
    assert {own for own, _, _ in RULES.values()} == set(headrace.optim.__all__)


def test_a_state_dict_that_lacks_what_other_ranks_keep_is_refused() -> None:
    """A single process would go on without that state."""
    ours = parameters(shapes=SMALL)
    optimizer = AdamW(ours)
    give_gradients(ours, copies(ours), 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1] = OnAnotherRank(1, "rank 1")
    with pytest.raises(ValueError, match=r"this process is to keep what this state_dict lacks: .* is on rank 1"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[ours[1]]["step"] == 1
