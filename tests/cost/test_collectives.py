"""What do collectives cost, and what do they hide behind? Each figure is worked out by hand beside its test."""

import dataclasses
from typing import Any

import pytest

import headrace
from headrace.planning import Phase, Problem, Visit, make_plan
from headrace.planning.cost import Activations, BlockKind, Hardware, Method, Place, Spread, Training, Work
from headrace.planning.cost.collectives import collective_seconds, tensor_seconds
from headrace.planning.cost.forecast import run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.shape import BlockShape, ModelShape
from headrace.planning.cost.step import StepForecast, forecast_step
from headrace.planning.cost.traffic import BlockTraffic
from tests.cost.conftest import LLAMA_8B
from tests.cost.test_step import FAST

RATE = 1e9
NODE = FAST.changed(devices=8, collective_bytes_per_second=RATE)
BLOCKS = 4
ON_DEVICE = Method(weights=Place.DEVICE, state=Place.DEVICE, activations=Activations.KEPT)


def step(*, closing: float = 0.0, within: float = 0.0, streamed: bool = False, **traffic: Any) -> StepForecast:
    """Four blocks: forward takes 1 s each, backward 2 s, so 12 s of compute."""
    forward = [Visit(blocks=(b,), compute_seconds=1.0) for b in range(BLOCKS)]
    backward = [Visit(blocks=(b,), phase=Phase.BACKWARD, compute_seconds=2.0) for b in reversed(range(BLOCKS))]
    plan = make_plan(
        Problem(
            block_bytes=(10**9,) * BLOCKS,
            load_seconds=(max(traffic.get("gather_seconds", 0.0), 0.25),) * BLOCKS,
            visits=(*forward, *backward),
            budget_bytes=(2 if streamed else BLOCKS) * 10**9,
            residents=frozenset() if streamed else frozenset(range(BLOCKS)),
        )
    )
    collectives = (within,) * 2 * BLOCKS
    shares = [BlockTraffic(**traffic)] * BLOCKS
    return forecast_step(plan, shares, FAST, closing_seconds=closing, visit_collectives=collectives)


@pytest.mark.parametrize(
    ("reduce", "seconds"),
    [
        (1.5, 12 + 1.5 + 0.5),  # each behind the backward of the next block; the last one has none
        (3.0, 4 + 2 + 4 * 3 + 0.5),  # the first begins with the first backward's end; then one after the other
    ],
)
def test_gradients_are_reduced_beside_backward(reduce: float, seconds: float) -> None:
    forecast = step(reduce_seconds=reduce, closing=0.5)
    assert forecast.seconds == pytest.approx(seconds)
    assert forecast.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(4 * reduce)
    (stall,) = [stall for stall in forecast.stalls if stall.lane is CostLane.COLLECTIVE]
    assert (stall.name, stall.waited_for) == ("update on the device", "reduce 0")


@pytest.mark.parametrize(
    ("gather", "seconds"),
    [
        (0.5, 0.5 + 12),  # one block ahead: only the first of the step is waited for
        (3.0, 8 * 3 + 2),  # slower than compute: all of them, and the last block's backward
    ],
)
def test_shards_are_gathered_one_block_ahead(gather: float, seconds: float) -> None:
    forecast = step(gather_seconds=gather)
    assert forecast.seconds == pytest.approx(seconds)
    assert forecast.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(8 * gather)


def test_updated_weights_are_passed_on_before_the_next_step() -> None:
    forecast = step(reduce_seconds=1.0, pass_on_seconds=0.75, closing=0.5)
    assert forecast.seconds == pytest.approx(12 + 1 + 0.5 + 4 * 0.75)


def test_nothing_runs_beside_the_collectives_within_a_layer() -> None:
    forecast = step(within=0.25)
    assert forecast.seconds == pytest.approx(12)
    assert forecast.compute_seconds == pytest.approx(12 - 8 * 0.25)
    assert forecast.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(8 * 0.25)


def test_a_streamed_shard_is_gathered_behind_its_load() -> None:
    """A fourth of each block crosses the own link, in 0.25 s; the rest comes from the other devices."""
    forecast = step(streamed=True, load_bytes=250_000_000, gather_seconds=0.5)
    loads = sum(task.lane is CostLane.ONLOAD for task in forecast.tasks)
    assert loads >= BLOCKS
    assert forecast.moved_bytes[CostLane.ONLOAD] == loads * 250_000_000
    assert forecast.busy_seconds[CostLane.ONLOAD] == pytest.approx(loads * 0.25)
    assert forecast.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(loads * 0.5)


