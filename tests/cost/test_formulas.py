"""Do the public formulas say what is right? Against numbers worked out by hand, and schedules walked through."""

import inspect
import math

import pytest

import headrace.formulas as f
from headrace.optim.eight_bit import RECORD_BYTES, RUN_ELEMENTS

GB = 1e9


def walk(compute: float, transfer: float, layers: int, depth: int) -> float:
    """Seconds of a pass by stepping a clock: one link, `depth` layers ahead of the one that computes at most."""
    arrived: list[float] = []
    begun: list[float] = []
    link = done = 0.0
    for layer in range(layers):
        while len(arrived) < min(layers, layer + 1 + depth):
            # Sent for when the layer `depth` before it begins; with no depth, when that layer is over.
            index = len(arrived)
            if index <= depth:
                asked = 0.0
            elif depth:
                if index - depth >= len(begun):
                    break
                asked = begun[index - depth]
            else:
                asked = done
            link = max(link, asked) + transfer
            arrived.append(link)
        begun.append(max(done, arrived[layer]))
        done = begun[layer] + compute
    return done


@pytest.mark.parametrize(("compute", "transfer"), [(5.0, 3.0), (5.0, 5.0), (3.0, 5.0), (1.0, 9.0)])
def test_a_schedule_walked_through_agrees(compute: float, transfer: float) -> None:
    layers = 500
    for depth in (1, 2, 5):
        seconds = walk(compute, transfer, layers, depth)
        assert f.step_seconds(compute * layers, transfer * layers, layers=layers) == pytest.approx(seconds)
    busy = compute * layers / walk(compute, transfer, layers, 1) > 0.98
    assert busy is (f.prefetch_depth(transfer, compute) is not None)


def test_prefetch_depth_of_a_chain() -> None:
    """8 ms from disk, 6 over the link, 10 of compute: a block is on its way for 14 ms, in which two are used up."""
    assert f.prefetch_depth([0.008, 0.006], 0.010) == 2
    assert f.prefetch_depth([0.011, 0.002], 0.010) is None  # the disk alone is too slow, whatever is prefetched
    assert f.prefetch_depth([0.004, 0.004], 0.010) == 1
    assert f.prefetch_depth(0.010, 0.010) == 1


def test_step_of_one_layer_is_the_sum() -> None:
    assert f.step_seconds(2.0, 3.0) == 5.0
    assert f.step_seconds(2.0, 3.0, layers=10**6, sync_seconds=0.5) == pytest.approx(3.5, abs=1e-4)


def test_keeping_some_blocks_hides_the_rest() -> None:
    """Two thirds of the transfer is what compute covers: a third of the blocks stays, or half as many tokens more."""
    assert f.resident_fraction(3.0, 2.0) == pytest.approx(1 / 3)
    assert f.batch_multiplier(3.0, 2.0) == 1.5
    assert f.resident_fraction(1.0, 2.0) == 0.0
    assert f.batch_multiplier(1.0, 2.0) == 1.0


def test_tokens_to_hide_make_the_intensity_of_the_machine() -> None:
    """1 TFLOP/s over 10 GB/s asks for 100 operations a byte: 100 tokens of 2 operations on 2 bytes, 50 of 4."""
    assert f.tokens_to_hide(2, 1e12, 10 * GB) == 100
    assert f.tokens_to_hide(2, 1e12, 10 * GB, flops_per_parameter=4) == 50
    # Of 8 experts one is met: 8 times the bytes for the same operations.
    assert f.tokens_to_hide(2, 1e12, 10 * GB, total_over_active=8) == 800
    # A layer of width 1000 by hand: 12e6 parameters, 24e6 bytes in 2.4 ms; 100 tokens are 2.4e9 operations, 2.4 ms.
    assert 24e6 / (10 * GB) == 2 * 12e6 * 100 / 1e12


def test_attention_as_long_as_six_widths_halves_the_tokens() -> None:
    """4 S H for scores and values beside 24 H^2 for matrices: equal at S = 6 H."""
    width, context = 512, 6 * 512
    assert 4 * context * width == 24 * width**2
    plain, long = (f.tokens_to_hide(2, 1e12, 1e10, context_over_hidden=share) for share in (0.0, context / width))
    assert long == plain / 2


def test_efficiency_and_overlap() -> None:
    """10 s of compute and 8 of transfers in 12 s: 6 of 8 were hidden, and 5 of 6 is the speed."""
    assert f.efficiency(10, 12) == pytest.approx(5 / 6)
    assert f.overlap(10, 8, 12) == 0.75
    assert f.overlap(10, 8, 18) == 0.0
    assert f.overlap(10, 0, 10) == 1.0


def test_compression_by_hand() -> None:
    """12 MB in chunks of 1: the slowest stage takes 12 times its chunk."""
    twice = f.compression_break_even(12e6, 2.0, 3e6, 6e6, 1e6)
    assert (twice.plain_seconds, twice.serial_seconds, twice.pipelined_seconds) == (12.0, 4 + 6 + 2, 6.0)
    assert twice.pays
    assert twice.gain == 2.0
    assert not twice.pays_serially  # no sooner than without
    assert twice.needed_rate == 1e6
    slow_reader = f.compression_break_even(12e6, 100.0, math.inf, 0.9e6, 1e6)
    assert not slow_reader.pays  # whatever the ratio, decoding takes longer than the plain bytes
    raw = f.compression_break_even(12e6, 1.01, math.inf, math.inf, 1e6)
    assert raw.gain == 1.0
    assert not raw.pays


