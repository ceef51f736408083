"""Is the recommended strategy the best there is? All of them are simulated, for ten models."""

import dataclasses
from typing import Any

import pytest

import headrace
from headrace.planning.cost import MACHINES, Activations, Case, Place, RunPlan
from headrace.planning.cost.forecast import run_of
from tests.cost.conftest import LLAMA_8B, MODELS

pytestmark = pytest.mark.usefixtures("short_search")

SIMPLER = 1.02  # a simpler strategy is taken unless another one is faster than this
MIXED = ("llama-1b", "llama-8b", "llama-8b-lora", "qwen3-30b-a3b")  # models for which all kinds of strategies win
LAYERS = 6  # of each model, so that all strategies are simulated in no time
# Of what lies between the strategy that holds least on a tier and the one that holds most, what the machine has.
ROOMS = {"much host": {Place.DEVICE: 0.2, Place.HOST: 1.0}, "little host": {Place.DEVICE: 0.2, Place.HOST: 0.5}}


def planned(model: str, room: str) -> RunPlan:
    """A machine on which some strategies fit and others do not, by what each is told to lack where there is nothing."""
    config, settings = MODELS[model]
    config = config | {"num_hidden_layers": LAYERS}
    nothing = MACHINES["h100"].changed(device_memory_bytes=1, host_memory_bytes=1)
    considered = headrace.plan(config, hardware=nothing, **settings).options
    lacking = [dict(option.lacks) for option in considered if option.method.together == 1]
    memory = {}
    for place, share in ROOMS[room].items():
        sizes = [lacks.get(place, 0) for lacks in lacking]
        memory[place] = int(1.2 * (min(sizes) + share * (max(sizes) - min(sizes)))) + 2**30
    hardware = MACHINES["h100"].changed(device_memory_bytes=memory[Place.DEVICE], host_memory_bytes=memory[Place.HOST])
    return headrace.plan(config, hardware=hardware, **settings)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("model", "room"),
    [
        *((model, "much host") for model in MODELS),
        *((model, "little host") for model in MODELS if not model.endswith("inference")),
    ],
)
def test_no_strategy_that_fits_is_faster(model: str, room: str) -> None:
    plan = planned(model, room)
    runs = [
        (option, run_of(Case(plan.model, plan.work, plan.spread, option.method, plan.hardware)))
        for option in plan.options
        if not option.lacks
    ]
    assert 2 <= len(runs) < len(plan.options)
    for option, run in runs:
        assert run.seconds >= option.floor_seconds * (1 - 1e-9), option.method
    assert plan.run is not None
    fastest = min(run.seconds for _, run in runs)
    assert plan.run.seconds <= fastest * SIMPLER * SIMPLER
    simplest = next(option.method for option, run in runs if run.seconds <= fastest * SIMPLER)
    order = [option.method for option in plan.options]
    assert order.index(plan.method) <= order.index(simplest)


@pytest.mark.extended
def test_the_strategies_differ() -> None:
    """Or the test above would compare nothing."""
    found = {planned(model, room).method for model in MIXED for room in ROOMS}
    assert len(found) >= 5
    assert {method.weights for method in found} == set(Place)
    assert {method.state for method in found} == set(Place)


@pytest.mark.extended
def test_moments_in_8_bits_take_a_quarter() -> None:
    def state(dtype: str) -> int:
        plan = headrace.plan(LLAMA_8B, hardware="h100", batch_size=4, state_dtype=dtype, disk=False)
        return sum(held.nbytes for held in plan.tiers.held if held.purpose == "master and state")

    parameters = 8_030_261_248
    assert state("float32") == 10 * parameters  # 2 of the master, 4 of each moment
    assert state("bfloat16") == 6 * parameters
    assert state("8bit") == pytest.approx((2 + 2 * 132 / 128) * parameters, abs=8)
    with pytest.raises(ValueError, match="state_dtype='4bit'; give one of float32, bfloat16, 8bit"):
        headrace.plan(LLAMA_8B, state_dtype="4bit")


@pytest.mark.parametrize(("form", "nbytes", "updated"), [("split", 14, 26), ("full", 16, 28), ("none", 12, 22)])
def test_what_is_held_in_host_memory_is_what_the_optimizer_holds(form: Any, nbytes: int, updated: int) -> None:
    """14 bytes for each bfloat16 parameter: weight and gradient 2 each, master 2, moments 8."""
    plan = headrace.plan(LLAMA_8B, hardware="4090", batch_size=4, host_memory="256GB", master_form=form)
    assert plan.method.state is plan.method.weights is Place.HOST
    assert plan.tiers.total(Place.HOST) == nbytes * 8_030_261_248
    assert plan.work.update_bytes == updated
    assert plan.work.update_crossing(streamed=True) == (nbytes, nbytes - 2)
    assert (f'master_form="{form}"' in plan.to_text()) == (form != "split")


def test_activations_on_disk_pass_through_the_drive_both_ways() -> None:
    plan = planned("llama-8b", "little host")
    spilled = next(o.method for o in plan.options if o.method.activations is Activations.SPILLED)
    offloaded = dataclasses.replace(spilled, activations=Activations.OFFLOADED)
    ours, other = (run_of(Case(plan.model, plan.work, plan.spread, m, plan.hardware)) for m in (spilled, offloaded))
    layers = [block for block in plan.model.blocks if block.name.startswith("layer")]
    saved = sum(block.activation_bytes(plan.work.tokens) for block in layers)
    leaving = saved - layers[-1].activation_bytes(plan.work.tokens)  # backward begins with the last one
    for lane in ("fetch", "spill"):
        moved = [run.step.moved_bytes[lane] for run in (ours, other)]
        assert moved[0] - moved[1] == pytest.approx(leaving, rel=1e-9)
    on = {place: run.tiers.total(place) for place in Place for run in (ours,)}
    assert on[Place.DISK] == other.tiers.total(Place.DISK) + round(saved)
    assert on[Place.HOST] < other.tiers.total(Place.HOST)
    assert "activations spilled to disk" in spilled.text(plan.work.training)
