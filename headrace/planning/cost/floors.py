"""What can no schedule beat? For each lane, the seconds that its bytes or operations take alone, per optimizer step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.formulas import tokens_to_hide
from headrace.planning.cost.traffic import BlockTraffic
from headrace.planning.cost.work import Activations, Case, Training


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Seconds per step of each lane alone; `sum_seconds` is the update's part that adds up the gradients of devices.

    `crossing_seconds`: how long an update by the device takes the link, in the direction that takes longer.
    """

    compute_seconds: float
    onload_seconds: float
    offload_seconds: float
    update_seconds: float
    fetch_seconds: float
    spill_seconds: float
    collective_seconds: float
    network_seconds: float = 0.0
    sum_seconds: float = 0.0
    crossing_seconds: float = 0.0

    @property
    def longest(self) -> float:
        return max(float(seconds) for seconds in vars(self).values())

    @property
    def serial_update(self) -> float:
        """The floor when only the drive runs beside the update: it reads ahead, and writes into the next step."""
        if self.crossing_seconds:
            return max(self.longest, self.compute_seconds + self.crossing_seconds)
        beside = max(self.compute_seconds, self.onload_seconds, self.offload_seconds)
        return max(self.longest, beside + self.update_seconds - self.sum_seconds)


def floors_of(traffic: Sequence[BlockTraffic], case: Case, room_bytes: int) -> Floors:
    """The floors of `traffic`, on a device with `room_bytes` for blocks that visit.

    Loads are fewest when as much is kept as there is room for. Weights that change are loaded at least once a step.
    """
    method, share, batches = case.method, case.share, case.work.micro_batches
    passes = batches * (2 if case.trains else 1)

    def total(amount: Callable[[BlockTraffic], float]) -> float:
        return sum(map(amount, traffic))

    def least(amount: Callable[[BlockTraffic], float]) -> float:
        """The least `amount` of the loaded bytes: blocks with the most per byte stay, others come in each pass."""
        found, left = 0.0, loaded
        shares = ((amount(own) / own.block_bytes, own.block_bytes) for own in traffic if own.block_bytes)
        for share_of_block, nbytes in sorted(shares):
            found += share_of_block * min(left, passes * nbytes)
            left -= min(left, passes * nbytes)
        return max(found, total(amount)) if case.changes else found

    whole = total(lambda own: own.block_bytes)
    loaded = passes * max(0.0, whole - room_bytes) if method.streamed else 0.0
    loaded = max(loaded, whole) if case.changes else loaded

    def parts_bytes(own: BlockTraffic) -> float:
        return own.parts.nbytes * (2 if case.trains and own.parts.in_backward else 1)

    parts = batches * total(parts_bytes)
    activations = batches * total(lambda own: own.activation_bytes)
    spilled = activations if method.activations is Activations.SPILLED else 0.0
    on_disk = total(lambda own: own.state_bytes + own.spill_bytes) + spilled
    into, out = total(lambda own: own.update_in_bytes), total(lambda own: own.update_out_bytes)
    onload = least(lambda own: own.load_bytes or 0) + parts + activations + into
    onload += (batches - 1) * total(lambda own: own.sum_begins_bytes)
    offload = batches * total(lambda own: own.gradient_bytes) + activations + out
    read = batches * total(lambda own: parts_bytes(own) * bool(own.parts.disk_seconds))
    fetch = least(lambda own: own.fetch_bytes) + read + on_disk
    among = least(lambda own: own.gather_seconds)
    among += total(lambda own: own.reduce_seconds * (batches if own.reduces_always else 1))
    on_link = any(own.over_link for own in traffic)
    sums = batches * total(lambda own: own.sum_bytes) / share.update_rate
    computed = batches * total(lambda own: own.forward_seconds + own.backward_seconds)
    return Floors(
        compute_seconds=computed + total(lambda own: own.device_update_seconds),
        onload_seconds=onload / share.onload_bytes_per_second + among * on_link,
        offload_seconds=offload / share.offload_bytes_per_second + among * on_link,
        update_seconds=total(lambda own: own.update_bytes) / share.update_rate + sums,
        fetch_seconds=fetch / share.disk_read_bytes_per_second if fetch else 0.0,
        spill_seconds=on_disk / share.disk_write_bytes_per_second if on_disk else 0.0,
        collective_seconds=total(lambda own: own.pass_on_seconds) + among * (not on_link),
        network_seconds=total(lambda own: own.network_seconds),
        sum_seconds=sums,
        crossing_seconds=max(into / share.onload_bytes_per_second, out / share.offload_bytes_per_second),
    )


def hiding_tokens(traffic: Sequence[BlockTraffic], case: Case) -> dict[str, float]:
    """For each lane in use, the tokens per device and micro-batch (or step) from which it hides behind compute.

    The formula for one block is applied to all blocks together.
    """
    shape, method, share = case.shape, case.method, case.share
    passes, flops = 1, 2.0
    if case.trains:
        passes = 2
        flops += (4 if case.work.training is Training.FULL else 2) + 2 * (method.activations is Activations.RECOMPUTED)
    operations = flops / 2 * shape.forward_flops(1, case.work.sequence_length)

    def tokens(nbytes: float, rate: float) -> float:
        if not operations:
            return math.inf
        return tokens_to_hide(nbytes, share.flops_per_second, rate, flops_per_parameter=operations)

    moved = {
        name: sum(getattr(own, name) or 0 for own in traffic)
        for name in ("load_bytes", "fetch_bytes", "update_bytes", "state_bytes", "spill_bytes")
    }
    slower = min(share.disk_read_bytes_per_second, share.disk_write_bytes_per_second)
    state_bytes = moved["state_bytes"] and moved["state_bytes"] + moved["spill_bytes"]
    lanes = (
        ("onload", method.streamed, passes * moved["load_bytes"], share.onload_bytes_per_second),
        ("fetch of weights", moved["fetch_bytes"], passes * moved["fetch_bytes"], share.disk_read_bytes_per_second),
        ("update", moved["update_bytes"], moved["update_bytes"], share.update_rate),
        ("state on disk", state_bytes, state_bytes, slower),
    )
    return {name: tokens(nbytes, rate) for name, used, nbytes, rate in lanes if used}