@pytest.mark.parametrize(
    ("precision", "each"),
    [
        (f.Precision(), 16),  # 2 + 2 + 4 + 8
        (f.Precision(weight=4, gradient=4, master=0, state=8), 16),
        (f.Precision(master=2), 14),
        (f.Precision(state=0), 8),  # SGD
        (f.Precision(state=2 * RECORD_BYTES / RUN_ELEMENTS), 10.0625),
    ],
)
def test_one_device_holds_all(precision: f.Precision, each: float) -> None:
    found = {f.memory_table(1e9, stage=stage, precision=precision).device_bytes for stage in range(4)}
    assert found == {each * 1e9}


def test_zero_stages_by_hand() -> None:
    """6B on 4 devices in mixed precision. Weights 12 GB, gradients 12, master 24, moments 48."""
    in_gb = [f.memory_table(6e9, stage=stage, data=4).device_bytes / GB for stage in range(4)]
    assert in_gb == [12 + 12 + 72, 12 + 12 + 18, 12 + 3 + 18, 3 + 3 + 18]
    assert f.memory_table(6e9, stage=3, data=4, tensor=2).device_bytes / GB == 12
    offloaded = [
        f.memory_table(6e9, stage=stage, data=4, offload=away)
        for stage, away in ((1, ["state"]), (2, ["state", "gradients"]), (3, ["state", "gradients", "weights"]))
    ]
    assert [(table.device_bytes / GB, table.host_bytes / GB) for table in offloaded] == [(24, 18), (12, 21), (0, 24)]


def test_what_is_in_use_stays_on_the_device() -> None:
    """Blocks of 0.1B: two arrive or compute (0.4 GB), and the gradients of two leave (0.4 GB)."""
    table = f.memory_table(
        6e9, offload=["state", "gradients", "weights"], block_parameters=0.1e9, activation_bytes=3 * GB
    )
    assert {row.purpose: (row.device_bytes / GB, row.host_bytes / GB) for row in table.rows} == {
        "weights": (0.4, 12),
        "gradients": (0.4, 12),
        "master weights": (0, 24),
        "optimizer state": (0, 48),
        "activations": (3, 0),
    }
    assert table.device_bytes == pytest.approx(3.8 * GB)
    assert "in all                3.80     96.00" in table.to_text()
    gathered = f.memory_table(6e9, stage=3, data=4, block_parameters=0.1e9)
    assert gathered.rows[0].device_bytes == pytest.approx(3.4 * GB)  # a quarter, and two whole blocks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stage": 4, "data": 2}, "stage=4; ZeRO has the stages 0 to 3"),
        ({"stage": 1, "data": 0}, "data=0, tensor=1"),
        (
            {"stage": 1, "data": 2, "offload": ["optimizer"]},
            "offload='optimizer'; give any of state, gradients, weights",
        ),
    ],
)
def test_refusals(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        f.memory_table(1e9, **settings)


def test_activations_of_a_layer_counted_one_by_one() -> None:
    """Bytes for each token and width, in 16 bits: what each operation of a plain layer keeps for backward."""
    attention = 2 + 2 + 2 + 2 + 2 + 1  # input of QKV, Q, K, V, input of the projection, its dropout's mask
    mlp = 2 + 8 + 8 + 1  # input, GELU's input, second matrix's input, mask
    norms = 2 + 2
    assert f.layer_activation_bytes(1, 1) == attention + mlp + norms
    scores = 2 + 2 + 1  # softmax's output, the masked one, the mask: for each head and position
    assert f.layer_activation_bytes(1, 8, heads=4, sequence_length=100) == 34 * 8 + scores * 4 * 100
    assert f.layer_activation_bytes(7, 8, recomputed=True) == 2 * 7 * 8
    assert f.layer_activation_bytes(1, 1, tensor=8) == 10 + 3


def test_reserved_blocks() -> None:
    assert f.reserved_peak_blocks(40, 2) == 5
    assert f.reserved_peak_blocks(4, 2) == 4
    assert f.reserved_peak_blocks(40, 0) == 1


def test_wear_and_codecs() -> None:
    assert f.wear_steps(2.0, 1000.0) == 500
    assert f.wear_steps(0.0, 1000.0) == math.inf
    assert f.codec_cores(read_rate=0.38 * GB, write_rate=0.0) == 1
    assert f.codec_cores(read_rate=0.0, write_rate=0.9 * GB) == 3
    assert f.codec_cores(read_rate=0.0, write_rate=0.0) == 0


def test_every_formula_is_documented() -> None:
    for name in f.__all__:
        value = getattr(f, name)
        if callable(value):
            assert len(inspect.getdoc(value) or "") > 40, name
