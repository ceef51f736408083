"""Does all that a plan prints speak of one and the same step: result, lanes, time line, tiers, wear?"""

import re
from dataclasses import replace
from typing import Any

import pytest

import headrace
from headrace.planning.cost import (
    MACHINES,
    Activations,
    Case,
    Method,
    Overlap,
    Place,
    RunPlan,
    Spread,
    Work,
)
from headrace.planning.cost import forecast as forecasts
from headrace.planning.cost.forecast import Run, run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.text import decimal_text, seconds_text
from headrace.shapes import shape_of
from tests.cost.conftest import LLAMA_8B, QWEN3_30B_A3B, every_case, planned_case

SMALL = LLAMA_8B | {"num_hidden_layers": 6, "vocab_size": 32_000}
EXACT = {CostLane.COMPUTE, CostLane.OFFLOAD, CostLane.UPDATE, CostLane.SPILL}  # others may do more than the least
MANY: dict[str, dict[str, Any]] = {
    "ZeRO": {"hardware": "8xh200", "devices": 8, "zero_stage": 2, "batch_size": 2, "micro_batches": 4},
    "shared": {"hardware": "8x4090", "devices": 8, "micro_batches": 8},
    "streamed": {"hardware": "4090", "micro_batches": 5, "device_memory": "6GB", "method": "stream-weights"},
    "two": {"hardware": "4090", "micro_batches": 2, "overlap": "forward"},
}


@pytest.mark.extended
@pytest.mark.parametrize(("model", "machine"), every_case())
def test_a_plan_agrees_with_itself(model: str, machine: str) -> None:
    check(planned_case(model, machine))


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("case", MANY)
def test_a_plan_of_many_micro_batches_agrees_with_itself(case: str) -> None:
    check(headrace.plan(QWEN3_30B_A3B | {"num_hidden_layers": 6} if case == "ZeRO" else SMALL, **MANY[case]))


def check(plan: RunPlan) -> None:
    """All but how good the plan is."""
    text, printed = plan.to_text(), plan.to_dict()
    check_tiers(plan, text)
    assert plan.fits == (plan.run is not None) == (not any(plan.tiers.short(place) for place in Place))
    if plan.run is None:
        assert "\nresult    does not fit\n" in text
        return
    run, work = plan.run, plan.work
    tokens = work.batch_size * work.sequence_length * work.micro_batches * plan.spread.data
    assert plan.tokens_per_second == pytest.approx(tokens / run.seconds)
    assert f"\nresult    {seconds_text(run.seconds)} a step, {tokens / run.seconds:,.0f} tokens/s, " in text
    assert printed["step_seconds"] == run.seconds
    assert printed["efficiency"] == pytest.approx(run.floors.compute_seconds / run.seconds)
    rounds = run.case.grouped().work.micro_batches
    if rounds <= 2:
        assert run.step.seconds == pytest.approx(run.seconds)
        assert f"\none step of {seconds_text(run.seconds)}:\n" in text
    else:
        assert f"\none step of {seconds_text(run.seconds)}:\n" not in text
    check_lanes(plan, run, text)
    check_time_line(run, text)
    assert plan.written_bytes == run.moved_bytes[CostLane.SPILL] * plan.hardware.devices
    if plan.wear_steps is not None:
        assert plan.wear_steps * plan.written_bytes == pytest.approx(plan.hardware.disk_endurance_bytes)
    for rate in () if plan.decoding is None else plan.decoding.rates:
        assert rate.fetch_bytes <= rate.onload_bytes


def check_tiers(plan: RunPlan, text: str) -> None:
    """Each tier's bytes add up, and stay within it or lack what is said."""
    totals = []
    for place in Place:
        held = sum(one.nbytes for one in plan.tiers.held if one.place is place)
        totals.append(decimal_text(held))
        assert plan.tiers.total(place) == held
        assert plan.tiers.short(place) == max(0, held - plan.tiers.capacity[place])
    assert re.search(r"^in all +" + " +".join(map(re.escape, totals)) + "$", text, re.MULTILINE)


def check_lanes(plan: RunPlan, run: Run, text: str) -> None:
    """None is busier than the step is long or than its floor allows, and all that it moves crosses at its rate."""
    hardware, devices = plan.hardware, plan.hardware.devices
    rates = {
        CostLane.ONLOAD: hardware.onload_bytes_per_second,
        CostLane.OFFLOAD: hardware.offload_bytes_per_second,
        CostLane.FETCH: hardware.disk_read_bytes_per_second / devices,
        CostLane.SPILL: hardware.disk_write_bytes_per_second / devices,
    }
    for lane in CostLane:
        busy, alone = run.busy_seconds[lane], run.in_use[lane.value] * run.seconds
        floor = getattr(run.floors, f"{lane.value}_seconds")
        assert floor * (1 - 2e-3) <= alone <= busy * (1 + 1e-6), lane
        assert busy <= run.seconds * (1 + 1e-6), lane
        if lane in rates:
            assert alone * (1 + 1e-6) >= run.moved_bytes[lane] / rates[lane], lane
        if lane in EXACT and not plan.model.tied:  # gradients of tied weights leave twice
            latency = hardware.disk_latency_seconds if lane is CostLane.SPILL else hardware.link_latency_seconds
            copies = sum(task.lane is lane and task.nbytes > 0 for task in run.step.tasks)
            rounds = max(1.0, run.case.grouped().work.micro_batches / 2)
            more = latency * copies * rounds if lane in rates else 0.0
            assert floor * (1 - 2e-3) <= alone <= floor * (1 + 2e-3) + more, lane
        if busy or floor:
            share = f"{busy / run.seconds:.0%}"
            row = rf"^{lane.value} +{re.escape(seconds_text(busy))} +{share} .*{re.escape(seconds_text(floor))}$"
            assert re.search(row, text, re.MULTILINE), lane


