"""What are the right answers to the exercises of the offloading tutorial? The tutorial's own stand beside them."""

import math

import pytest

import headrace.formulas as f
from headrace.planning.cost import Case, Hardware, Overlap, Place, Spread, Work, plan_run
from headrace.planning.cost.choose import options
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.tiers import tiers_of
from headrace.planning.cost.work import Activations, Method
from headrace.shapes import shape_of
from tests.cost.conftest import QWEN3_30B_A3B, plain

GB = 1e9


def test_10b_gradients_and_update() -> None:
    """The tutorial: 4N bytes of gradients in 1.25 s. They travel in 16 bits, and the update is left out there."""
    parameters = 10e9
    assert 4 * parameters / (32 * GB) == 1.25  # the tutorial's
    assert 2 * parameters / (32 * GB) == 0.625
    assert 2 * parameters / (25 * GB) == 0.8  # at the rate that a link reaches
    # Of the update: gradient and weight 2 bytes each, master and two moments of 4 read and written.
    assert (2 + 2 + 3 * 8) * parameters / (200 * GB) == pytest.approx(1.4)


def test_tokens_to_hide() -> None:
    assert f.tokens_to_hide(2, 312e12, 32 * GB) == pytest.approx(9750)  # as the tutorial, at the sold rates
    assert f.tokens_to_hide(2, 156e12, 25 * GB) == pytest.approx(6240)
    assert f.tokens_to_hide(2, 989e12, 64 * GB) == pytest.approx(15453, rel=1e-4)
    assert f.tokens_to_hide(2, 0.4 * 989e12, 52 * GB) == pytest.approx(7608, rel=1e-3)
    backward = f.tokens_to_hide(2, 312e12, 32 * GB, flops_per_parameter=4)
    recomputing = f.tokens_to_hide(2, 312e12, 32 * GB, flops_per_parameter=6)
    assert (backward, recomputing) == (pytest.approx(4875), pytest.approx(3250))
    assert f.tokens_to_hide(0.5, 312e12, 32 * GB) == pytest.approx(2437.5)  # a frozen base of 4 bits
    assert f.tokens_to_hide(2, 312e12, 32 * GB, total_over_active=10) == pytest.approx(97500)
    assert f.tokens_to_hide(2, 312e12, 32 * GB, context_over_hidden=6) == pytest.approx(4875)


def test_70b_overlap() -> None:
    """Exercise 1. The tutorial asks for 2.5 times the batch; 2.19 times is enough, and twice is 91% efficient."""
    weights = 2 * 70e9
    transfer = weights / (32 * GB)
    assert transfer == 4.375
    assert f.batch_multiplier(transfer, 2.0) == 2.1875
    layer_transfer, layer_compute = transfer / 80, 2.0 / 80
    assert (layer_transfer, layer_compute) == (pytest.approx(54.7e-3, rel=1e-3), 0.025)
    doubled = f.step_seconds(2 * 2.0, transfer, layers=80)
    assert f.efficiency(2 * 2.0, doubled) == pytest.approx(0.914, abs=0.012)
    enough = f.step_seconds(2.1875 * 2.0, transfer, layers=80)
    assert f.efficiency(2.1875 * 2.0, enough) > 0.98  # all but the first load
    assert weights / (25 * GB) == 5.6
    assert f.batch_multiplier(5.6, 2.0) == pytest.approx(2.8)
    assert f.resident_fraction(layer_transfer, layer_compute) == pytest.approx(0.543, abs=1e-3)


def test_500b_fits_with_state_on_disk(exercise_node: Hardware) -> None:
    """Exercise 2. The tutorial's host plan sums to 2.2 TB of 2; 1.37 TB do when layers are updated in backward."""
    shape = shape_of(plain(layers=120, hidden=18_634, heads=121))
    assert shape.parameters == pytest.approx(500e9, rel=0.005)
    assert exercise_node.host_memory_bytes < 1e12 + 1e12 + 0.2e12  # the tutorial's own sum
    per_layer = Method(
        weights=Place.HOST, state=Place.DISK, activations=Activations.RECOMPUTED, overlap=Overlap.BACKWARD
    )
    one = exercise_node.changed(devices=1)
    host = tiers_of(Case(shape, Work(), Spread(), per_layer, one))
    by_purpose = {held.purpose: held.nbytes for held in host.held if held.place is Place.HOST}
    assert by_purpose["weights"] == pytest.approx(1e12, rel=0.01)
    assert by_purpose["gradients"] == pytest.approx(17e9, rel=0.03)  # two layers'; the tutorial says 12 GB
    assert by_purpose["staging"] == pytest.approx(150e9, rel=0.03)
    assert host.total(Place.HOST) + 0.2e12 == pytest.approx(1.37e12, rel=0.01)
    # The state is read and written: 214 s there, 300 s and more here.
    state = 12 * shape.parameters
    assert state / (28 * GB) == pytest.approx(214, rel=0.01)
    assert state / (28 * GB) + state / (28 * GB) == pytest.approx(428, rel=0.01)
    assert f.wear_steps(state, exercise_node.disk_endurance_bytes) == pytest.approx(6_083, rel=0.01)


