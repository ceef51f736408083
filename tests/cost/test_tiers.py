"""Does a run hold what is forecast of it: activations that leave, and gradients on the host?"""

import pytest
import torch
from torch import nn

import headrace
from headrace.planning import ActivationProblem, Saved, on_disk, plan_activations
from headrace.planning.cost import (
    MACHINES,
    Activations,
    Case,
    Hardware,
    Method,
    Overlap,
    Place,
    Spread,
    Training,
    Work,
    shape_of_module,
)
from headrace.planning.cost.forecast import run_of
from headrace.planning.cost.lanes import CostLane
from headrace.planning.cost.packing import packs
from headrace.planning.cost.tiers import HOST_RESERVE, activation_bytes, tiers_of

WIDTH, TOKENS, LAYERS, LINEARS = 128, 1024, 8, 4
VALUE_BYTES = TOKENS * WIDTH * 4
FLOPS_PER_SECOND = 1e11
LEAVING = Method(weights=Place.DEVICE, state=Place.DEVICE, activations=Activations.OFFLOADED)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LINEARS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            hidden = torch.tanh(linear(hidden))
        return hidden


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def machine(ratio: float) -> Hardware:
    """One on which the copies of a layer's activations take so many times its forward."""
    rate = VALUE_BYTES / (ratio * 2 * TOKENS * WIDTH * WIDTH / FLOPS_PER_SECOND)
    return MACHINES["4090"].changed(
        flops_per_second=FLOPS_PER_SECOND,
        device_bytes_per_second=1e13,
        onload_bytes_per_second=rate,
        offload_bytes_per_second=rate,
    )


def tape(ratio: float, budget_bytes: int | None) -> ActivationProblem:
    """What a forward of the decoder saves, as a recording would tell: a layer's input is its caller's until its end."""
    count, seconds = LAYERS * LINEARS, 1.0

    def alone_at(index: int) -> int | None:
        at = index + (LINEARS + 1 if index % LINEARS == 0 else 2)
        return at if index and at <= count else None

    return ActivationProblem(
        saved=tuple(
            Saved(nbytes=VALUE_BYTES, offload_seconds=ratio, onload_seconds=ratio, alone_at=alone_at(index))
            for index in range(count + 1)
        ),
        forward_seconds=(seconds,) * count + (0.0,),
        uses=tuple(range(count, -1, -1)),
        backward_seconds=(0.0,) + (2 * seconds,) * count,
        freed_at=tuple(range(count + 1)),
        budget_bytes=budget_bytes,
    )


@pytest.mark.parametrize(("ratio", "values"), [(0.5, LINEARS + 1), (0.9, LINEARS + 1), (1.5, 2 * LINEARS)])
def test_activations_on_the_device_are_what_a_run_plans_for(ratio: float, values: int) -> None:
    """Over a link that keeps up, as few as hide; over a slower one, what fits under the ceiling of two layers'."""
    shape = shape_of_module(Decoder())
    here, _ = activation_bytes(Case(shape, Work(sequence_length=TOKENS), Spread(), LEAVING, machine(ratio)))
    assert here == values * VALUE_BYTES
    assert here == plan_activations(tape(ratio, None if ratio < 1 else here)).peak_bytes


def test_weights_and_drives_take_their_part_of_the_link() -> None:
    """Copies back share the link with the weights of the layer, and wait for a drive that is slower."""
    shape, work = shape_of_module(Decoder()), Work(sequence_length=TOKENS)
    one, two = (LINEARS + 1) * VALUE_BYTES, 2 * LINEARS * VALUE_BYTES

    def here(method: Method, hardware: Hardware) -> int:
        return activation_bytes(Case(shape, work, Spread(), method, hardware))[0]

    # A layer's weights are an eighth of its activations: 1.125 times a copy comes back in two forwards.
    sent = machine(0.5)
    slow_back = sent.changed(onload_bytes_per_second=sent.onload_bytes_per_second / 3.9)  # 1.95 forwards a layer
    streamed = Method(weights=Place.HOST, state=Place.HOST, activations=Activations.OFFLOADED)
    assert here(LEAVING, slow_back) == one
    assert here(streamed, slow_back) == two
    spilled = Method(weights=Place.DEVICE, state=Place.DEVICE, activations=Activations.SPILLED)
    for drive, expected in ((1.01, one), (0.99, two)):
        rate = drive * machine(1.0).offload_bytes_per_second
        drives = sent.changed(disk_read_bytes_per_second=rate, disk_write_bytes_per_second=rate)
        assert here(spilled, drives) == expected