def check_time_line(run: Run, text: str) -> None:
    """Each lane's row shows about as much as the lane is busy."""
    rows = dict(re.findall(r"^  (\w+) *\|([-# ]+)\|$", text, re.MULTILINE))
    for lane, busy in run.step.busy_seconds.items():
        row = rows.get(lane.value, "")
        full, some, none = (row.count(mark) for mark in "#- ")
        share = busy / run.step.seconds
        if not row:
            assert share * 72 <= 0.02 * 72, lane
        elif len(run.visits.cycles) == 1:  # or the row shows one of several
            assert full + some + none == 72
            assert 0.5 * full + 0.02 * some - 1e-6 <= share * 72 <= full + 0.5 * some + 0.02 * none + 1e-6, lane


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("case", ["all here", "streamed", "spilled", "half of the optimizer", "shared"])
def test_lanes_count_all_micro_batches(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all eight had been simulated: bytes to the byte, seconds within 5%."""
    on_host = Method(weights=Place.HOST, state=Place.HOST, activations=Activations.RECOMPUTED)
    method = {
        "all here": Method(weights=Place.DEVICE, state=Place.DEVICE, activations=Activations.KEPT),
        "streamed": on_host,
        "spilled": replace(on_host, activations=Activations.SPILLED, state=Place.DISK),
        "half of the optimizer": replace(on_host, weights=Place.DEVICE, host_share=0.5),
        "shared": replace(on_host, overlap=Overlap.FORWARD),
    }[case]
    spread, hardware = Spread(), MACHINES["4090"].changed(device_memory_bytes=8 * 10**9)
    if case == "shared":
        spread, hardware = Spread(data=8), MACHINES["8x4090"].changed(device_memory_bytes=8 * 10**9)
    work = Work(micro_batches=8)

    def run() -> Run:
        return run_of(Case(shape_of(SMALL), work, spread, method, hardware))

    told = run()
    monkeypatch.setattr(forecasts, "SIMULATED_MICRO_BATCHES", 8)
    whole = run().step
    assert told.moved_bytes == whole.moved_bytes
    assert told.seconds == pytest.approx(whole.seconds, rel=0.05)
    for lane in CostLane:
        assert told.busy_seconds[lane] == pytest.approx(whole.busy_seconds[lane], rel=0.05), lane


@pytest.mark.usefixtures("short_search")
def test_drives_wear_with_each_micro_batch() -> None:
    """Activations on disk are written by each of them."""
    hardware = MACHINES["4090"].changed(device_memory_bytes=8 * 10**9, host_memory_bytes=45 * 10**9)
    settings: dict[str, Any] = {"hardware": hardware, "training": "adapter", "method": "activations=spilled"}
    two, eight = (headrace.plan(SMALL, micro_batches=count, **settings) for count in (2, 8))
    assert two.written_bytes > 0
    assert eight.written_bytes == 4 * two.written_bytes
    assert two.wear_steps is not None
    assert eight.wear_steps == pytest.approx(two.wear_steps / 4)
    assert eight.to_dict()["moved_bytes"]["spill"] == eight.written_bytes == eight.to_dict()["written_bytes_per_step"]


def test_what_goes_on_into_the_next_step_is_in_the_time_line() -> None:
    """An update beside the next forward is shown beside the forward of the step before it."""
    settings: dict[str, Any] = {"hardware": "h100", "batch_size": 2, "overlap": "forward", "method": "stream-weights"}
    rows = dict(re.findall(r"^  (\w+) *\|([-# ]+)\|$", headrace.plan(SMALL, **settings).to_text(), re.MULTILINE))
    assert rows["update"].strip()
    assert rows["update"][-1] == " "
    assert rows["update"].index("#") < 10


@pytest.mark.usefixtures("short_search")
def test_the_time_line_says_of_how_many_micro_batches_it_is() -> None:
    settings: dict[str, Any] = {"hardware": "4090", "device_memory": "8GB", "method": "stream-weights"}
    for count, together, shown in ((3, 1, "2 of its 3"), (5, 2, "4 of its 5")):
        plan = headrace.plan(SMALL, micro_batches=count, **settings)
        assert plan.run is not None
        method = replace(plan.method, together=together)
        run = run_of(Case(plan.model, plan.work, plan.spread, method, plan.hardware))
        text = replace(plan, run=run).to_text()
        assert f"\none step with {shown} micro-batches, {seconds_text(run.step.seconds)}:\n" in text
