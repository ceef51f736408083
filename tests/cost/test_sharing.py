"""What do devices that share one copy on the host cost and hold? Each figure is worked out by hand beside its test."""

import itertools
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from benchmarks import many_devices
from headrace.cli.main import main
from headrace.planning import search
from headrace.planning.cost import Activations, Case, Hardware, Method, Overlap, Place, Spread, Training, Work
from headrace.planning.cost.forecast import Run, option_of, run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.sharing import Crossing, crossing_of
from tests.cost.conftest import LLAMA_8B, LLAMA_70B
from tests.cost.test_collectives import decoder

ROOT = Path(__file__).parents[2]
TRIALS = search.TRIALS  # of a search that is not a short one
GOLDEN = ROOT / "tests" / "golden" / "llama-70b-on-16-nodes.txt"
LAYERS = 8
SHAPE = decoder(LAYERS)  # of 100M parameters each: weights of 0.2 GB, gradients of as much
WEIGHTS = 2 * 10**8
UPDATE = 10**8 * (2 + 2 + 2 * (4 + 8))  # bytes that an update of one layer moves through host memory
STREAMED = Method(weights=Place.HOST, state=Place.HOST, activations=Activations.KEPT, overlap=Overlap.FORWARD)
ONE_NODE = Spread(data=4)
WORK = Work(sequence_length=1000)
NODE = Hardware(
    name="node",
    devices=4,
    device_memory_bytes=10**15,
    device_bytes_per_second=1e18,
    flops_per_second=1e18,
    onload_bytes_per_second=10e9,
    offload_bytes_per_second=10e9,
    host_memory_bytes=10**12,
    dram_bytes_per_second=1e18,
    disk_bytes=10**13,
    disk_read_bytes_per_second=1e18,
    disk_write_bytes_per_second=1e18,
    peer="none",
    collective_bytes_per_second=100e9,
    node_bytes_per_second=1e18,
)


def crossing(spread: Spread = ONE_NODE, **rates: Any) -> Crossing:
    return crossing_of(SHAPE.blocks[0], Case(SHAPE, WORK, spread, STREAMED, NODE.changed(**rates)))


def test_without_peers_all_of_a_block_crosses_each_link_and_the_host_adds_up() -> None:
    alone = crossing()
    assert (alone.load_bytes, alone.gather_seconds) == (WEIGHTS, 0)
    assert (alone.gradient_bytes, alone.reduce_seconds) == (WEIGHTS, 0)
    assert alone.sum_bytes == WEIGHTS * (1 + 1 / 4)  # each reads its quarter of four gradients, and writes one


def test_over_a_fabric_a_quarter_crosses_each_link() -> None:
    helped = crossing(peer="fabric", collective_bytes_per_second=NODE.collective_bytes_per_second)
    assert (helped.load_bytes, helped.gradient_bytes, helped.sum_bytes) == (WEIGHTS / 4, WEIGHTS / 4, 0)
    assert helped.gather_seconds == helped.reduce_seconds == pytest.approx(WEIGHTS * 3 / 4 / 100e9)


@pytest.mark.parametrize(
    ("rates", "gathers", "reduces"),
    [
        # 0.15 GB among devices at 9 GB/s take 16.7 ms, 0.2 GB over the own link 20 ms.
        ({"peer": "fabric", "collective_bytes_per_second": 9e9}, True, True),
        ({"peer": "fabric", "collective_bytes_per_second": 7e9}, False, False),  # 21.4 ms
        # Over the same link a quarter and the rest take as long as the whole: no collective.
        ({"peer": "pcie", "collective_bytes_per_second": 10e9}, False, False),
        # 4 GB/s of memory for each device: 0.2 GB are read in 50 ms, a quarter in 12.5; the link takes 20.
        ({"peer": "pcie", "collective_bytes_per_second": 10e9, "dram_bytes_per_second": 16e9}, True, True),
        # 15 GB/s of it: a load is read in 13 ms, but a gradient written, read and its quarter written in 30.
        ({"peer": "pcie", "collective_bytes_per_second": 10e9, "dram_bytes_per_second": 60e9}, False, True),
        # Cores that add up 8 GB/s for each device take 31 ms for 0.25 GB.
        ({"peer": "pcie", "collective_bytes_per_second": 10e9, "update_bytes_per_second": 32e9}, False, True),
    ],
)
def test_the_cheaper_way_is_taken(rates: dict[str, Any], gathers: bool, reduces: bool) -> None:
    found = crossing(**rates)
    assert (found.gather_seconds > 0, found.reduce_seconds > 0) == (gathers, reduces)
    assert found.load_bytes == WEIGHTS / (4 if gathers else 1)
    assert found.gradient_bytes == WEIGHTS / (4 if reduces else 1)


