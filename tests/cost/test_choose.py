"""Is the recommended method the fastest that fits, and is a plan that does not fit told by how much?"""

from dataclasses import replace
from typing import Any

import pytest

from headrace.planning.cost import (
    MACHINES,
    Case,
    Hardware,
    Overlap,
    Place,
    Spread,
    Training,
    Work,
    machine,
    plan_run,
    wanted,
)
from headrace.planning.cost.forecast import run_of
from headrace.shapes import shape_of
from tests.cost.conftest import LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B

pytestmark = pytest.mark.usefixtures("short_search")

SMALL = LLAMA_8B | {"num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}


@pytest.mark.parametrize("device_gigabytes", [3, pytest.param(8, marks=pytest.mark.extended)])
@pytest.mark.parametrize("host_gigabytes", [16, pytest.param(128, marks=pytest.mark.extended)])
@pytest.mark.parametrize("training", list(Training))
def test_nothing_that_fits_is_faster(device_gigabytes: int, host_gigabytes: int, training: Training) -> None:
    hardware = MACHINES["4090"].changed(
        device_memory_bytes=device_gigabytes * 10**9, host_memory_bytes=host_gigabytes * 10**9
    )
    shape = shape_of(SMALL)
    if training is Training.ADAPTER:
        shape = shape.with_adapters(8)
    plan = plan_run(shape, hardware, Work(training=training, sequence_length=512))
    fitting = [option for option in plan.options if not option.lacks]
    assert plan.fits == bool(fitting)
    if plan.run is None:
        assert plan.shortfall is not None
        assert plan.shortfall.fixes
        return
    runs = [run_of(Case(shape, plan.work, Spread(), option.method, hardware)) for option in fitting]
    weighed = [run.seconds * (1.1 if run.wears else 1.0) for run in (*runs, plan.run)]
    assert weighed.pop() <= min(weighed) * 1.021
    assert not plan.run.lacks
    assert plan.run.seconds >= plan.run.floors.longest * (1 - 1e-9)
    assert all(help.gain > 1.02 for help in plan.helps)


def test_micro_batches_go_together_where_loading_takes_longer() -> None:
    """As many as fit and help; never beside other ranks."""
    shape, work = shape_of(SMALL), Work(sequence_length=128, micro_batches=4)
    slow = MACHINES["4090"].changed(
        device_memory_bytes=3 * 10**9, onload_bytes_per_second=2e9, offload_bytes_per_second=2e9
    )
    plan = plan_run(shape, slow, work, disk=False)
    assert plan.run is not None
    assert plan.method.streamed
    assert set(plan.orders) == {1, 2, 4}
    assert plan.run.seconds == plan.orders[plan.method.together] <= 1.021 * min(plan.orders.values())
    assert plan.orders[4] < 0.5 * plan.orders[1]
    assert f"{plan.method.together} micro-batches together" in plan.to_text()
    assert "order     a step by how many" in plan.to_text()

    activations = [
        sum(held.nbytes for held in option.tiers.held if held.purpose == "activations")
        for option in plan.options
        if replace(option.method, together=1) == replace(plan.method, together=1)
    ]
    assert activations == sorted(set(activations))  # more micro-batches, more of them
    among_two = plan_run(shape, slow, work, Spread(data=2), disk=False)
    assert all(option.method.together == 1 for option in among_two.options)
    assert not among_two.orders


def test_what_writes_to_the_drive_has_to_be_faster_by_a_tenth() -> None:
    """State on disk, and state on the host updated at a rate that makes the steps a twentieth, then a fifth slower."""
    shape, work = shape_of(SMALL), Work(sequence_length=512)
    fast = MACHINES["4090"].changed(device_memory_bytes=8 * 10**9, drive="8xnvme-gen5")
    seconds = {
        state: plan_run(
            shape, fast, work, wanted=wanted(f"weights=device,state={state},update=host", None)
        ).step_seconds
        for state in ("host", "disk")
    }
    assert seconds["disk"]
    assert seconds["host"]
    assert seconds["host"] <= seconds["disk"] * 1.1
    plan = plan_run(shape, fast, work)
    assert plan.run is not None
    assert not plan.run.wears


def test_smaller_micro_batches_help_where_large_ones_leave_no_room() -> None:
    """A large model with adapters: four sequences leave room for activations on disk alone; twice two recompute."""
    shape = shape_of(LLAMA_70B).with_adapters(16)
    work = Work(training=Training.ADAPTER, batch_size=4)
    plan = plan_run(shape, MACHINES["4090"].changed(host_memory_bytes=128 * 10**9), work)
    assert plan.run is not None
    assert plan.run.wears
    named = next(help for help in plan.helps if "2 micro-batches of 4,096 tokens" in help.change)
    assert "activations recomputed" in named.change
    halved = plan_run(shape, plan.hardware, replace(work, batch_size=2, micro_batches=2))
    assert halved.step_seconds is not None
    assert named.gain == pytest.approx(plan.run.seconds / halved.step_seconds)
    assert named.gain > 2


def test_one_memory_for_device_and_host_counts_once() -> None:
    shape, work = shape_of(SMALL), Work(sequence_length=512)
    ram = MACHINES["4090"].changed(device_memory_bytes=14 * 10**9, host_memory_bytes=14 * 10**9, disk_bytes=10**12)
    two, one = plan_run(shape, ram, work), plan_run(shape, ram.changed(unified=True), work)
    assert two.run is not None
    assert one.run is not None

    def in_memory(plan: Any) -> int:
        return int(plan.tiers.total(Place.DEVICE) + plan.tiers.total(Place.HOST))

    assert in_memory(one) <= 0.9 * 14 * 10**9 < in_memory(two)
    short = plan_run(shape, ram.changed(unified=True), work, disk=False)
    assert short.shortfall is not None
    assert short.shortfall.fixes[0].endswith(" GB of host memory in the node")
    enough = int(short.shortfall.fixes[0].split()[0]) * 10**9
    larger = ram.changed(unified=True, device_memory_bytes=enough, host_memory_bytes=enough)
    assert plan_run(shape, larger, work, disk=False).fits


@pytest.mark.extended
def test_device_plans_stay_within_the_device() -> None:
    for kind, config in (("4090", LLAMA_8B), ("h100", LLAMA_70B), ("a100", QWEN3_30B_A3B)):
        plan = plan_run(shape_of(config), MACHINES[kind], Work(batch_size=2))
        assert plan.run is not None
        assert plan.run.visits.predicted.peak_bytes <= (plan.run.tiers.streaming_bytes or plan.model.weight_bytes)
        assert plan.tiers.total(Place.DEVICE) <= 0.9 * MACHINES[kind].device_memory_bytes


def test_what_would_make_it_fit_does() -> None:
    """The host memory that the shortfall names is enough, and a little less is not."""
    hardware = MACHINES["h100"].changed(disk_bytes=0, host_memory_bytes=500 * 10**9)
    shape = shape_of(LLAMA_70B)
    plan = plan_run(shape, hardware, Work())
    assert plan.shortfall is not None
    assert [place for place, _ in plan.shortfall.lacks] == [Place.HOST]
    named = next(fix for fix in plan.shortfall.fixes if "of host memory in the node" in fix)
    gigabytes = float(named.split()[0]) * (1000 if " TB " in named else 1)
    assert plan_run(shape, hardware.changed(host_memory_bytes=int(gigabytes * 1e9)), Work()).fits
    assert not plan_run(shape, hardware.changed(host_memory_bytes=int((gigabytes - 20) * 1e9)), Work()).fits


@pytest.mark.extended
def test_micro_batches_move_weights_again() -> None:
    shape, hardware = shape_of(SMALL), MACHINES["4090"].changed(device_memory_bytes=5 * 10**9)
    one, two, four = (
        plan_run(shape, hardware, Work(sequence_length=512, micro_batches=count)).step_seconds for count in (1, 2, 4)
    )
    assert one is not None
    assert two is not None
    assert four is not None
    assert one < two < four <= 4 * one * 1.001


@pytest.mark.extended
def test_stages_divide_what_a_device_holds() -> None:
    shape = shape_of(LLAMA_70B)
    work = Work(batch_size=1)
    held = {}
    for name, spread in {
        "one": Spread(),
        "stage 1": Spread(data=8, zero_stage=1),
        "stage 2": Spread(data=8, zero_stage=2),
    }.items():
        plan = plan_run(shape, MACHINES["8xh100"], work, spread)
        held[name] = sum(item.nbytes for item in plan.tiers.held if item.purpose == "master and state")
    assert held["one"] == 12 * shape.parameters
    assert held["stage 1"] == held["stage 2"] == held["one"] // 8


@pytest.mark.extended
def test_quantised_base_moves_less() -> None:
    shape = shape_of(LLAMA_70B).with_adapters(16)
    work = Work(training=Training.ADAPTER)
    hardware = MACHINES["4090"].changed(host_memory_bytes=256 * 10**9)
    same = wanted("activations=recomputed", None)
    plain = plan_run(shape, hardware, work, wanted=same)
    quantised = plan_run(shape.with_bits(4.5), hardware, work, wanted=same)
    assert plain.run is not None
    assert quantised.run is not None
    assert quantised.run.floors.onload_seconds < plain.run.floors.onload_seconds / 3
    assert quantised.hiding_tokens["onload"] < plain.hiding_tokens["onload"] / 2


def test_refusals() -> None:
    with pytest.raises(ValueError, match="the catalogue has no device '4091'; the nearest is 4090; it has 3090, 4090"):
        machine("4091", host="desktop")
    with pytest.raises(ValueError, match="zero_stage=4"):
        Spread(zero_stage=4)
    fields: dict[str, Any] = {"flops_per_second": 0.0}
    with pytest.raises(ValueError, match=r"flops_per_second is 0\.0; it must be finite and above 0"):
        MACHINES["4090"].changed(**fields)


def test_hardware_survives_json() -> None:
    for hardware in MACHINES.values():
        assert Hardware.from_json(hardware.to_json()) == hardware
    with pytest.raises(ValueError, match="no hardware file of this version"):
        Hardware.from_json('{"name": "x", "wheels": 4}')


def test_every_figure_has_a_source() -> None:
    for hardware in MACHINES.values():
        for figure in ("device_memory_bytes", "flops_per_second", "onload_bytes_per_second", "dram_bytes_per_second"):
            assert hardware.sources[figure].startswith("https://"), (hardware.name, figure)


@pytest.mark.extended
def test_overlap_is_recommended_where_it_helps() -> None:
    plan = plan_run(shape_of(LLAMA_8B), MACHINES["h100"], Work(batch_size=4), overlap=Overlap.NONE)
    assert any("overlap" in help.change for help in plan.helps)
    beside = plan_run(shape_of(LLAMA_8B), MACHINES["h100"], Work(batch_size=4), overlap=Overlap.FORWARD)
    assert beside.step_seconds is not None
    assert plan.step_seconds is not None
    assert beside.step_seconds < plan.step_seconds / 1.2
