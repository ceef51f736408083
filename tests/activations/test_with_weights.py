"""Do activations and weights leave the device in the same step, over one link, and is every model exact?"""

import pytest
import torch
from torch import Tensor, nn

import headrace
from tests.activations.models import SAVED_BYTES, Stack, rows, step
from tests.activations.plain import STEPS, plain_run
from tests.matrix.models import CASES, CHECKPOINTING, Case
from tests.support.compare import assert_same
from tests.support.held import Allocations, is_counted, weight_bytes
from tests.support.loops import train
from tests.support.offloaded import budget_bytes


@pytest.mark.core(checkpointing="non-reentrant")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_kind(case: Case, checkpointing: str, compute_device: torch.device) -> None:
    check(case, checkpointing, "full", compute_device)


@pytest.mark.core(checkpointing="non-reentrant")
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_kind_with_adapters(checkpointing: str, compute_device: torch.device) -> None:
    check(CASES[0], checkpointing, "adapters", compute_device)


def check(case: Case, checkpointing: str, training: str, compute_device: torch.device) -> None:
    batches = case.on(compute_device, STEPS)

    plain, _ = plain_run(case.name, checkpointing, training, compute_device)
    after_forward: list[int] = []
    settings = {"min_bytes": 0, "device_memory": 0}
    compares_bytes = is_counted(compute_device) and checkpointing == "none" and case.name in ("dense", "unet")
    for activations in (False, settings) if compares_bytes else (settings,):
        model = case.build(checkpointing, training)
        allocations = Allocations(compute_device)
        with headrace.offload(
            model,
            device=compute_device,
            device_memory=budget_bytes(model, case.share),
            activations=activations,
        ) as handle:
            assert_same(train(model, batches, case.forward, after_forward=allocations.forward_done), plain)
            stats = handle.stats()
            assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes < weight_bytes(model)
            assert stats.onload_bytes > weight_bytes(model)
            if handle.activations is not None:
                moved, plan = handle.activations.stats(), handle.activations.plan
                assert plan is not None
                assert moved.onload_bytes >= (STEPS - 1) * plan.host_bytes > 0
                assert moved.host_held_bytes == 0
                weights = {parameter.nbytes for parameter in model.parameters() if parameter.ndim == 2}
                assert moved.offload_bytes < STEPS * (plan.problem.nbytes + 4096) or not weights
        after_forward.append(allocations.after_forward_bytes[-1])
    if compares_bytes:
        assert plan is not None
        assert after_forward[0] - after_forward[1] >= 0.5 * plan.host_bytes


@pytest.mark.emu("random:0", "lazy")
def test_device_bytes_drop_by_the_bytes_on_the_host(emu_device):
    after_forward, held = [], 0
    for activations in (False, {"min_bytes": 0, "device_memory": 4 * SAVED_BYTES}):
        model = Stack(12)
        with headrace.offload(
            model, device="emu", device_memory=weight_bytes(model) // 3, activations=activations
        ) as handle:
            for _ in range(4):
                step(model, rows("emu"))
            torch.accelerator.synchronize()
            loss = model(rows("emu")).square().sum()
            after_forward.append(torch.accelerator.memory_allocated())
            if handle.activations is not None:
                held = handle.activations.stats().host_held_bytes
            loss.backward()
            del loss
    assert after_forward[0] - after_forward[1] == held > 7 * SAVED_BYTES


@pytest.mark.emu("threads", "lazy", "random:1")
def test_every_schedule_of_the_device(emu_device):
    expected = step(Stack(12).to("emu"), rows("emu"))
    model = Stack(12)
    activations = {"min_bytes": 0, "device_memory": 3 * SAVED_BYTES}
    with headrace.offload(model, device="emu", device_memory=weight_bytes(model) // 3, activations=activations):
        for _ in range(5):
            assert_same(step(model, rows("emu")), expected)
    assert emu_device.take_reports() == []


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_an_optimizer_of_ours_and_micro_batches(micro_batches: int, compute_device: torch.device) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        losses = []
        for _ in range(5):
            for seed in range(micro_batches):
                loss = model(rows(compute_device, seed)).square().sum()
                loss.backward()
                losses.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *(p.detach().cpu().clone() for p in model.parameters())]

    expected = run(Stack().to(compute_device))
    model = Stack()
    with headrace.offload(
        model,
        device=compute_device,
        device_memory=weight_bytes(model) // 2,
        activations={"min_bytes": 0, "device_memory": 0},
    ):
        assert_same(run(model), expected)


def test_the_report_speaks_of_both(compute_device: torch.device) -> None:
    model = Stack()
    with headrace.offload(model, device=compute_device, activations={"min_bytes": 0, "device_memory": 0}) as handle:
        for _ in range(3):
            step(model, rows(compute_device))
        report = str(handle.report())
        assert "activations offloaded" in report
        assert "recompute them (gradient checkpointing) in layers." in report
        handle.reset_stats()
        assert handle.activations is not None
        assert handle.activations.stats().offload_bytes == 0
    assert type(model) is Stack


def test_copies_are_in_the_timeline(compute_device: torch.device) -> None:
    model = Stack()
    with headrace.offload(model, device=compute_device, activations={"min_bytes": 0, "device_memory": 0}) as handle:
        for _ in range(4):
            step(model, rows(compute_device))
        record = handle.report().record
        assert handle.activations is not None
        plan = handle.activations.plan
    assert plan is not None
    for lane in ("offload", "onload"):
        spans = [span for span in record.of_lane(lane) if span.what.startswith("activation of ")]
        assert sum(span.nbytes for span in spans) == plan.host_bytes
        saved_by = {plan.problem.saved[index].name for index in plan.offloaded}
        assert {span.what for span in spans} == {f"activation of {name}" for name in saved_by}
        assert all(0 <= span.begin_seconds <= record.step_seconds for span in spans)


def test_what_cannot_be_combined_is_refused() -> None:
    model = Stack(2)
    with headrace.offload(model, device="cpu"), pytest.raises(headrace.StateError, match="activations=True"):
        headrace.offload_activations(model)
    with headrace.offload_activations(model), pytest.raises(headrace.StateError, match="activations=True"):
        headrace.offload(model, device="cpu")
    with pytest.raises(TypeError, match="neither True nor a dict"):
        headrace.offload(model, device="cpu", activations=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model has 2 layers"):
        headrace.offload(model, device="cpu", activations={"layers": 3})
    assert type(model) is Stack