def test_ranges_are_summed_over_nodes() -> None:
    """A ring over 3 nodes: two thirds of the own quarter, twice, at a fourth of the node's 4 GB/s."""
    found = crossing(Spread(data=12, nodes=3), node_bytes_per_second=4e9)
    assert found.network_bytes == pytest.approx(2 * 2 / 3 * WEIGHTS / 4)
    assert found.network_seconds == pytest.approx(found.network_bytes / 1e9)
    assert crossing().network_bytes == 0


def test_what_is_not_shared() -> None:
    on_device = Method(weights=Place.DEVICE, state=Place.DEVICE, activations=Activations.KEPT)
    for spread, method in (
        (Spread(), STREAMED),
        (Spread(data=4, zero_stage=2), STREAMED),
        (Spread(data=4), on_device),
    ):
        assert not Case(SHAPE, WORK, spread, method, NODE).shares
        assert planned(spread, method).sharing is None


def planned(spread: Spread = ONE_NODE, method: Method = STREAMED, work: Work = WORK, **rates: Any) -> Run:
    """With room for two blocks, and their gradients, on the device."""
    return run_of(Case(SHAPE, work, spread, method, NODE.changed(**rates)), streaming_bytes=2 * WEIGHTS)


def bound(run: Run) -> str:
    used = sorted(run.in_use, key=lambda name: -run.in_use[name])
    assert run.in_use[used[0]] > 0.9
    assert run.in_use[used[1]] < 0.9
    return used[0]


# Of 8 blocks two stay from forward to backward, and all come anew in the next step: 14 loads.
LOADS = 2 * LAYERS - 2


@pytest.mark.parametrize(
    ("by", "seconds", "spread", "rates"),
    [
        # 3 forwards' worth of 2 operations for each of 0.8 G parameters and 1,000 tokens
        ("compute", 6 * 0.8e9 * 1000 / 1e12, ONE_NODE, {"flops_per_second": 1e12}),
        # 14 loads of 0.2 GB at 1 GB/s, whole blocks: nobody helps
        ("onload", LOADS * 0.2, ONE_NODE, {"onload_bytes_per_second": 1e9}),
        ("offload", LAYERS * 0.2, ONE_NODE, {"offload_bytes_per_second": 1e9}),
        # three quarters of 14 loads and 8 gradients among devices, at 0.2 GB/s
        (
            "collective",
            (LOADS + LAYERS) * 0.15 / 0.2,
            ONE_NODE,
            {"peer": "fabric", "collective_bytes_per_second": 0.2e9, "onload_bytes_per_second": 0.1e9}
            | {"offload_bytes_per_second": 0.1e9},
        ),
        # read 14 loads; write 8 gradients, read and write 1.25 of each; update a quarter: by four devices, at 10 GB/s
        (
            "host memory",
            4 * (LOADS * 0.2 + LAYERS * (0.2 + 0.25 + UPDATE / 4e9)) / 10,
            ONE_NODE,
            {"dram_bytes_per_second": 10e9, "update_bytes_per_second": 1e12},
        ),
        # a quarter of 8 gradients, half of it, twice, at a fourth of 1 GB/s
        ("network", LAYERS * 0.05 / 0.25, Spread(data=8, nodes=2), {"node_bytes_per_second": 1e9}),
        # cores that move 1 GB/s: 8 sums of 0.25 GB and 8 updates of a quarter, for each of four
        (
            "update",
            4 * LAYERS * (0.25 + UPDATE / 4e9) / 1,
            ONE_NODE,
            {"update_bytes_per_second": 1e9, "dram_bytes_per_second": 1e18},
        ),
    ],
)
def test_each_bound_in_turn(by: str, seconds: float, spread: Spread, rates: dict[str, Any]) -> None:
    fast = {"onload_bytes_per_second": 1e12, "offload_bytes_per_second": 1e12, "collective_bytes_per_second": 1e12}
    run = planned(spread, **(fast | rates))
    assert bound(run) == by
    assert run.in_use[by] * run.seconds == pytest.approx(seconds, rel=1e-3)
    assert run.seconds == pytest.approx(seconds, rel=0.1)


