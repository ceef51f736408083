"""Which weights does a plan read packed from disk, and what does that change?"""

import pytest

from headrace.planning.cost import Activations, Case, Hardware, Method, Place, Spread, Training, Work
from headrace.planning.cost.forecast import run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape

KINDS = (BlockKind.EMBEDDING, *[BlockKind.LAYER] * 4, BlockKind.HEAD)


def machine(drive: float, disk_bytes: int) -> Hardware:
    return Hardware(
        name="machine",
        device_memory_bytes=10**10,
        device_bytes_per_second=1e12,
        flops_per_second=1e14,
        onload_bytes_per_second=5e10,
        offload_bytes_per_second=5e10,
        host_memory_bytes=10**12,
        dram_bytes_per_second=1e12,
        disk_bytes=disk_bytes,
        disk_read_bytes_per_second=drive,
        disk_write_bytes_per_second=drive,
    )


def model(training: Training, bits: int) -> ModelShape:
    trained = 10**8 if training is Training.FULL else 0
    return ModelShape(
        name="model",
        blocks=tuple(
            BlockShape(
                name=str(number),
                kind=kind,
                parameters=10**8,
                active_parameters=10**8,
                trainable=trained,
                weight_bits=bits,
            )
            for number, kind in enumerate(KINDS)
        ),
    )


@pytest.mark.parametrize(
    ("training", "bits", "drive", "share"),
    [
        (Training.NONE, 16, 6e9, 0.75),
        (Training.ADAPTER, 16, 6e9, 0.75),
        (Training.NONE, 16, 12e9, 1.0),  # unpacking is hardly faster
        (Training.NONE, 32, 6e9, 1.0),
        (Training.FULL, 16, 6e9, 1.0),
    ],
)
@pytest.mark.parametrize("room", [2.0, 1.5])
def test_frozen_weights_are_read_packed_from_a_slow_drive(
    training: Training, bits: int, drive: float, share: float, room: float
) -> None:
    """Layers and head, beside their plain bytes, if there is room; an embedding is read by rows."""
    shape = model(training, bits)
    block_bytes = shape.blocks[0].weight_bytes
    share = share if room == 2 else 1.0
    method = Method(weights=Place.DISK, state=Place.HOST, activations=Activations.KEPT)
    work = Work(training=training, sequence_length=128)
    disk_bytes = int(room * shape.weight_bytes) + 2**30
    full = machine(drive, disk_bytes).changed(host_memory_bytes=1)  # no block has room there
    run = run_of(Case(shape, work, Spread(), method, full), block_bytes)
    on_disk = {held.purpose: held.nbytes for held in run.tiers.held if held.place is Place.DISK}
    assert on_disk["weights"] == shape.weight_bytes
    assert on_disk.get("packed weights", 0) == (5 * share * block_bytes if share < 1 else 0)
    loads = run.visits.problem.load_seconds
    assert loads[0] == pytest.approx(block_bytes / drive)
    assert loads[1:] == pytest.approx([share * block_bytes / drive] * 5)
    fetched = {
        int(task.name.split()[1]): task.nbytes
        for task in run.step.tasks
        if task.lane is CostLane.FETCH and task.name.startswith("weights")
    }
    assert fetched[1] == fetched[4] == share * block_bytes
    read_bytes = run.floors.fetch_seconds * drive
    passes = 1 if training is Training.NONE else 2
    missing = 5 * passes if training is not Training.FULL else 5 * passes + 6  # the update reads all of them, too
    # Of an embedding all is read, so it is what had better stay.
    assert read_bytes == pytest.approx(share * missing * block_bytes)
