"""Is a floor what no lane's work comes below? Of any option, beside its simulated step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.planning.cost import Activations, Case, Method, Overlap, Place, Spread, Training, Work
from headrace.planning.cost.forecast import run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from tests.cost.test_sharing import NODE


@st.composite
def shapes(draw: st.DrawFn, training: Training) -> ModelShape:
    """One to four layers, some with experts, between the ends of a model."""
    sizes = draw(st.lists(st.integers(1, 100), min_size=1, max_size=4))
    experts = draw(st.sampled_from([0, 8]))
    bits = draw(st.sampled_from([16.0, 32.0, 4.5]))
    kinds = [BlockKind.EMBEDDING, *[BlockKind.LAYER] * len(sizes), BlockKind.HEAD]
    blocks = []
    for kind, size in zip(kinds, [sizes[0], *sizes, sizes[-1]], strict=True):
        layer = kind is BlockKind.LAYER
        parameters = size * 10**6
        trained = {Training.FULL: parameters, Training.ADAPTER: size * 10**4 * layer, Training.NONE: 0}[training]
        blocks.append(
            BlockShape(
                name=f"{kind.value} {len(blocks)}",
                kind=kind,
                parameters=parameters,
                active_parameters=0 if kind is BlockKind.EMBEDDING else parameters // (2 if experts else 1),
                trainable=trained,
                weight_bits=bits if layer else 16.0,
                saved_bytes=20_000.0 * layer,
                input_bytes=2000.0 * layer,
                expert_parameters=parameters * 8 // 10 if experts and layer else 0,
                experts=experts * layer,
            )
        )
    return ModelShape(name="decoder", blocks=tuple(blocks))


@settings(max_examples=60, derandomize=True, database=None)
@given(st.data())
def test_no_lane_works_less_than_its_floor(data: st.DataObject) -> None:
    training = data.draw(st.sampled_from(Training))
    shape = data.draw(shapes(training))
    nodes, devices = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 4]))
    stage = data.draw(st.sampled_from([0, 1, 2])) if nodes * devices > 1 else 0
    weights, state = data.draw(st.sampled_from(Place)), data.draw(st.sampled_from(Place))
    split = training is not Training.NONE and weights is Place.DEVICE is not state
    method = Method(
        weights=weights,
        state=state,
        activations=data.draw(st.sampled_from(Activations)),
        overlap=data.draw(st.sampled_from(Overlap)),
        host_share=data.draw(st.sampled_from([1.0, 0.5])) if split else 1.0,
        together=data.draw(st.sampled_from([1, 2])),
    )
    lengths, batches = st.sampled_from([1, 1000]), st.sampled_from([1, 2, 5])
    work = Work(training=training, sequence_length=data.draw(lengths), micro_batches=data.draw(batches))
    rates = {name: data.draw(st.sampled_from([1e9, 5e10])) for name in ("link", "disk", "host", "peers", "network")}
    hardware = NODE.changed(devices=devices, flops=1e13, peer=data.draw(st.sampled_from(["pcie", "fabric"])), **rates)
    if data.draw(st.booleans()):
        hardware = hardware.changed(peer="none")
    room = int(data.draw(st.floats(0.1, 1.1)) * shape.weight_bytes)
    run = run_of(Case(shape, work, Spread(data=nodes * devices, zero_stage=stage, nodes=nodes), method, hardware), room)
    for lane in CostLane:
        floor = getattr(run.floors, f"{lane.value}_seconds")
        assert run.in_use[lane.value] * run.seconds >= floor * (1 - 1e-6) - 1e-9, lane