def test_the_disk_is_read_and_written_once_for_each_node() -> None:
    """At 1 GB/s: 14 loads of 0.2 GB are read; the update reads and writes 8 blocks, and 12 bytes of state a weight."""
    on_disk = Method(weights=Place.DISK, state=Place.DISK, activations=Activations.KEPT, overlap=Overlap.FORWARD)
    rates = {"disk_read_bytes_per_second": 1e9, "disk_write_bytes_per_second": 1e9, "host_memory_bytes": 1}
    for count in (1, 4):
        run = planned(Spread(data=count), on_disk, devices=count, **rates)
        assert run.step.moved_bytes[CostLane.FETCH] * count == pytest.approx((LOADS * 0.2 + LAYERS * 1.4) * 1e9)
        assert run.step.moved_bytes[CostLane.SPILL] * count == pytest.approx(LAYERS * 1.4 * 1e9)
        assert run.in_use["fetch"] == pytest.approx((LOADS * 0.2 + LAYERS * 1.4) / run.seconds)
        assert max(run.in_use, key=lambda name: run.in_use[name]) == "fetch"


def test_over_pcie_what_devices_send_each_other_takes_time_on_the_link() -> None:
    """4 GB/s of host memory for each device: of 14 loads and 8 gradients a quarter passes it."""
    run = planned(peer="pcie", collective_bytes_per_second=10e9, dram_bytes_per_second=16e9, update_bytes_per_second=0)
    among = (LOADS + LAYERS) * 0.15 / 10
    assert run.step.busy_seconds[CostLane.COLLECTIVE] == 0
    assert run.step.alone_seconds[CostLane.ONLOAD] == pytest.approx(LOADS * 0.05 / 10 + among)
    assert run.step.alone_seconds[CostLane.OFFLOAD] == pytest.approx(LAYERS * 0.05 / 10 + among)
    assert run.step.moved_bytes[CostLane.ONLOAD] == LOADS * WEIGHTS / 4


def test_a_load_waits_for_the_sum_over_nodes_of_all_gradients() -> None:
    """Forwards of 0.2 s, backwards of 0.4: the first sum of 4 s begins behind the last layer's, the rest follow."""
    spread = Spread(data=8, nodes=2)
    run = planned(spread, node_bytes_per_second=0.05e9, flops_per_second=1e12)
    sums = [task.seconds for task in run.step.tasks if task.lane is CostLane.NETWORK]
    assert sums == [pytest.approx(WEIGHTS / 4 / (0.05e9 / 4))] * LAYERS
    assert run.seconds == pytest.approx(LAYERS * 0.2 + 0.4 + LAYERS * 4, rel=0.01)


@pytest.mark.extended
def test_more_devices_hide_the_update_behind_fewer_tokens_of_each() -> None:
    """All of them update as much as one would, and each loads a part of what it did alone."""
    settings: dict[str, Any] = {"hardware": "8xh100", "method": "stream-weights"}
    one, eight = (headrace.plan(LLAMA_8B, **settings, devices=count).hiding_tokens for count in (1, 8))
    assert eight["update"] == pytest.approx(one["update"], rel=1e-6)
    assert eight["onload"] == pytest.approx(one["onload"] / 8, rel=1e-6)
    settings["hardware"] = headrace.Hardware.named("8xh100").changed(peer="none")
    assert headrace.plan(LLAMA_8B, **settings, devices=8).hiding_tokens["onload"] == one["onload"]


RATE = NODE.collective_bytes_per_second
PEERS = (
    {"peer": "none"},
    {"peer": "pcie", "collective_bytes_per_second": 8e9},
    {"peer": "fabric", "collective_bytes_per_second": RATE},
)
PLACES = (
    STREAMED,
    Method(weights=Place.DEVICE, state=Place.HOST, activations=Activations.RECOMPUTED, host_share=0.5),
    Method(weights=Place.DISK, state=Place.DISK, activations=Activations.KEPT, overlap=Overlap.BACKWARD),
)


