"""How long do the replicas of a ZeRO stage, or whose weights stay on the device, talk to each other? In rings.

A ring over n devices carries (n - 1) / n of the bytes for a scatter or a gather, and twice that for an all-reduce. A
replica's step has an all-reduce of gradients (stage 0), or a scatter of them and a gather of what was updated (1, 2).
What replicas do that share a copy on the host is in `sharing.py`. A ring over whole nodes crosses from each to the next
once, with all of the node's network.
"""

from __future__ import annotations

from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.shape import BlockShape, ModelShape
from headrace.planning.cost.work import Method, Place, Spread, Training, Work

__all__ = ["changes", "collective_seconds", "pass_on_seconds", "reduce_seconds", "summed_share"]


def reduce_seconds(block: BlockShape, work: Work, spread: Spread, hardware: Hardware) -> float:
    """A block's gradients across the replicas, once a step: to all of them, or (from stage 1 on) to each its share."""
    if spread.data == 1 or work.training is Training.NONE:
        return 0.0
    times = 1 if spread.zero_stage else 2
    return times * _ring_seconds(work.gradient_bytes * block.trainable, spread, hardware)


def pass_on_seconds(block: BlockShape, work: Work, spread: Spread, hardware: Hardware) -> float:
    """A block's updated weights to the replicas that did not update them (stages 1 and 2)."""
    if spread.data == 1 or work.training is Training.NONE or spread.zero_stage not in (1, 2):
        return 0.0
    nbytes = 2 * block.trainable if work.training is Training.ADAPTER else block.weight_bytes * bool(block.trainable)
    return _ring_seconds(nbytes, spread, hardware)


def collective_seconds(shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware) -> float:
    """All of these in one step. Shared copies are left out."""
    seconds = 0.0
    for block in shape.blocks:
        reduce = reduce_seconds(block, work, spread, hardware) * summed_share(work, spread, method)
        seconds += reduce + pass_on_seconds(block, work, spread, hardware)
    return seconds


def summed_share(work: Work, spread: Spread, method: Method) -> float:
    """The share of gradients that the devices sum up for themselves: where a copy is shared, those they update."""
    return method.device_share if spread.shares(method, work.training) else 1.0


def changes(work: Work, method: Method) -> bool:
    """Whether weights change on the host at each step, and so cross to the device once at least."""
    return work.training is Training.FULL and method.state is not Place.DEVICE


def _ring_seconds(nbytes: float, spread: Spread, hardware: Hardware) -> float:
    """Of a ring that carries so many bytes past each replica, but its own part."""
    rate = hardware.collective_bytes_per_second or hardware.onload_bytes_per_second
    if spread.nodes > 1 and hardware.node_bytes_per_second:
        rate = min(rate, hardware.node_bytes_per_second)
    return (spread.data - 1) / spread.data * nbytes / rate
