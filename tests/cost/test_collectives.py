"""What do collectives cost, and what do they hide behind? Each figure is worked out by hand beside its test."""

import dataclasses
from typing import Any

import pytest

from headrace.planning import Phase, Problem, Visit, make_plan
from headrace.planning.cost import Activations, BlockKind, Case, Hardware, Method, Place, Spread, Training, Work
from headrace.planning.cost.forecast import option_of, run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.shape import BlockShape, ModelShape
from headrace.planning.cost.step import StepForecast, forecast_step
from headrace.planning.cost.traffic import BlockTraffic
from tests.cost.test_step import FAST

RATE = 1e9
NODE = FAST.changed(devices=8, collective_bytes_per_second=RATE)
BLOCKS = 4
ON_DEVICE = Method(weights=Place.DEVICE, state=Place.DEVICE, activations=Activations.KEPT)


def step(*, closing: float = 0.0, streamed: bool = False, **traffic: Any) -> StepForecast:
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
    return forecast_step(plan, [BlockTraffic(device_update_seconds=closing / BLOCKS, **traffic)] * BLOCKS, FAST)


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


def test_updated_weights_are_passed_on_before_the_next_step() -> None:
    forecast = step(reduce_seconds=1.0, pass_on_seconds=0.75, closing=0.5)
    assert forecast.seconds == pytest.approx(12 + 1 + 0.5 + 4 * 0.75)


def test_a_range_is_gathered_behind_its_load() -> None:
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
            saved_bytes=20.0 * hidden,
            input_bytes=2.0 * hidden,
        )
        for index in range(layers)
    )
    return ModelShape(name="decoder", blocks=tuple(blocks))


def collective_seconds(
    shape: ModelShape, spread: Spread, training: Training = Training.FULL, hardware: Hardware = NODE
) -> float:
    work = Work(sequence_length=500, training=training)
    return option_of(Case(shape, work, spread, ON_DEVICE, hardware)).floors.collective_seconds


@pytest.mark.parametrize(
    ("spread", "seconds"),
    [
        # 0.4 G parameters in 16 bits are 0.8 GB; a ring over 4 carries 3/4 of them, at 1 GB/s.
        (Spread(data=4), 2 * 0.6),  # an all-reduce
        (Spread(data=4, zero_stage=1), 0.6 + 0.6),  # a scatter of gradients, a gather of weights
        (Spread(data=4, zero_stage=2), 0.6 + 0.6),
        (Spread(), 0.0),
    ],
)
def test_volumes_of_a_step(spread: Spread, seconds: float) -> None:
    assert collective_seconds(decoder(), spread) == pytest.approx(seconds)


def test_inference_sums_up_nothing() -> None:
    assert collective_seconds(decoder().frozen(), Spread(data=4), Training.NONE) == 0


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "method",
    [ON_DEVICE, dataclasses.replace(ON_DEVICE, state=Place.HOST), dataclasses.replace(ON_DEVICE, state=Place.DISK)],
)
def test_the_lane_is_busy_as_long_as_the_floor_says(method: Method, stage: int, micro_batches: int) -> None:
    work = Work(sequence_length=500, micro_batches=micro_batches)
    spread = Spread(data=4, zero_stage=stage)
    run = run_of(Case(decoder(), work, spread, method, NODE.changed(disk_read_bytes_per_second=1e9)))
    assert run.step.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(run.floors.collective_seconds)
    assert run.seconds >= run.floors.longest


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("weights", Place)
def test_updated_weights_are_passed_on_wherever_they_rest(weights: Place, stage: int) -> None:
    method = dataclasses.replace(ON_DEVICE, weights=weights, state=Place.DISK)
    run = run_of(Case(decoder(), Work(sequence_length=500), Spread(data=4, zero_stage=stage), method, NODE))
    assert run.step.busy_seconds[CostLane.COLLECTIVE] == pytest.approx(0.6 + 0.6)
    assert run.floors.collective_seconds == pytest.approx(0.6 + 0.6)


def test_devices_of_one_node_do_not_talk_over_the_network() -> None:
    slow = NODE.changed(node_bytes_per_second=RATE / 100)
    work = Work(sequence_length=500)
    near, far = (
        run_of(Case(decoder(), work, Spread(data=8), ON_DEVICE, hardware)).seconds for hardware in (NODE, slow)
    )
    assert near == pytest.approx(far)
    wide = collective_seconds(decoder(), Spread(data=16, nodes=2), hardware=slow)
    assert wide > 50 * collective_seconds(decoder(), Spread(data=8), hardware=slow)