@pytest.mark.parametrize("training", Training)
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.extended), 3])
@pytest.mark.parametrize("method", PLACES)
@pytest.mark.parametrize(("peers", "nodes"), list(itertools.product(PEERS, (1, 2))))
def test_no_lane_works_less_than_its_floor(
    peers: dict[str, Any], nodes: int, method: Method, micro_batches: int, training: Training
) -> None:
    shape = {Training.FULL: SHAPE, Training.NONE: SHAPE.frozen()}.get(training)
    shape = shape or headrace.plan(LLAMA_8B, hardware="h100", training="adapter").model
    work = Work(sequence_length=1000, micro_batches=micro_batches, training=training)
    hardware = NODE.changed(dram_bytes_per_second=60e9, disk_read_bytes_per_second=5e9, **peers)
    hardware = hardware.changed(disk_write_bytes_per_second=5e9, node_bytes_per_second=5e9)
    run = run_of(Case(shape, work, Spread(data=4 * nodes, nodes=nodes), method, hardware), 5 * 10**9)
    floors = {lane: getattr(run.floors, f"{lane.value}_seconds") for lane in CostLane}
    for lane, floor in floors.items():
        assert run.in_use[lane.value] * run.seconds >= floor * (1 - 1e-6), lane
    assert (run.in_use["network"] > 0) == (nodes > 1 and training is not Training.NONE)


@pytest.mark.parametrize("method", PLACES)
def test_a_node_holds_what_one_process_holds(method: Method) -> None:
    """But for gradients of two blocks that wait to be added up, of each device, where the host does it."""
    alone = option_of(Case(SHAPE, WORK, Spread(), method, NODE.changed(devices=1))).tiers
    share = method.host_share
    for count, peer in itertools.product((2, 4, 8), ("none", "fabric")):
        rate = {"collective_bytes_per_second": NODE.collective_bytes_per_second}
        node = NODE.changed(devices=count, peer=peer, **rate)
        one = option_of(Case(SHAPE, WORK, Spread(data=count), method, node)).tiers
        waiting = 2 * WEIGHTS * share * count if peer == "none" else 0
        assert one.total(Place.HOST) * count == pytest.approx(alone.total(Place.HOST) + waiting, rel=1e-6)
        assert one.total(Place.DISK) * count == pytest.approx(alone.total(Place.DISK), rel=1e-6)
        assert one.total(Place.DEVICE) == alone.total(Place.DEVICE)


SMALL = LLAMA_8B | {"num_hidden_layers": 6, "vocab_size": 32_000}


@pytest.mark.extended
@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("what", ["devices", "nodes", "peers", "network", "host memory", "link"])
@settings(max_examples=10, derandomize=True, database=None)
@given(st.data())
def test_more_is_never_less_throughput(what: str, data: st.DataObject) -> None:
    """Of a node that stays as it is, more of its devices; of several nodes, more; and faster ones of each kind."""
    peer = data.draw(st.sampled_from(["none", "pcie", "fabric"]))
    rates = {
        "link": data.draw(st.sampled_from([6e9, 25e9, 50e9])),
        "host": data.draw(st.sampled_from([40e9, 150e9, 600e9])),
        "network": data.draw(st.sampled_from([1e9, 10e9, 300e9])),
    }
    if peer == "fabric":
        rates["peers"] = data.draw(st.sampled_from([30e9, 200e9]))
    few = data.draw(st.sampled_from([1, 2, 4]))
    fixed: dict[str, Any] = {
        "sequence_length": 512,
        "batch_size": data.draw(st.sampled_from([1, 8])),
        "micro_batches": data.draw(st.sampled_from([1, 3])),
        "overlap": data.draw(st.sampled_from(["none", "forward", "backward"])),
        "method": "stream-weights,state=host,activations=recomputed",
        "device_memory": data.draw(st.integers(6, 24)) * 10**9,
        "devices": 8,
        "nodes": data.draw(st.sampled_from([1, 2])),
    }
    more: dict[str, Any] = {}
    faster: dict[str, Any] = {}
    if what == "devices":
        fixed["devices"], more = few, {"devices": 2 * few}
    elif what == "nodes":
        fixed["nodes"], more = few + 1, {"nodes": 2 * few + 1}
    else:
        name = what.removesuffix(" memory")
        if name not in rates:
            return
        faster = {name: 2 * rates[name]}
    machines = [headrace.Hardware.named("8x4090").changed(peer=peer, **rates | changed) for changed in ({}, faster)]

    def tokens_per_second() -> list[Any]:
        pairs = zip(machines, ({}, more), strict=True)
        return [headrace.plan(SMALL, hardware=one, **{**fixed, **changed}).tokens_per_second for one, changed in pairs]

    before, after = tokens_per_second()
    if before is not None and after is not None and after < before * 0.98:  # a longer search tells
        with mock.patch.object(search, "TRIALS", TRIALS):
            before, after = tokens_per_second()
    assert before is None or after >= before * 0.98


