"""What crosses where when there are several devices? By the cheaper way, block by block.

If the devices of a node share one copy of the model, that copy (weights, gradients, master and state) is in host memory
or on the node's drives, once for each node. Each device computes its own micro-batches, and updates its range of every
block.

- A block comes whole over each device's own link, or each device loads its range and sends it to the others.
- Gradients leave whole over each device's own link, and its process adds up its range of all devices' gradients on the
  host; or the devices add them up among themselves, and each sends its range out.
- Among nodes, each range is summed up over the network, from host memory to host memory, once a step.

Otherwise each replica has its own copy. In each step, replicas all-reduce gradients (ZeRO stage 0), or scatter them and
gather the updated weights (stages 1 and 2). A ring over n devices carries (n - 1) / n of the bytes for a scatter or a
gather, and twice that for an all-reduce. Over whole nodes, the ring crosses from each node to the next once, with all
of the node's network. If devices reach each other over the link to the host (PCIe), what they send each other of a
shared copy takes time on that link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planning.cost.hardware import FABRIC, NO_PEERS, Hardware
from headrace.planning.cost.shape import BlockShape
from headrace.planning.cost.work import Case, Spread, Training

_TIE = 1.0 - 1e-9  # no collective where it saves nothing
# Passes over host memory for each byte that a ring sends between hosts: it is read to be sent, and written where it
# arrives. Half of the bytes are added to what is there, which reads two and writes one.
_RING_PASSES = 2 + 1.5


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What one device moves of one block: bytes over its own link, seconds among devices, bytes in host memory.

    - `load_bytes` cross at each load (None: the whole block); gathering the others' ranges then takes `gather_seconds`.
    - Each time that gradients leave, `gradient_bytes` cross after `reduce_seconds` among devices (`reduces_always`: in
      each micro-batch, not only in the last). The host then reads and writes `sum_bytes` to add up all devices' own.
    - Once a step, `network_bytes` cross for the sum over nodes, and `pass_on_seconds` send updated weights to others.
    """

    load_bytes: int | None = None
    gather_seconds: float = 0.0
    gradient_bytes: int = 0
    reduce_seconds: float = 0.0
    reduces_always: bool = False
    sum_bytes: float = 0.0
    network_bytes: int = 0
    network_seconds: float = 0.0
    pass_on_seconds: float = 0.0

    @property
    def network_dram_bytes(self) -> float:
        return _RING_PASSES * self.network_bytes


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How `ranks` devices on each of `nodes` nodes share one copy.

    The other devices help with the weights of `gathered` of the `loaded` blocks, and with the gradients of `reduced` of
    the `trained` blocks.
    """

    ranks: int
    nodes: int
    loaded: int
    gathered: int
    trained: int
    reduced: int

    def text(self) -> str:
        """The sharing in words."""
        where = f"one on each of {self.nodes} nodes" if self.nodes > 1 else "one on the host"
        if self.ranks == 1:
            return where
        parts = [f"{where}, shared by {self.ranks} devices"]
        if self.loaded:
            parts.append(
                _way(self.gathered, self.loaded, "weights", "gathered from the others", "whole over each link")
            )
        if self.trained:
            parts.append(_way(self.reduced, self.trained, "gradients", "summed among devices", "summed on the host"))
        return "; ".join(parts)


def _way(helped: int, blocks: int, what: str, by_others: str, alone: str) -> str:
    if helped in (0, blocks):
        return f"{what} {by_others if helped else alone}"
    return f"{what} of {helped} blocks {by_others}, of {blocks - helped} {alone}"


def sharing_of(crossings: Sequence[Crossing], case: Case) -> Sharing | None:
    """The sharing that the blocks' crossings amount to; None if no copy is shared."""
    if not case.shares:
        return None
    spread, loads = case.spread, case.method.streamed or case.changes
    return Sharing(
        ranks=spread.ranks,
        nodes=spread.nodes,
        loaded=len(crossings) if loads else 0,
        gathered=sum(crossing.gather_seconds > 0 for crossing in crossings) if loads else 0,
        trained=sum(crossing.gradient_bytes > 0 for crossing in crossings),
        reduced=sum(one.gradient_bytes > 0 and not one.sum_bytes for one in crossings) if spread.ranks > 1 else 0,
    )