@pytest.mark.usefixtures("short_search")
def test_500b_without_a_disk_does_not_fit(exercise_node: Hardware) -> None:
    shape = shape_of(plain(layers=120, hidden=18_634, heads=121))
    spread = Spread(data=8, zero_stage=2)
    with_disk = plan_run(shape, exercise_node, Work(), spread, overlap=Overlap.BACKWARD)
    assert with_disk.fits
    assert with_disk.method.state is Place.DISK
    assert with_disk.run is not None
    assert with_disk.run.floors.fetch_seconds >= 12 * shape.parameters / (28 * GB)
    without = plan_run(shape, exercise_node, Work(), spread, disk=False)
    assert not without.fits
    assert without.shortfall is not None
    assert without.shortfall.lacks[0][0] is Place.HOST


@pytest.mark.usefixtures("short_search")
def test_175b_on_one_node(exercise_node: Hardware) -> None:
    """The case study says that it trains with the optimizer in 2 TB; that leaves out the master weights."""
    shape = shape_of(plain(layers=96, hidden=12_288, heads=96))
    assert shape.parameters == pytest.approx(175e9, rel=0.01)
    assert 8 * shape.parameters == pytest.approx(1.4e12, rel=0.01)  # the tutorial's: moments alone
    assert 12 * shape.parameters > exercise_node.host_memory_bytes
    spread = Spread(data=8, zero_stage=2)
    lacking = options(shape, Work(), spread, exercise_node, Overlap.NONE, disk=False)
    assert all(option.lacks for option in lacking)
    planned = plan_run(shape, exercise_node, Work(), spread)
    assert planned.fits
    assert Place.DISK in (planned.method.state, planned.method.weights)


def test_zero_with_tensor_parallelism() -> None:
    """The tutorial's 5.5 GB counts weights alone."""
    assert pytest.approx(5.47e9, rel=1e-3) == 2 * 175e9 / 64
    assert f.memory_table(175e9, stage=3, data=8, tensor=8).device_bytes == pytest.approx(43.75e9)
    stages = [f.memory_table(1e9, stage=stage, data=8).device_bytes for stage in range(4)]
    assert stages == [16e9, 5.5e9, 3.75e9, 2e9]


def test_overlap_efficiency() -> None:
    """Exercise 3, which is right as arithmetic; double buffering is the same gain counted twice there."""
    assert f.efficiency(0.1, 0.185) == pytest.approx(0.5405, abs=1e-4)
    assert f.efficiency(0.1, 0.105) == pytest.approx(0.952, abs=1e-3)
    assert f.efficiency(0.1, 0.101) == pytest.approx(0.990, abs=1e-3)
    assert f.overlap(0.1, 0.08, 0.105) == pytest.approx(0.9375)


def test_a_third_buffer_adds_no_bandwidth() -> None:
    """Exercise 4. The tutorial: 80 ms with two buffers and 50 with three, "1.6 times". On one link both take 80."""

    def per_layer(computes: list[float], transfers: list[float], buffers: int, links: int = 1) -> float:
        free, ends = [0.0] * links, [0.0]
        for layer, (compute, transfer) in enumerate(zip(computes * 500, transfers * 500, strict=True)):
            link = free.index(min(free))
            free[link] = max(free[link], ends[max(0, layer + 1 - buffers)]) + transfer
            ends.append(max(free[link], ends[-1]) + compute)
        return ends[-1] / len(computes * 500)

    assert [per_layer([0.05], [0.08], buffers) for buffers in (2, 3, 4)] == [pytest.approx(80e-3, rel=2e-3)] * 3
    uneven = [per_layer([0.06, 0.04], [0.02, 0.078], buffers) for buffers in (2, 3)]
    assert uneven[0] == pytest.approx(59e-3, rel=0.01)
    assert uneven[1] == pytest.approx(50e-3, rel=0.01)  # what a third buffer is for: variance
    # Two links would carry it: 65 ms with two buffers, 50 with three.
    links = [per_layer([0.05], [0.08], buffers, links=2) for buffers in (2, 3)]
    assert links == [pytest.approx(65e-3, rel=0.01), pytest.approx(50e-3, rel=0.01)]