def decoder(layers: int = 4, *, hidden: int = 1000, each: int = 10**8) -> ModelShape:
    blocks = (
        BlockShape(
            name=f"layer {index}",
            kind=BlockKind.LAYER,
            parameters=each,
            active_parameters=each,
            trainable=each,
            saved_elements=10.0 * hidden,
            input_elements=hidden,
        )
        for index in range(layers)
    )
    return ModelShape(name="decoder", blocks=tuple(blocks))


@pytest.mark.parametrize(
    ("spread", "seconds"),
    [
        # 0.4 G parameters in 16 bits are 0.8 GB; a ring over 4 carries 3/4 of them, at 1 GB/s.
        (Spread(data=4), 2 * 0.6),  # an all-reduce
        (Spread(data=4, zero_stage=1), 0.6 + 0.6),  # a scatter of gradients, a gather of weights
        (Spread(data=4, zero_stage=2), 0.6 + 0.6),
        (Spread(data=4, zero_stage=3), 0.6 + 2 * 0.6),  # a gather for each pass
        # Hidden states: 2 x 1000 elements of 2 bytes at 500 tokens = 1 MB each way; half of a ring, twice in an
        # all-reduce, two of these in each pass of a layer: 4 layers x 4 x 2 x 1/2 x 1 MB = 16 MB.
        (Spread(tensor=2), 0.016),
        (Spread(pipeline=2), 0.002),  # in, and the gradient back
        (Spread(), 0.0),
    ],
)
def test_volumes_of_a_step(spread: Spread, seconds: float) -> None:
    work = Work(sequence_length=500)
    found = collective_seconds(decoder(), work, spread, ON_DEVICE, NODE, 0)
    assert found == pytest.approx(seconds)


def test_inference_sums_up_nothing() -> None:
    work = Work(sequence_length=500, training=Training.NONE)
    shape = decoder().frozen()
    assert collective_seconds(shape, work, Spread(data=4), ON_DEVICE, NODE, 0) == 0
    assert collective_seconds(shape, work, Spread(data=4, zero_stage=3), ON_DEVICE, NODE, 0) == pytest.approx(0.6)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "method",
    [ON_DEVICE, dataclasses.replace(ON_DEVICE, state=Place.HOST), dataclasses.replace(ON_DEVICE, state=Place.DISK)],
)
def test_the_lane_is_busy_as_long_as_the_floor_says(method: Method, stage: int, micro_batches: int) -> None:
    work = Work(sequence_length=500, micro_batches=micro_batches)
    spread = Spread(data=4, tensor=2, zero_stage=stage)
    run = run_of(decoder(), work, spread, method, NODE.changed(disk_read_bytes_per_second=1e9))
    assert run.step.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(run.floors.collective_seconds)
    assert run.seconds >= run.floors.longest


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("weights", Place)
def test_updated_weights_are_passed_on_wherever_they_rest(weights: Place, stage: int) -> None:
    method = dataclasses.replace(ON_DEVICE, weights=weights, state=Place.DISK)
    run = run_of(decoder(), Work(sequence_length=500), Spread(data=4, zero_stage=stage), method, NODE)
    assert run.step.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(0.6 + 0.6)
    assert run.floors.collective_seconds == pytest.approx(0.6 + 0.6)


def test_devices_of_one_node_do_not_talk_over_the_network() -> None:
    slow = NODE.changed(node_bytes_per_second=RATE / 100)
    work = Work(sequence_length=500)
    for spread in (Spread(tensor=2), Spread(data=8)):
        near, far = (run_of(decoder(), work, spread, ON_DEVICE, hardware).seconds for hardware in (NODE, slow))
        assert near == pytest.approx(far)
    assert tensor_seconds(decoder(), work, Spread(tensor=16), slow) > 50 * tensor_seconds(
        decoder(), work, Spread(tensor=8), slow
    )


def test_gathered_weights_are_held(exercise_node: Hardware) -> None:
    plan = headrace.plan(LLAMA_8B, hardware=exercise_node, devices=8, zero_stage=3)
    held = {item.purpose: item.nbytes for item in plan.tiers.held if item.place is Place.DEVICE}
    largest = sorted((block.weight_bytes for block in plan.part.blocks), reverse=True)[:2]
    assert held["gathered weights"] == pytest.approx(sum(largest) * 7 / 8, abs=2)
    assert "collective" in plan.to_text()
