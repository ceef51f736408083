"""Which experts travel one by one, how many does the device have room for, and what do calls load of them?

What `weights/model/partition.py` and `weights/movement/slices.py` decide, in numbers: see docs/design/experts.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.shape import BlockShape, ModelShape
from headrace.planning.cost.work import Case, Place, Training
from headrace.planning.keeping import passes_through

__all__ = [
    "NO_EXPERTS",
    "ExpertCut",
    "ExpertLoads",
    "can_cut",
    "cut_of",
    "least_cut_bytes",
    "loads_of",
    "others_of",
    "pass_loads",
]

_WHOLE_BITS = 16  # of a weight; those that are stored in fewer travel as they are stored, with their layer


@dataclass(frozen=True, kw_only=True)
class ExpertCut:
    """Experts apart from the weights that always visit with their layers.

    `layers` have up to `count` experts each, of which a token goes to `routed`; `expert_bytes` of one;
    `budget_bytes` on the device, for them and for `other_bytes` of weights.
    """

    layers: int
    count: int
    routed: int
    expert_bytes: int
    other_bytes: int
    budget_bytes: int

    @property
    def banks(self) -> tuple[int, int]:
        """How many banks there are, and slots in each: for experts that are on the device at the same time."""
        room = max(0, self.budget_bytes - self.other_bytes) // self.expert_bytes
        slots = max(min(room, self.layers * self.count), self.routed)
        banks = max(1, slots // self.count)
        return banks, slots // banks

    @property
    def slots(self) -> int:
        banks, slots = self.banks
        return banks * slots

    @property
    def bank_bytes(self) -> int:
        return self.slots * self.expert_bytes

    @property
    def held_share(self) -> float:
        """Of all experts, those that the device has room for."""
        return min(1.0, self.slots / (self.layers * self.count))

    @property
    def other_room_bytes(self) -> int:
        """On the device, for the other weights."""
        return min(self.other_bytes, self.budget_bytes - self.bank_bytes)

    def hit_rate(self, wanted: float) -> float:
        """The share of the wanted experts of a call that is there, with even routing, of `wanted` in each layer.

        Room that the layer before has taken for more than its part is missing to the others.
        """
        left = max(0.0, self.slots - wanted) / max(1, self.layers - 1)
        return min(self.held_share, left / self.count)

    def passing_hit_rate(self, wanted: float) -> float:
        """As `hit_rate`, of calls that want nearly all of each layer: those before have left in each bank what has room
        beside the experts of one call. 0 for calls that want fewer.
        """
        banks, slots = self.banks
        there = banks * max(0.0, slots - wanted) if passes_through(wanted, self.count) else 0.0
        return min(1.0, there / (self.layers * wanted))

    def read_share(self, host_bytes: float) -> float:
        """The share of the experts that come which is read from disk; the host has so many bytes of those given up."""
        away = self.layers * self.count - self.slots
        return max(0.0, 1.0 - host_bytes / self.expert_bytes / away) if away else 0.0


def can_cut(case: Case) -> bool:
    """Whether there are experts that travel one by one if not all weights have room on the device."""
    with_experts = [block for block in case.shape.blocks if block.experts]
    alone = case.method.streamed and case.spread.data == 1 and case.work.training is not Training.FULL
    travel = all(block.weight_bits >= _WHOLE_BITS and not block.trains_experts for block in with_experts)
    return alone and travel and bool(with_experts)


def cut_of(case: Case, budget_bytes: int) -> ExpertCut | None:
    """How experts are cut from their layers with so much of the device for weights; None: they travel with them.

    So they do where all weights stay, and in training where a call wants more experts than a bank has room for.
    """
    if not can_cut(case) or case.shape.weight_bytes <= budget_bytes:
        return None
    cut = _cut(case.shape, budget_bytes)
    most = max(block.wanted_experts(case.work.tokens) for block in case.shape.blocks)
    return cut if not case.trains or most <= cut.banks[1] else None


def _cut(shape: ModelShape, budget_bytes: int) -> ExpertCut:
    with_experts = [block for block in shape.blocks if block.experts]
    return ExpertCut(
        layers=len(with_experts),
        count=max(block.experts for block in with_experts),
        routed=max(block.experts_per_token for block in with_experts),
        expert_bytes=max(block.expert_bytes for block in with_experts),
        other_bytes=sum(others_of(block).weight_bytes for block in shape.blocks),
        budget_bytes=budget_bytes,
    )


def least_cut_bytes(shape: ModelShape) -> int:
    """Device memory that experts of one token need beside the largest of the other blocks."""
    cut = _cut(shape, 0)
    return cut.bank_bytes + max(others_of(block).weight_bytes for block in shape.blocks)


def others_of(block: BlockShape) -> BlockShape:
    """The block without its experts."""
    if not block.experts:
        return block
    return replace(block, parameters=block.parameters - block.expert_parameters, expert_parameters=0, experts=0)


@dataclass(frozen=True, kw_only=True)
class ExpertLoads:
    """What each visit to a layer loads of its experts, once its router has computed: while it waits."""

    nbytes: float
    link_seconds: float
    disk_seconds: float  # 0: from host memory

    @property
    def seconds(self) -> float:
        return max(self.link_seconds, self.disk_seconds)


NO_EXPERTS = ExpertLoads(nbytes=0.0, link_seconds=0.0, disk_seconds=0.0)


def loads_of(
    block: BlockShape, tokens: int, hit_rate: float, hardware: Hardware, *, from_disk: float = 0.0
) -> ExpertLoads:
    """Of a call with so many tokens, of whose experts that share is there; `from_disk`: the share that rests there.

    The host reads the router's result: one transfer's latency. `hardware` is the device's share of the node.
    """
    loaded = block.wanted_experts(tokens) * (1.0 - hit_rate)
    nbytes = loaded * block.expert_bytes
    wait = hardware.link_latency_seconds if block.experts else 0.0
    link = wait + loaded * hardware.link_latency_seconds + nbytes / hardware.onload_bytes_per_second
    disk = 0.0
    if from_disk and nbytes:
        disk = wait + hardware.disk_latency_seconds + from_disk * nbytes / hardware.disk_read_bytes_per_second
    return ExpertLoads(nbytes=nbytes, link_seconds=link, disk_seconds=disk)


def pass_loads(block: BlockShape, case: Case, cut: ExpertCut | None) -> ExpertLoads:
    """What a block's visit loads of its experts in a forward, and again in a backward.

    A prompt finds what the one before has left. In training, those of as many layers as there are banks are there when
    backward begins, and when the next forward does.
    """
    if cut is None or not block.experts:
        return NO_EXPERTS
    there = min(1.0, cut.banks[0] / cut.layers)
    if not case.trains:
        there = cut.passing_hit_rate(block.wanted_experts(case.work.tokens))
    from_disk = float(case.method.weights is Place.DISK)
    return loads_of(block, case.work.tokens, there, case.share, from_disk=from_disk)