@pytest.mark.emu("lazy")
def test_activations_on_the_device_are_what_a_run_holds(emu_device) -> None:
    """By the allocator's peak in forward, less the weights and the one value that `tanh` is made of."""
    hardware = machine(0.9)
    emu_device.configure(
        allocator="exact",
        dry_run=True,
        flops_per_second=FLOPS_PER_SECOND,
        device_bytes_per_second=1e13,
        h2d_bytes_per_second=hardware.onload_bytes_per_second,
        d2h_bytes_per_second=hardware.offload_bytes_per_second,
        launch_seconds=0,
        op_latency_seconds=0,
        copy_latency_seconds=0,
    )
    model = Decoder().to("emu")
    here, _ = activation_bytes(Case(shape_of_module(model), Work(sequence_length=TOKENS), Spread(), LEAVING, hardware))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    with headrace.offload_activations(model, min_bytes=VALUE_BYTES) as handle:
        for _ in range(4):
            torch.accelerator.reset_peak_memory_stats()
            loss = model(torch.empty(TOKENS, WIDTH, device="emu").requires_grad_()).sum()
            held = torch.accelerator.max_memory_allocated() - weights - VALUE_BYTES
            loss.backward()
            del loss  # and the graph, of whose values it holds the last
            model.zero_grad(set_to_none=True)
        assert handle.stats().offload_bytes > 3 * (LAYERS - 1) * LINEARS * VALUE_BYTES
    assert held == here


@pytest.mark.parametrize("overlap", Overlap)
def test_all_gradients_have_memory_on_the_host(overlap: Overlap) -> None:
    """Also where blocks are updated within backward: it is made before the first one."""
    model = Decoder()
    method = Method(weights=Place.HOST, state=Place.HOST, activations=Activations.KEPT, overlap=overlap)
    work = Work(sequence_length=TOKENS, gradient_bytes=4, master_bytes=0)
    tiers = tiers_of(Case(shape_of_module(model), work, Spread(), method, machine(1.0)))
    held = {item.purpose: item.nbytes for item in tiers.held if item.place is Place.HOST}
    with headrace.offload(model, device="cpu", device_memory="1MiB", blocks=[model.layers]) as handle:
        optimizer = headrace.optim.AdamW(model.parameters(), overlap=overlap.value)
        for _ in range(3):
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.synchronize()
        assert handle.stats().host_peak_bytes == held["weights"] + held["gradients"]
        assert handle.stats().offload_bytes == 3 * held["gradients"]


def test_gradients_rest_on_disk_where_the_host_has_no_room() -> None:
    """Then those of two blocks are on the host, and all of them have room on the disk."""
    shape = shape_of_module(Decoder())
    method = Method(weights=Place.HOST, state=Place.DISK, activations=Activations.RECOMPUTED, overlap=Overlap.BACKWARD)
    tiers = tiers_of(Case(shape, Work(training=Training.FULL), Spread(), method, machine(1.0)))
    held = {(item.place, item.purpose): item.nbytes for item in tiers.held}
    assert held[Place.DISK, "gradients"] == 2 * shape.parameters
    assert held[Place.HOST, "gradients"] == 2 * shape.parameters * 2 // LAYERS


@pytest.mark.parametrize("held", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_blocks_that_host_memory_has_room_for_are_not_read(held: float) -> None:
    """The host has room for staging, of three blocks, and for a share of the weights: the rest is read in each pass."""
    shape = shape_of_module(Decoder()).frozen()
    sizes = [block.weight_bytes for block in shape.blocks]
    host = int((held * sum(sizes) + 3 * max(sizes)) / (1 - HOST_RESERVE)) + 2
    method = Method(weights=Place.DISK, state=Place.DEVICE, activations=Activations.KEPT)
    work = Work(training=Training.NONE, sequence_length=TOKENS)
    case = Case(shape, work, Spread(), method, machine(0.5).changed(host_memory_bytes=host, disk_bytes=10**12))
    run = run_of(case, 2 * max(sizes))
    rests = {
        item.place: item.nbytes
        for item in run.tiers.held
        if item.purpose == "weights" and item.place is not Place.DEVICE
    }
    assert rests.get(Place.HOST, 0) <= held * sum(sizes)
    assert rests.get(Place.HOST, 0) > held * sum(sizes) - max(sizes)
    assert sum(rests.values()) == sum(sizes)
    assert run.tiers.on_disk == on_disk(sizes, int(held * sum(sizes)))
    there = [sizes[index] for index in run.tiers.on_disk]
    packed = 0.75 if packs(case) else 1.0
    assert run.moved_bytes[CostLane.FETCH] <= sum(there)
    assert run.moved_bytes[CostLane.FETCH] >= packed * (sum(there) - 2 * max(sizes))
