"""What can no schedule beat? For each lane, the seconds that its bytes or operations take alone, per optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.planning.cost.collectives import changes, collective_seconds, reduce_seconds, summed_share
from headrace.planning.cost.experts import cut_of, pass_loads
from headrace.planning.cost.formulas import tokens_to_hide
from headrace.planning.cost.hardware import OVER_LINK, Hardware
from headrace.planning.cost.packing import mean_read_share
from headrace.planning.cost.shape import ModelShape
from headrace.planning.cost.sharing import Crossing, crossing_of
from headrace.planning.cost.tiers import block_seconds, leaving_layers, recompute_seconds
from headrace.planning.cost.work import Activations, Method, Place, Spread, Training, Work

__all__ = ["Floors", "device_update_seconds", "floors_of", "hiding_tokens"]


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Seconds per step of each lane alone; `sum_seconds`: of the update's, what adds up the gradients of devices."""

    compute_seconds: float
    onload_seconds: float
    offload_seconds: float
    update_seconds: float
    fetch_seconds: float
    spill_seconds: float
    collective_seconds: float
    network_seconds: float = 0.0
    sum_seconds: float = 0.0

    @property
    def longest(self) -> float:
        return max(float(seconds) for seconds in vars(self).values())

    @property
    def serial_update(self) -> float:
        """The floor when only the drive runs beside the update: it reads ahead, and writes into the next step."""
        beside = max(self.compute_seconds, self.onload_seconds, self.offload_seconds)
        return max(self.longest, beside + self.update_seconds - self.sum_seconds)


def floors_of(
    shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware, streaming_bytes: int
) -> Floors:
    """The floors of one device. The fewest loads keep as much as the budget has room for."""
    compute = 0.0
    for block in shape.blocks:
        forward, backward = block_seconds(block, work, hardware)
        again = recompute_seconds(block, work, method, forward)
        compute += forward if work.training is Training.NONE else forward + backward + again
    compute *= work.micro_batches
    weights = shape.weight_bytes
    passes = 1 if work.training is Training.NONE else 2
    onload = fetch = spill = offload = update = 0.0
    held = 1 / spread.ranks if spread.shares(method, work.training) else 1.0
    changed = changes(work, method)
    cut = cut_of(shape, work, spread, method, streaming_bytes)
    if cut is not None:
        loaded = sum(one.nbytes for one in pass_loads(shape, work, method, hardware, cut))
        loaded = passes * work.micro_batches * (loaded + cut.other_bytes - cut.other_room_bytes)
        onload = loaded / hardware.onload_bytes_per_second
        fetch += loaded if method.weights is Place.DISK else 0.0
    elif method.streamed:
        missing = max(0.0, shape.weight_bytes - streaming_bytes)
        loaded = passes * missing * work.micro_batches
        if changed:
            loaded = max(loaded, weights)
        onload = loaded / hardware.onload_bytes_per_second
        if method.weights is Place.DISK:
            updated_there = held * weights if changed else 0.0
            read = mean_read_share(shape, work, spread, method, hardware)
            fetch, spill = fetch + held * loaded * read + updated_there, spill + updated_there
    elif changed:
        onload = method.host_share * weights / hardware.onload_bytes_per_second
    if work.training is not Training.NONE and method.state is not Place.DEVICE:
        trained = method.host_share * held * spread.divided(shape.trainable, 1)
        sent = work.micro_batches // method.sent_in(work)
        offload = spread.divided(work.gradient_bytes * shape.trainable, 2) * sent
        offload *= method.host_share / hardware.offload_bytes_per_second
        update = work.update_bytes * trained / (hardware.update_rate / hardware.devices)
        if method.state is Place.DISK:
            state = (work.master_bytes + work.state_bytes) * trained
            fetch, spill = fetch + state, spill + state
    leaving = leaving_layers(shape, work, method)
    saved = work.micro_batches * sum(shape.blocks[index].activation_bytes(work.tokens) for index in leaving)
    if method.activations is Activations.SPILLED:
        fetch, spill = fetch + saved, spill + saved
    compute += device_update_seconds(shape, work, spread, method, hardware)
    read, write = hardware.disk_read_bytes_per_second, hardware.disk_write_bytes_per_second
    floors = Floors(
        compute_seconds=compute,
        onload_seconds=onload,
        offload_seconds=offload,
        update_seconds=update,
        fetch_seconds=fetch * hardware.devices / read if fetch else 0.0,
        spill_seconds=spill * hardware.devices / write if spill else 0.0,
        collective_seconds=collective_seconds(shape, work, spread, method, hardware),
    )
    crossings = [crossing_of(block, work, spread, method, hardware) for block in shape.blocks]
    found = [crossing for crossing in crossings if crossing is not None]
    if found:
        sums = sum(reduce_seconds(block, work, spread, hardware) for block in shape.blocks)
        floors = _shared(floors, found, shape, work, method, hardware, sums * summed_share(work, spread, method))
    return replace(
        floors,
        onload_seconds=floors.onload_seconds + saved / hardware.onload_bytes_per_second,
        offload_seconds=floors.offload_seconds + saved / hardware.offload_bytes_per_second,
    )


