"""How long do devices talk to each other? The collectives of tensor, data, pipeline and expert parallel runs, as rings.

A ring over n devices carries (n - 1) / n of the bytes for a gather or a scatter, and twice that for an all-reduce. By
ZeRO stage, a replica's step has: an all-reduce of gradients (0); a scatter of gradients and a gather of what was
updated (1, 2); a scatter of gradients and a gather of weights for each pass (3). Experts are spread over replicas:
each token's hidden state goes to those that it is routed to and back, and those replicas share nothing of them. What
replicas do that share a copy on the host is in `sharing.py`.

A ring over whole nodes crosses from each to the next once, with all of the node's network; of several rings side by
side, and of what devices send each other without a ring, each has its share of it.
"""

from __future__ import annotations

from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from headrace.planning.cost.work import Activations, Method, Place, Spread, Training, Work

__all__ = [
    "collective_seconds",
    "expert_seconds",
    "gather_seconds",
    "pass_on_seconds",
    "reduce_seconds",
    "summed_share",
    "tensor_seconds",
    "visit_seconds",
]


def tensor_seconds(shape: ModelShape, work: Work, spread: Spread, hardware: Hardware) -> float:
    """All-reduces of one layer's outputs across the tensor degree, per visit: two in a forward, two in a backward."""
    if spread.tensor == 1:
        return 0.0
    hidden = max(block.input_elements for block in shape.blocks)
    return (
        2
        * 2
        * _ring(spread.tensor)
        * 2
        * hidden
        * work.tokens
        / _rate(hardware, crosses=spread.tensor > hardware.devices, side_by_side=1)
    )


def expert_seconds(block: BlockShape, work: Work, spread: Spread, hardware: Hardware) -> float:
    """Tokens to the experts of one layer and back, per visit: an exchange of all with all each way."""
    if spread.expert == 1 or not block.expert_parameters:
        return 0.0
    sent = 2 * block.input_elements * block.experts_per_token * work.tokens / spread.tensor
    crosses = spread.tensor * spread.expert > hardware.devices
    return 2 * _ring(spread.expert) * sent / _rate(hardware, crosses=crosses, side_by_side=hardware.devices)


def visit_seconds(
    shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware
) -> tuple[list[float], list[float]]:
    """What compute waits for at the visits of each block, in forward and in backward: nothing can run beside it.

    Tensor all-reduces and exchanges with experts within each layer, again where it is recomputed; and a pipeline's
    hidden states, which come from the stage before this one at the first block, and whose gradient goes back there.
    """
    inside = tensor_seconds(shape, work, spread, hardware)
    forward = [
        inside + expert_seconds(block, work, spread, hardware) if block.kind is BlockKind.LAYER else 0.0
        for block in shape.blocks
    ]
    backward = [seconds * (2 if method.activations is Activations.RECOMPUTED else 1) for seconds in forward]
    if spread.pipeline > 1:
        hidden = max(block.input_elements for block in shape.blocks)
        rate = _rate(hardware, crosses=spread.nodes > 1, side_by_side=hardware.devices)
        handed_on = 2 * hidden * work.tokens / rate
        forward[0] += handed_on
        backward[0] += handed_on
    return forward, backward


def gather_seconds(block: BlockShape, spread: Spread, hardware: Hardware) -> float:
    """A block's weights from the replicas that share them (stage 3), before a pass over it."""
    if spread.weight_shards == 1:
        return 0.0
    return _among(block.expert_share, spread) * block.weight_bytes / _replica_rate(spread, hardware)


def reduce_seconds(block: BlockShape, work: Work, spread: Spread, hardware: Hardware) -> float:
    """A block's gradients across the replicas, once a step: to all of them, or (from stage 1 on) to each its share."""
    if spread.data == 1 or work.training is Training.NONE:
        return 0.0
    times = 1 if spread.zero_stage else 2
    ring = _among(block.trained_experts, spread)
    return times * ring * work.gradient_bytes * block.trainable / _replica_rate(spread, hardware)


def pass_on_seconds(block: BlockShape, work: Work, spread: Spread, hardware: Hardware) -> float:
    """A block's updated weights to the replicas that did not update them (stages 1 and 2)."""
    if spread.data == 1 or work.training is Training.NONE or spread.zero_stage not in (1, 2):
        return 0.0
    nbytes = 2 * block.trainable if work.training is Training.ADAPTER else block.weight_bytes * bool(block.trainable)
    return _among(block.trained_experts, spread) * nbytes / _replica_rate(spread, hardware)


def _among(experts: float, spread: Spread) -> float:
    """The ring over all replicas, and for the share of `experts` over those that have the same ones."""
    return (1 - experts) * _ring(spread.data) + experts * _ring(spread.data // spread.expert)


def collective_seconds(
    shape: ModelShape, work: Work, spread: Spread, method: Method, hardware: Hardware, streaming_bytes: int
) -> float:
    """All of these in one step, each weight gathered as seldom as the budget allows. Shared copies are left out."""
    training = work.training is not Training.NONE
    forward, backward = visit_seconds(shape, work, spread, method, hardware)
    seconds = work.micro_batches * (sum(forward) + (sum(backward) if training else 0.0))
    gathers = sum(gather_seconds(block, spread, hardware) for block in shape.blocks)
    if method.streamed and shape.weight_bytes:
        missing = max(0, shape.weight_bytes - streaming_bytes) / shape.weight_bytes
        passes = work.micro_batches * (2 if training else 1) * missing
        seconds += gathers * (max(1.0, passes) if changes(work, method) else passes)
    else:
        seconds += gathers * work.micro_batches * (2 if training else 1)
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


def _ring(devices: int) -> float:
    return (devices - 1) / devices


def _replica_rate(spread: Spread, hardware: Hardware) -> float:
    """Of a ring of replicas; those of the other tensor ranks run beside it."""
    return _rate(hardware, crosses=spread.data > spread.ranks, side_by_side=max(1, hardware.devices // spread.ranks))


def _rate(hardware: Hardware, *, crosses: bool, side_by_side: int) -> float:
    """Bytes per second of a device within the node, or of one of `side_by_side` that cross to the next node."""
    within = hardware.collective_bytes_per_second or hardware.onload_bytes_per_second
    if not crosses or not hardware.node_bytes_per_second:
        return within
    return min(within, hardware.node_bytes_per_second / side_by_side)
