"""What can no schedule beat? For each lane, the seconds that its bytes or operations take alone, per optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.planning.cost.collectives import changes, collective_seconds
from millrace.planning.cost.formulas import break_even_tokens
from millrace.planning.cost.hardware import Hardware
from millrace.planning.cost.shape import ModelShape
from millrace.planning.cost.tiers import block_seconds, leaving_layers, recompute_seconds
from millrace.planning.cost.work import Activations, Method, Place, Spread, Training, Work

__all__ = ["Floors", "floors_of", "hiding_tokens"]


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Seconds per step of each lane alone; `onload_all_seconds` is with no block kept on the device."""

    compute_seconds: float
    onload_seconds: float
    offload_seconds: float
    update_seconds: float
    fetch_seconds: float
    spill_seconds: float
    collective_seconds: float

    @property
    def longest(self) -> float:
        return max(float(seconds) for seconds in vars(self).values())

    @property
    def serial_update(self) -> float:
        """The floor when only the drive runs beside the update: it reads ahead, and writes into the next step."""
        beside = max(self.compute_seconds, self.onload_seconds, self.offload_seconds)
        return max(self.longest, beside + self.update_seconds)


def floors_of(
    shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware, streaming_bytes: int
) -> Floors:
    """The floors of one device's part of the model. The fewest loads keep as much as the budget has room for."""
    compute = 0.0
    for block in shape.blocks:
        forward, backward = block_seconds(block, work, hardware)
        again = recompute_seconds(block, work, method, forward)
        compute += forward if work.training is Training.NONE else forward + backward + again
    compute *= work.micro_batches
    weights = shape.weight_bytes / spread.weight_shards
    passes = 1 if work.training is Training.NONE else 2
    onload = fetch = spill = offload = update = 0.0
    changed = changes(work, method)
    if method.streamed:
        missing = max(0.0, shape.weight_bytes - streaming_bytes) / spread.weight_shards
        loaded = passes * missing * work.micro_batches
        if changed:
            loaded = max(loaded, weights)
        onload = loaded / hardware.onload_bytes_per_second
        if method.weights is Place.DISK:
            fetch += loaded
            spill += weights if changed else 0.0
    elif changed:
        onload = weights / hardware.onload_bytes_per_second
    if work.training is not Training.NONE and method.state is not Place.DEVICE:
        trained = shape.trainable / spread.state_shards
        offload = work.gradient_bytes * shape.trainable / spread.gradient_shards * work.micro_batches
        offload /= hardware.offload_bytes_per_second
        update = work.update_bytes * trained / (hardware.update_rate / hardware.devices)
        if method.state is Place.DISK:
            state = (work.master_bytes + work.state_bytes) * trained
            fetch, spill = fetch + state, spill + state
    if method.activations is Activations.SPILLED:
        leaving = leaving_layers(shape, work, method)
        saved = work.micro_batches * sum(shape.blocks[index].activation_bytes(work.tokens) for index in leaving)
        fetch, spill = fetch + saved, spill + saved
    if work.training is not Training.NONE and method.state is Place.DEVICE:
        compute += work.update_bytes * shape.trainable / spread.state_shards / hardware.device_bytes_per_second
    read, write = hardware.disk_read_bytes_per_second, hardware.disk_write_bytes_per_second
    return Floors(
        compute_seconds=compute,
        onload_seconds=onload,
        offload_seconds=offload,
        update_seconds=update,
        fetch_seconds=fetch * hardware.devices / read if fetch else 0.0,
        spill_seconds=spill * hardware.devices / write if spill else 0.0,
        collective_seconds=collective_seconds(shape, work, spread, method, hardware, streaming_bytes),
    )


def hiding_tokens(shape: ModelShape, work: Work, method: Method, hardware: Hardware) -> dict[str, float]:
    """Tokens per micro-batch, or per step, from which each lane hides behind compute; only lanes that are used."""
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
        return break_even_tokens(
            nbytes, hardware.flops_per_second, rate, flops_per_parameter=flops, context_over_hidden=context
        )

    if method.streamed:
        hidden["onload"] = tokens(bits / 8 * (2 if training else 1), hardware.onload_bytes_per_second)
    if method.weights is Place.DISK:
        rate = hardware.disk_read_bytes_per_second / hardware.devices
        hidden["fetch of weights"] = tokens(bits / 8 * (2 if training else 1), rate)
    if training and method.state is not Place.DEVICE and shape.trainable:
        trained = shape.trainable / shape.parameters
        hidden["update"] = tokens(work.update_bytes * trained, hardware.update_rate / hardware.devices)
        if method.state is Place.DISK:
            state = (work.master_bytes + work.state_bytes) * trained
            slower = min(hardware.disk_read_bytes_per_second, hardware.disk_write_bytes_per_second)
            hidden["state on disk"] = tokens(state, slower / hardware.devices)
    return hidden