def _shared(
    floors: Floors,
    crossings: Sequence[Crossing],
    shape: ModelShape,
    work: Work,
    method: Method,
    hardware: Hardware,
    own_sums: float,
) -> Floors:
    """The same where replicas share a copy on the host: of what each would move alone, what is left for one of them.

    `own_sums`: seconds for gradients that the devices sum up for their own part of the update.
    """
    whole = [max(1.0, block.weight_bytes * method.crossing_share) for block in shape.blocks]
    # Blocks that are loaded least often may be those for which most crosses.
    least = min(one.load_bytes / nbytes for one, nbytes in zip(crossings, whole, strict=True))
    gathered = min(one.gather_seconds / nbytes for one, nbytes in zip(crossings, whole, strict=True))
    loaded = floors.onload_seconds * hardware.onload_bytes_per_second
    sent = work.micro_batches  # of host_share < 1 as well: then each is that much smaller
    left = sum(one.gradient_bytes for one in crossings) * sent
    among = loaded * gathered + sum(one.reduce_seconds for one in crossings) * sent
    beside = hardware.peer != OVER_LINK
    collectives = floors.collective_seconds + among if beside else floors.collective_seconds - own_sums
    on_link = 0.0 if beside else among + own_sums
    sums = sum(one.sum_bytes for one in crossings) * sent * hardware.devices / hardware.update_rate
    return replace(
        floors,
        onload_seconds=loaded * least / hardware.onload_bytes_per_second + on_link,
        offload_seconds=left / hardware.offload_bytes_per_second + on_link,
        update_seconds=floors.update_seconds + sums,
        sum_seconds=sums,
        collective_seconds=collectives,
        network_seconds=sum(one.network_seconds for one in crossings),
    )


def device_update_seconds(shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware) -> float:
    """The device's part of the update, by its memory traffic."""
    if work.training is Training.NONE:
        return 0.0
    own = spread.divided(work.update_bytes * shape.trainable, 1)
    return method.device_share * own / hardware.device_bytes_per_second


def hiding_tokens(
    shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware
) -> dict[str, float]:
    """Tokens of a device per micro-batch, or per step, from which each lane hides behind compute; only lanes in use."""
    hidden: dict[str, float] = {}
    training = work.training is not Training.NONE
    again = method.activations is Activations.RECOMPUTED
    active = sum(block.active_parameters for block in shape.blocks)
    backward = 4.0 if work.training is Training.FULL else 2.0
    flops = (2.0 + (backward + 2.0 * again if training else 0.0)) * active / shape.parameters
    width = max(block.input_elements for block in shape.blocks)
    context = work.sequence_length / width if width else 0.0
    bits = 8 * shape.weight_bytes / shape.parameters

    def tokens(nbytes: float, rate: float) -> float:
        return tokens_to_hide(
            nbytes, hardware.flops_per_second, rate, flops_per_parameter=flops, context_over_hidden=context
        )

    loaded, held, updated = _own_shares(shape, work, spread, method, hardware)
    if method.streamed:
        hidden["onload"] = tokens(loaded * bits / 8 * (2 if training else 1), hardware.onload_bytes_per_second)
    if method.weights is Place.DISK:
        rate = hardware.disk_read_bytes_per_second / hardware.devices
        read = mean_read_share(shape, work, spread, method, hardware)
        hidden["fetch of weights"] = tokens(read * held * bits / 8 * (2 if training else 1), rate)
    if training and method.state is not Place.DEVICE and shape.trainable:
        trained = method.host_share * updated * shape.trainable / shape.parameters
        hidden["update"] = tokens(work.update_bytes * trained, hardware.update_rate / hardware.devices)
        if method.state is Place.DISK:
            state = (work.master_bytes + work.state_bytes) * trained
            state += held * bits / 8 if method.weights is Place.DISK else 0.0
            slower = min(hardware.disk_read_bytes_per_second, hardware.disk_write_bytes_per_second)
            hidden["state on disk"] = tokens(state, slower / hardware.devices)
    return hidden


def _own_shares(
    shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware
) -> tuple[float, float, float]:
    """Of all weights, what one device loads over its link, and holds below; of what is trained, what it updates."""
    if not spread.shares(method, work.training):
        return 1.0, 1.0, spread.divided(1.0, 1)
    crossings = (crossing_of(block, work, spread, method, hardware) for block in shape.blocks)
    loaded = sum(crossing.load_bytes for crossing in crossings if crossing is not None)
    return loaded / max(1.0, method.crossing_share * shape.weight_bytes), 1 / spread.ranks, 1 / spread.ranks