def test_compression() -> None:
    """Exercise 5, right for one after the other; in chunks the condition is C > B alone."""
    lz4 = f.compression_break_even(10 * GB, 1.5, 2 * GB, math.inf, 7 * GB)
    assert lz4.plain_seconds == pytest.approx(1.43, abs=0.01)
    assert lz4.serial_seconds == pytest.approx(5.95, abs=0.01)
    assert not lz4.pays
    assert pytest.approx(21) == 7 / (1 - 1 / 1.5)  # GB/s: the tutorial's break-even
    device = f.compression_break_even(10 * GB, 1.5, 50 * GB, math.inf, 7 * GB)
    assert device.plain_seconds / device.serial_seconds == pytest.approx(1.24, abs=0.01)
    assert device.gain == pytest.approx(1.5)
    huge = f.compression_break_even(10 * GB, 10, 2 * GB, math.inf, 7 * GB)
    assert not huge.pays  # the tutorial says that a ratio above 10 does
    spinning = f.compression_break_even(10 * GB, 1.5, 2 * GB, math.inf, 0.2 * GB)
    assert spinning.serial_seconds == pytest.approx(38.3, abs=0.1)
    assert spinning.pipelined_seconds == pytest.approx(33.3, abs=0.1)
    weights = f.compression_break_even(10 * GB, 1.0, 50 * GB, math.inf, 7 * GB)  # LZ4 on bf16 weights
    assert not weights.pays
    assert f.codec_cores(read_rate=7 * GB, write_rate=0.0) == 19  # byte planes and zstd, on cores of their own
    assert f.codec_cores(read_rate=0.0, write_rate=7 * GB) == 18


def test_prefetch_depth() -> None:
    """Exercise 6. The tutorial asks for a depth of 2 and calls compute busy; 40 GB/s do not go through 32."""
    transfer = 2 * GB / (32 * GB)
    assert transfer == 0.0625
    assert math.ceil(transfer / 0.05) == 2  # the tutorial's
    assert f.prefetch_depth(transfer, 0.05) is None
    assert f.prefetch_depth(0.04, 0.05) == 1
    assert f.prefetch_depth([0.05, 0.03], 0.05) == 2  # disk to host to device
    assert f.step_seconds(400 * 0.05, 400 * transfer, layers=400) / 400 == pytest.approx(transfer, rel=0.01)


def test_qwen3_30b_a3b_optimizer_offload() -> None:
    """A published table: 996 ms a step on 16 devices, and 1871, 2484, 3187, 4189 with 25 to 100% of the optimizer off.

    Its slope is that of an update of 1.906B parameters on each device at 134 GB/s of DRAM for 8 devices. It saved 8
    bytes per parameter: the moments; the masters stayed.
    """
    shape = shape_of(QWEN3_30B_A3B)
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(3.35e9, rel=0.05)
    own = 1.906e9
    for share, published in ((0.25, 1.871), (0.5, 2.484), (0.75, 3.187), (1.0, 4.189)):
        predicted = 0.996 + share * own * 28 / (134 * GB / 8)
        assert predicted == pytest.approx(published, rel=0.07)
    assert 8 * own == pytest.approx(47.2e9 - 32.0e9, rel=0.01)


def test_update_beside_the_next_forward(exercise_node: Hardware) -> None:
    """What the tutorial's systems leave open: exact clipping needs all gradients, and the update hides all the same."""
    shape = shape_of(plain(layers=12, hidden=8192, heads=64))
    one = exercise_node.changed(devices=1, device_memory_bytes=24 * 10**9)
    seconds = {}
    for overlap in Overlap:
        method = Method(weights=Place.HOST, state=Place.HOST, activations=Activations.RECOMPUTED, overlap=overlap)
        from headrace.planning.cost.forecast import run_of

        seconds[overlap] = run_of(Case(shape, Work(batch_size=4), Spread(), method, one))
    none, forward, backward = (seconds[overlap].seconds for overlap in Overlap)
    compute = seconds[Overlap.NONE].floors.compute_seconds
    assert none > forward > backward
    assert none > compute + seconds[Overlap.NONE].floors.update_seconds > forward
    assert seconds[Overlap.FORWARD].step.busy_seconds[CostLane.UPDATE] > 0
