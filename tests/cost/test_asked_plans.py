"""Is a plan made as it was asked for: by this method, of this share, on these rates?"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.cli.main import main
from headrace.optim.on_device import _MOST_PIECE_BYTES, _RING_PIECES
from headrace.planning.cost import DRIVES, MACHINES, METHODS, Place, RunPlan
from headrace.planning.cost.lanes import CostLane
from tests.cost.conftest import plain

SMALL = plain(layers=6, hidden=1024, heads=16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_search: None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(config: dict[str, Any] | None = None, **settings: Any) -> RunPlan:
    return headrace.plan(config or SMALL, **{"hardware": "4090", **settings})


def held(plan: RunPlan, place: Place) -> dict[str, int]:
    return {item.purpose: item.nbytes for item in plan.tiers.held if item.place is place}


@pytest.mark.parametrize("name", METHODS)
def test_a_named_method_is_taken(name: str) -> None:
    plan = planned(method=name)
    parts = dict(part.split("=") for part in METHODS[name].split(","))
    for part, value in parts.items():
        assert getattr(plan.method, part).value == value
    assert plan.fits
    assert {tuple(getattr(o.method, part).value for part in parts) for o in plan.options} == {tuple(parts.values())}


def test_parts_of_a_method() -> None:
    plan = planned(method="offload-optimizer,update=host,activations=spilled")
    assert plan.method.text(plan.work.training) == "optimizer on the host; activations spilled to disk"
    assert len(plan.options) == 1
    assert planned().method.text(plan.work.training) == "everything on the device: no offloading"


def test_the_device_updates_where_the_host_is_slow() -> None:
    """By hand: 10 bytes of state for each parameter of a plain model cross, and come back; the link takes both ways."""
    fast, slow = planned(method="offload-optimizer,activations=kept"), MACHINES["4090"].changed(update="2GB/s")
    by_device = planned(method="offload-optimizer,activations=kept", hardware=slow)
    by_host = planned(method="offload-optimizer,activations=kept,update=host", hardware=slow)
    assert by_device.run is not None
    assert by_host.run is not None
    assert by_device.run.seconds < by_host.run.seconds / 2
    assert "updated by the device" in by_device.to_text()
    assert 'update="device"' in by_device.to_text()
    state = 10 * by_device.model.parameters
    moved = by_device.run.moved_bytes
    assert moved[CostLane.ONLOAD] == moved[CostLane.OFFLOAD] == pytest.approx(state, rel=1e-6)
    assert held(by_device, Place.DEVICE)["updates"] == _RING_PIECES * _MOST_PIECE_BYTES
    assert "gradients" not in held(by_device, Place.HOST)
    assert fast.run is not None
    streamed = planned(method="stream-weights,update=device", hardware=slow)
    assert streamed.run is not None
    assert streamed.run.moved_bytes[CostLane.OFFLOAD] >= state + 4 * by_device.model.parameters  # gradients and weights


def test_a_method_that_does_not_fit_says_what_it_lacks() -> None:
    plan = planned(method="none", device_memory="1GB")
    assert not plan.fits
    assert plan.method.weights is Place.DEVICE
    assert "device memory" in plan.to_text()


def test_shares_of_the_optimizer_lie_between_all_and_nothing() -> None:
    """4,096 tokens, no disk: state moves with the share, byte for byte, and the update on the host takes its part."""
    plans = {
        share: planned(optimizer_fraction=share, method="update=host,activations=kept", disk=False)
        for share in (0, 0.25, 0.5, 1)
    }
    state = held(plans[0], Place.DEVICE)["master and state"]
    assert state == 10 * plans[0].model.parameters
    for share in (0.25, 0.5):
        device, host = held(plans[share], Place.DEVICE), held(plans[share], Place.HOST)
        assert device["master and state"] == pytest.approx((1 - share) * state, abs=2)
        assert host["master and state"] == pytest.approx(share * state, abs=2)
        assert host["gradients"] == pytest.approx(share * device["gradients"], abs=2)
    assert "master and state" not in held(plans[1], Place.DEVICE)
    updates = [plan.run.step.busy_seconds[CostLane.UPDATE] for plan in plans.values() if plan.run]
    assert updates[0] == 0
    assert updates[1:] == [pytest.approx(share * updates[3], rel=1e-3) for share in (0.25, 0.5, 1)]
    steps = [plan.step_seconds or 0 for plan in plans.values()]
    assert steps == sorted(steps)
    # By hand: 26 bytes of DRAM traffic for each parameter of the host's, at 62.4 GB/s.
    rate = MACHINES["4090"].dram_bytes_per_second
    assert updates[2] == pytest.approx(0.5 * 26 * plans[0].model.parameters / rate, rel=1e-3)
    assert plans[0.5].to_dict()["method"]["host_share"] == 0.5
    assert "50% of the optimizer on the host" in plans[0.5].to_text()


def test_gradients_of_a_shared_update_leave_once_a_step() -> None:
    once, often = (planned(optimizer_fraction=0.5, method="activations=kept", micro_batches=n) for n in (1, 4))
    assert once.run
    assert often.run
    assert often.floors.offload_seconds == once.floors.offload_seconds  # type: ignore[union-attr]
    assert planned(optimizer_fraction=1, micro_batches=4, method="activations=kept").floors.offload_seconds > (  # type: ignore[union-attr]
        4 * once.floors.offload_seconds  # type: ignore[union-attr]
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"link": "5GB/s"}, "offload_bytes_per_second", 5e9),
        ({"disk": 1e9}, "disk_write_bytes_per_second", 1e9),
        ({"host": "9 GB"}, "update_rate", 9e9),
        ({"device": "1000MB/s"}, "device_bytes_per_second", 1e9),
        ({"flops": "10TFLOPS"}, "flops_per_second", 1e13),
    ],
)
def test_own_rates(settings: dict[str, Any], field: str, value: float) -> None:
    method = "stream-weights,state=host,activations=kept"
    plan = planned(method=method, hardware=MACHINES["4090"].changed(**settings))
    assert getattr(plan.hardware, field) == value
    assert plan.hardware.sources.get(field, "given") == "given"
    # Slower than the machine's own, and so is the step, unless it is of the drives, which nothing uses here.
    own = planned(method=method).step_seconds
    assert plan.step_seconds == pytest.approx(own) if "disk" in field else (plan.step_seconds or 0) > (own or 1e9)


def test_rates_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    figures = ["link=5GB/s", "disk=1GB/s", "host=9GB/s", "device=500GB/s", "flops=10TFLOPS", "drive=2xhdd"]
    rates = [word for figure in figures for word in ("--set", figure)]
    asked = ["--method", "stream-weights"]
    assert main(["plan", str(tmp_path), "--hardware", "4090", "--json", *rates, *asked]) == 0
    printed = json.loads(capsys.readouterr().out)
    machine = printed["hardware"]
    assert (machine["onload_bytes_per_second"], machine["disk_read_bytes_per_second"]) == (5e9, 1e9)
    assert (machine["dram_bytes_per_second"], machine["flops_per_second"]) == (9e9, 1e13)
    assert machine["disk_bytes"] == 2 * DRIVES["hdd"]["disk_bytes"]
    assert printed["method"]["weights"] == "host"
    assert printed["runnable"]
    assert printed["not_run"] == []


@pytest.mark.extended
def test_slower_drives_take_longer_and_small_blocks_wait() -> None:
    """Blocks of 25 MB from a disk that turns: 10 ms each before the first byte, beside 104 ms of them.

    Host memory has room for staging, and for no layer.
    """
    small = MACHINES["4090"].changed(host_memory_bytes=180_000_000)
    settings = {"method": "stream-weights-from-disk", "training": "inference", "device_memory": "250MB"}
    seconds = {drive: planned(hardware=small.changed(drive=drive), **settings) for drive in DRIVES}
    order = ["nvme-gen5", "nvme-gen4", "sata", "hdd"]
    assert sorted(seconds, key=lambda drive: seconds[drive].step_seconds or 0) == order
    shares = seconds["hdd"].latency_share
    assert 0.02 < shares["fetch"] < 0.2
    assert "of the fetch lane's time, not bytes: larger blocks would help" in seconds["hdd"].to_text()
    assert 0 < seconds["sata"].latency_share["fetch"] < 0.02
    assert "latency" not in seconds["sata"].to_text()
    assert all(drive["latency_seconds"] and drive["sources"] for drive in DRIVES.values())


@pytest.mark.extended
def test_latency_is_of_each_transfer() -> None:
    """Ten times the latency of a drive adds as many times nine latencies as there are reads on the fetch lane."""
    machine = MACHINES["4090"]
    busy, reads = [], 0
    for factor in (1, 10):
        slow = machine.changed(disk_latency_seconds=factor * 1e-3)
        plan = planned(hardware=slow, method="stream-weights-from-disk,state=host,activations=kept")
        assert plan.run
        busy.append(plan.run.step.busy_seconds[CostLane.FETCH])
        reads = sum(task.lane is CostLane.FETCH for task in plan.run.step.tasks)
    assert busy[1] - busy[0] == pytest.approx(reads * 9e-3, rel=0.15)


def test_what_headrace_cannot_run_is_marked() -> None:
    alone = planned()
    assert alone.not_run == ()
    assert "cannot" not in alone.to_text()
    many = planned(hardware="8xh100", devices=8, method="stream-weights", zero_stage=1)
    assert many.not_run == ("ZeRO stage 1 of 8 replicas of offloaded weights",)
    assert not many.to_dict()["runnable"]
    (line,) = [line for line in many.to_text().splitlines() if line.startswith("cannot")]
    assert line == f"cannot    headrace does not run this yet, it is simulated: {', '.join(many.not_run)}"
    assert planned(hardware="8xh100", devices=2, method="none").not_run == ()  # data parallel, as PyTorch has it
    for zero, not_run in (
        ({"zero_stage": 1}, ()),
        ({"zero_stage": 2}, ()),
        ({"zero_stage": 2, "overlap": "forward"}, ("ZeRO stage 2 of 2 replicas",)),
        ({"zero_stage": 2, "method": "stream-weights"}, ("ZeRO stage 2 of 2 replicas of offloaded weights",)),
    ):
        dealt = planned(**{"hardware": "8xh100", "devices": 2, "method": "offload-optimizer", **zero})
        assert dealt.not_run == not_run
    copies = planned(hardware="8xh100", devices=2, nodes=2, method="stream-weights")
    assert copies.not_run == ()  # weights gathered, and gradients summed among devices
    halves = planned(hardware=MACHINES["8x4090"].changed(peer="pcie"), devices=8, method="stream-weights")
    assert halves.not_run == ("gradients summed among devices",)  # and weights over own links
    assert "training weights of fewer than 16 bits" in planned(weight_bits=4.5).not_run[0]
    assert planned(weight_bits=4.5, training="adapter").not_run == ()
    beside = planned(optimizer_fraction=0.5, overlap="forward")
    assert beside.not_run == ("overlap='forward' where the device has a share of the optimizer",)
    assert planned(optimizer_fraction=1, overlap="forward").not_run == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "faster"}, "method='faster': 'faster' is none of none, offload-optimizer"),
        ({"method": "weights=tape"}, "'weights=tape' is none of"),
        ({"method": "none,state=host"}, "has state=device and state=host; give one"),
        ({"method": "weights=host,state=device"}, "no method has weights=host, state=device with training='full'"),
        ({"method": "stream-weights-from-disk", "disk": False}, "no method has weights=disk"),
        ({"method": "stream-weights", "optimizer_fraction": 0.5}, "no method has weights=host, host_share=0.5"),
        ({"optimizer_fraction": 1.5}, "optimizer_fraction=1.5; give the host's share, from 0 to 1"),
        ({"optimizer_fraction": 0.5, "training": "inference"}, "optimizer_fraction=0.5 is of an update"),
        ({"adapter_rank": 64}, "adapter_rank=64 is of training='adapter' alone; leave it out"),
        ({"overlap": "forward", "training": "inference"}, "overlap='forward' is of an update"),
        ({"state_dtype": "8bit", "training": "inference"}, "state_dtype='8bit' is of an update"),
        ({"master_form": "none", "training": "inference"}, "master_form='none' is of an update, and training"),
        ({"master_form": "half"}, "master_form='half'; give one of split, full, none"),
        ({"expert_hit_rate": 0.2}, "expert_hit_rate=0.2 is of inference with experts on one device"),
        ({"expert_hit_rate": 0.2, "training": "inference"}, "expert_hit_rate=0.2 is of inference with experts"),
        ({"zero_stage": 2}, "zero_stage=2 is for several replicas; give devices, too"),
        ({"zero_stage": 3, "devices": 8}, "zero_stage=3; give 1 (state is divided), 2 (gradients, too), or 0"),
        ({"hardware": "NVIDIA H100 80GB HBM3"}, "is not known; the nearest is h100; give"),
        ({"hardware": "rtx-4090-ti"}, "the nearest is 4090; give"),
        ({"hardware": "xyz"}, "hardware='xyz' is not known; give 3090"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(**settings)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"drive": "tape"}, "the catalogue has no drive 'tape'; it has nvme-gen4, nvme-gen5, sata, hdd"),
        ({"drive": "nvme"}, "the catalogue has no drive 'nvme'; the nearest is nvme-gen"),
        ({"drive": "0xhdd"}, "drives=0; give at least 1"),
        ({"link": 0}, "onload_bytes_per_second is 0.0; it must be finite and above 0"),
        ({"disk": "-1GB/s"}, "no speed of it"),
        ({"network": "10Gb/s"}, "network='10Gb/s' is no rate; give one such as '25GB/s'"),
        ({"flops": "10GB/s"}, "flops='10GB/s' is no rate; give one such as '300TFLOPS'"),
        ({"devices": "8"}, "devices='8' is no number; text is for link, disk"),
        ({"lnik": "10GB/s"}, "a machine has no figure 'lnik'; give one of link, disk, host"),
    ],
)
def test_figures_that_cannot_be(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        MACHINES["4090"].changed(**figures)