def crossing_of(block: BlockShape, case: Case) -> Crossing:
    """What one device moves of a block, by the cheaper way."""
    work, spread, method, hardware = case.work, case.spread, case.method, case.hardware
    loaded = block.weight_bytes * method.crossing_share
    summed = work.gradient_bytes * block.trainable if case.trains else 0.0
    leaves = method.host_share * summed if case.gradients_leave else 0.0
    left = leaves / case.sent_in
    among = _ring_seconds(summed, spread, hardware) * (1 if spread.zero_stage else 2)
    if not case.shares:
        return Crossing(
            load_bytes=round(loaded),
            gradient_bytes=int(spread.divided(left, 2)),
            reduce_seconds=among,
            pass_on_seconds=_pass_on_seconds(block, case),
        )
    own, part = loaded / spread.ranks, left / spread.ranks
    gather = _helped_seconds(loaded, own, hardware.onload_bytes_per_second, hardware)
    gathers = gather is not None and gather < _TIE * _load_seconds(loaded, hardware)
    reduce = _helped_seconds(left, part, hardware.offload_bytes_per_second, hardware)
    reduces = reduce is not None and reduce < _TIE * _bounce_seconds(left, part, hardware)
    # Gradients of what the device updates are summed up among all devices; those of what the host updates, as above.
    by_devices = among * method.device_share / case.sent_in
    on_host = left + part * (2 if work.micro_batches > 1 else 1)
    sent = 2 * leaves / spread.ranks * (spread.nodes - 1) / spread.nodes
    return Crossing(
        load_bytes=round(own if gathers else loaded),
        gather_seconds=_among_seconds(loaded - own, hardware) if gathers else 0.0,
        gradient_bytes=round(part if reduces else left),
        reduce_seconds=by_devices + (_among_seconds(left - part, hardware) if reduces else 0.0),
        reduces_always=case.sent_in > 1 or reduces,
        sum_bytes=0.0 if reduces or spread.ranks == 1 else on_host,
        network_bytes=round(sent),
        network_seconds=sent * hardware.devices / hardware.node_bytes_per_second if sent else 0.0,
    )


def _pass_on_seconds(block: BlockShape, case: Case) -> float:
    """Seconds to send a block's updated weights to the replicas that did not update them."""
    if not case.trains or not case.spread.zero_stage:
        return 0.0
    whole = block.weight_bytes * bool(block.trainable)
    nbytes = 2 * block.trainable if case.work.training is Training.ADAPTER else whole
    return _ring_seconds(nbytes, case.spread, case.hardware)


def _ring_seconds(nbytes: float, spread: Spread, hardware: Hardware) -> float:
    """Seconds of a ring that carries `nbytes` past each replica, except the replica's own part."""
    rate = hardware.collective_bytes_per_second or hardware.onload_bytes_per_second
    if spread.nodes > 1 and hardware.node_bytes_per_second:
        rate = min(rate, hardware.node_bytes_per_second)
    return (spread.data - 1) / spread.data * nbytes / rate


def _load_seconds(loaded: float, hardware: Hardware) -> float:
    """Seconds if all devices load the whole block at the same time."""
    return max(loaded / hardware.onload_bytes_per_second, loaded / _dram_rate(hardware))


def _bounce_seconds(left: float, part: float, hardware: Hardware) -> float:
    """Seconds if all gradients leave each device, are written, and are read for a sum; each writes its range of it."""
    update = hardware.update_rate / hardware.devices
    return max(
        left / hardware.offload_bytes_per_second, (2 * left + part) / _dram_rate(hardware), (left + part) / update
    )


def _helped_seconds(whole: float, own: float, link: float, hardware: Hardware) -> float | None:
    """Seconds with the own range over the own link and the rest among devices; None if the others cannot help."""
    if hardware.peer == NO_PEERS or own >= whole:
        return None
    among = _among_seconds(whole - own, hardware)
    on_link = own / link if hardware.peer == FABRIC else own / link + among
    return max(on_link, among, own / _dram_rate(hardware))


def _among_seconds(nbytes: float, hardware: Hardware) -> float:
    return nbytes / (hardware.collective_bytes_per_second or hardware.onload_bytes_per_second)


def _dram_rate(hardware: Hardware) -> float:
    """One device's share of the rate of host memory."""
    return hardware.dram_bytes_per_second / hardware.devices