def test_the_plan_of_many_nodes_is_the_golden_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "llama-70b.json"
    path.write_text(json.dumps(LLAMA_70B))
    asked = ["--hardware", "8xh100", "--devices", "8", "--nodes", "16", "--batch-size", "4", "--overlap", "forward"]
    assert main(["plan", str(path), *asked]) == 0
    text = capsys.readouterr().out
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.usefixtures("short_search")
def test_what_bounds_and_who_shares_is_told() -> None:
    machine = headrace.Hardware.named("8x4090").changed(host="20GB/s")
    settings = {"hardware": machine, "devices": 8, "batch_size": 4, "host_memory": "800GB"}
    plan = headrace.plan(SMALL, **settings, nodes=2, method="stream-weights")
    text = plan.to_text()
    assert "data 16, on 2 nodes" in text
    assert "copies    one on each of 2 nodes, shared by 8 devices; weights whole over each link;" in text
    assert "gradients summed on the host" in text
    assert "bound by  host memory" in text
    assert plan.not_run == ()
    assert plan.to_dict()["sharing"]["ranks"] == 8
    assert plan.to_dict()["spread"]["nodes"] == 2
    assert plan.tokens_per_second == pytest.approx(16 * 4 * 2048 / plan.step_seconds)  # type: ignore[operator]
    lone = headrace.plan(SMALL, hardware="4090", nodes=3, method="stream-weights").to_text()
    assert "copies    one on each of 3 nodes\n" in lone


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": 0}, "devices=0; give at least 1"),
        ({"nodes": 0}, "nodes=0; give at least 1"),
        ({"nodes": -2, "devices": 8}, "nodes=-2; give at least 1"),
        ({"nodes": 2, "network": 0}, "nodes=2 but the network of 8x4090 is not known; give it"),
        ({"devices": 8, "peer": "usb"}, "peer is 'usb'; give one of fabric, pcie, none"),
        ({"devices": 8, "peer": "fabric"}, "peer='fabric' of which speed"),
        ({"devices": 8, "peers": 1e9}, "devices of 8x4090 do not reach each other; give peer, too"),
        ({"devices": 8, "peer": "fabric", "peers": 0}, "no speed of them"),
        ({"nodes": 2, "network": -1}, "node_bytes_per_second is -1"),
        ({"nodes": 3, "devices": 8, "update": float("nan")}, "update_bytes_per_second is nan"),
    ],
)
def test_nonsense_is_refused(arguments: dict[str, Any], message: str) -> None:
    figures = {name: value for name, value in arguments.items() if name in ("network", "peer", "peers", "update")}
    asked = {name: value for name, value in arguments.items() if name not in figures}
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        headrace.plan(LLAMA_8B, hardware=headrace.Hardware.named("8x4090").changed(**figures), **asked)


def test_what_does_not_fit_says_how_much_for_the_node() -> None:
    """16 bytes a parameter of one copy, 1.13 TB, for 512 GB: as much is missing as for one process, but for staging."""
    plan = headrace.plan(LLAMA_70B, hardware="8x4090", nodes=4, disk=False, method="stream-weights")
    assert not plan.fits
    assert plan.tiers.total(Place.HOST) * 8 == pytest.approx(14 * 70.55e9, rel=0.05)
    assert plan.shortfall
    assert any(fix.endswith("of host memory in the node") for fix in plan.shortfall.fixes)


@pytest.mark.extended
@pytest.mark.parametrize("model", ["8B", "70B"])
def test_the_page_has_what_the_program_prints(model: str) -> None:
    """Rows of its first table: those that take seconds. All are made by the command that the page names."""
    page = (ROOT / "docs" / "many_devices.md").read_text()
    assert "`PYTHONPATH=. python benchmarks/many_devices.py`" in page
    for case in many_devices.sized():
        if case.model == model:
            assert f"| {' | '.join(many_devices.sized_row(case))} |" in page
    heads = [line for line in page.splitlines() if line.startswith("| ") and "tokens/s" in line and "---" not in line]
    assert "tokens/s, simulated" in heads[0]


@pytest.mark.extended
def test_every_published_figure_of_the_page_has_its_source() -> None:
    page = (ROOT / "docs" / "many_devices.md").read_text()
    rows = list(many_devices.published())
    assert len(rows) == 19
    for name, measured, case, source in rows:
        (line,) = [
            line for line in page.splitlines() if line.startswith(f"| {name} | {measured} | {case.machine} | ")
        ] or [""]
        assert line.endswith(f" | {source} |"), name
        assert re.search(rf"^\[{source.split('[')[-1][:-1]}\]: https://", page, re.MULTILINE)
