"""What crosses where when the devices of a node share one copy of the model? By the cheaper way, block by block.

The copy (weights, gradients, master and state) is in host memory, or on the node's drives, once for each node; each
device of the node computes its own micro-batches, and updates its range of every block.

- A block comes whole over the own link of each device, or each device brings its range, and the others send theirs.
- Gradients leave whole over the own link of each device, and each device's process adds up its range of all of them on
  the host; or the devices add them up among themselves, and each sends its range out.
- Among nodes each range is summed up over the network, from host memory to host memory, once a step.

Where devices reach each other over the link to the host (PCIe), what they send each other takes its time there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planning.cost.hardware import FABRIC, NO_PEERS, Hardware
from headrace.planning.cost.shape import BlockShape
from headrace.planning.cost.work import Method, Place, Spread, Training, Work

__all__ = ["Crossing", "Sharing", "crossing_of", "sharing_of"]

_TIE = 1.0 - 1e-9  # no collective where it saves nothing
# Of what a ring sends between hosts' memories, in passes over that memory: it is read to be sent, and written where it
# arrives; half of it is added to what is there, which reads two and writes one.
_RING_PASSES = 2 + 1.5


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What one device moves of one block: bytes over its own link, seconds among devices, bytes in host memory.

    `gather_seconds`: of the others' ranges at each load, 0 where the whole block is loaded. Each time that gradients
    leave: `reduce_seconds` among devices before, 0 where `sum_bytes` are read and written on the host behind it.
    `network_...`: once a step.
    """

    load_bytes: float
    gather_seconds: float
    gradient_bytes: float
    reduce_seconds: float
    sum_bytes: float
    network_bytes: float
    network_seconds: float

    @property
    def network_dram_bytes(self) -> float:
        return _RING_PASSES * self.network_bytes


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the devices of a node share one copy: `ranks` of them on each of `nodes` nodes.

    `gathered`, `reduced`: how many of `loaded` and of `trained` blocks cross with the help of the other devices.
    """

    ranks: int
    nodes: int
    loaded: int
    gathered: int
    trained: int
    reduced: int

    def text(self) -> str:
        """In words."""
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


def sharing_of(crossings: Sequence[Crossing | None], work: Work, spread: Spread, method: Method) -> Sharing | None:
    """In numbers, of the blocks' crossings; None where nothing is shared."""
    found = [crossing for crossing in crossings if crossing is not None]
    if not found:
        return None
    loads = method.streamed or (work.training is Training.FULL and method.state is not Place.DEVICE)
    return Sharing(
        ranks=spread.ranks,
        nodes=spread.nodes,
        loaded=len(found) if loads else 0,
        gathered=sum(crossing.gather_seconds > 0 for crossing in found) if loads else 0,
        trained=sum(crossing.gradient_bytes > 0 for crossing in found),
        reduced=sum(crossing.reduce_seconds > 0 for crossing in found),
    )


def crossing_of(block: BlockShape, work: Work, spread: Spread, method: Method, hardware: Hardware) -> Crossing | None:
    """How a block crosses; None where each replica has a copy of its own, or ZeRO says who has what."""
    if not spread.shares(method, work.training):
        return None
    loaded = block.weight_bytes * method.crossing_share
    own = loaded / spread.ranks
    gather = _helped_seconds(loaded, own, hardware.onload_bytes_per_second, hardware)
    gathers = gather is not None and gather < _TIE * _load_seconds(loaded, hardware)
    left = _leaving_bytes(block, work, method)
    part = left / spread.ranks
    reduce = _helped_seconds(left, part, hardware.offload_bytes_per_second, hardware)
    reduces = reduce is not None and reduce < _TIE * _bounce_seconds(left, part, hardware)
    summed = 0.0 if reduces or spread.ranks == 1 else left + part * (2 if work.micro_batches > 1 else 1)
    whole = _leaving_bytes(block, work, method, whole=True)
    sent = 2 * whole / spread.ranks * (spread.nodes - 1) / spread.nodes
    rate = hardware.node_bytes_per_second / hardware.devices
    return Crossing(
        load_bytes=own if gathers else loaded,
        gather_seconds=_among_seconds(loaded - own, hardware) if gathers else 0.0,
        gradient_bytes=part if reduces else left,
        reduce_seconds=_among_seconds(left - part, hardware) if reduces else 0.0,
        sum_bytes=summed,
        network_bytes=sent,
        network_seconds=sent / rate if sent else 0.0,
    )


def _leaving_bytes(block: BlockShape, work: Work, method: Method, *, whole: bool = False) -> float:
    """Gradients of one device that go to the host at once; `whole`: in a step, after they are added up."""
    if work.training is Training.NONE or method.state is Place.DEVICE:
        return 0.0
    return method.host_share * work.gradient_bytes * block.trainable / (1 if whole else method.sent_in(work))


def _load_seconds(loaded: float, hardware: Hardware) -> float:
    """Each device loads all of it at once."""
    return max(loaded / hardware.onload_bytes_per_second, loaded / _dram_rate(hardware))


def _bounce_seconds(left: float, part: float, hardware: Hardware) -> float:
    """All of it leaves each device, is written, and read for the sum, of which each writes its range."""
    update = hardware.update_rate / hardware.devices
    return max(
        left / hardware.offload_bytes_per_second, (2 * left + part) / _dram_rate(hardware), (left + part) / update
    )


def _helped_seconds(whole: float, own: float, link: float, hardware: Hardware) -> float | None:
    """The own range over the own link, the rest among devices: the slowest of what runs at once. None: no way there."""
    if hardware.peer == NO_PEERS or own >= whole:
        return None
    among = _among_seconds(whole - own, hardware)
    on_link = own / link if hardware.peer == FABRIC else own / link + among
    return max(on_link, among, own / _dram_rate(hardware))


def _among_seconds(nbytes: float, hardware: Hardware) -> float:
    return nbytes / (hardware.collective_bytes_per_second or hardware.onload_bytes_per_second)


def _dram_rate(hardware: Hardware) -> float:
    """One device's share."""
    return hardware.dram_bytes_per_second / hardware.devices
