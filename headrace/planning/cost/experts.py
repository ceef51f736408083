"""Which experts travel one by one, how many does the device have room for, and how many do calls load?

What `weights/model/partition.py` and `weights/movement/slices.py` decide, in numbers: see docs/design/experts.md.
"""

from dataclasses import dataclass, replace

from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.shape import BlockShape, ModelShape
from headrace.planning.cost.work import Case, Training
from headrace.planning.keeping import passes_through

_WHOLE_BITS = 16  # bits of a weight; experts that are stored in fewer travel as stored, with their layer


@dataclass(frozen=True, kw_only=True)
class ExpertCut:
    """The experts that travel one by one, apart from the other weights, which visit with their layers.

    `layers` layers have up to `count` experts each, and a token goes to `routed` of them. An expert has `expert_bytes`.
    The device has `budget_bytes` for experts and for the other weights, which have `other_bytes`.
    """

    layers: int
    count: int
    routed: int
    expert_bytes: int
    other_bytes: int
    budget_bytes: int

    @property
    def banks(self) -> tuple[int, int]:
        """The number of banks on the device, and of slots in each. A slot holds one expert."""
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
        """The share of all experts that the device has room for."""
        return min(1.0, self.slots / (self.layers * self.count))

    @property
    def other_room_bytes(self) -> int:
        """Bytes on the device for the other weights."""
        return min(self.other_bytes, self.budget_bytes - self.bank_bytes)

    def hit_rate(self, wanted: float) -> float:
        """The share of a call's experts that are on the device, if each layer wants `wanted` and routing is even.

        The layer called before holds all that it wanted; the other layers share the slots that are left.
        """
        left = max(0.0, self.slots - wanted) / max(1, self.layers - 1)
        return min(self.held_share, left / self.count)

    def passing_hit_rate(self, wanted: float) -> float:
        """The same for calls that want nearly all of each layer; 0 for calls that want fewer. Each bank still holds
        experts of earlier calls, in the slots that the experts of one call leave free.
        """
        banks, slots = self.banks
        there = banks * max(0.0, slots - wanted) if passes_through(wanted, self.count) else 0.0
        return min(1.0, there / (self.layers * wanted))

    def read_share(self, host_bytes: float) -> float:
        """The share of loaded experts that is read from disk, if the host has `host_bytes` that the device gave up."""
        away = self.layers * self.count - self.slots
        return max(0.0, 1.0 - host_bytes / self.expert_bytes / away) if away else 0.0


def can_cut(case: Case) -> bool:
    """Whether experts travel one by one if not all weights have room on the device."""
    with_experts = [block for block in case.shape.blocks if block.experts]
    alone = case.method.streamed and case.spread.data == 1 and case.work.training is not Training.FULL
    travel = all(block.weight_bits >= _WHOLE_BITS and not block.trains_experts for block in with_experts)
    return alone and travel and bool(with_experts)


def cut_of(case: Case, budget_bytes: int) -> ExpertCut | None:
    """How experts are cut from their layers if the device has `budget_bytes` for weights; None: they are not.

    Experts stay with their layers if all weights stay, and in training if a call wants more experts than a bank holds.
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
    """The least device memory: for the experts of one token, and the largest block without its experts."""
    cut = _cut(shape, 0)
    return cut.bank_bytes + max(others_of(block).weight_bytes for block in shape.blocks)


def others_of(block: BlockShape) -> BlockShape:
    """The block without its experts."""
    if not block.experts:
        return block
    return replace(block, parameters=block.parameters - block.expert_parameters, expert_parameters=0, experts=0)


@dataclass(frozen=True, kw_only=True)
class PartLoads:
    """The experts that each visit to a layer loads once its router has computed, or the rows of a table that a lookup
    loads. The visit waits for them.
    """

    nbytes: float
    link_seconds: float
    disk_seconds: float  # 0: all come from host memory
    in_backward: bool = True  # whether a visit in backward loads them, too

    @property
    def seconds(self) -> float:
        return max(self.link_seconds, self.disk_seconds)


NO_EXPERTS = PartLoads(nbytes=0.0, link_seconds=0.0, disk_seconds=0.0)


def loads_of(
    block: BlockShape, tokens: int, hit_rate: float, hardware: Hardware, *, from_disk: float = 0.0
) -> PartLoads:
    """What a call loads if the share `hit_rate` of its experts is on the device, and `from_disk` of the rest on disk.

    The host first reads the router's result, which takes one transfer's latency. `hardware` is the device's share of
    the node.
    """
    loaded = block.wanted_experts(tokens) * (1.0 - hit_rate)
    nbytes = loaded * block.expert_bytes
    wait = hardware.link_latency_seconds if block.experts else 0.0
    link = wait + loaded * hardware.link_latency_seconds + nbytes / hardware.onload_bytes_per_second
    disk = 0.0
    if from_disk and nbytes:
        disk = wait + hardware.disk_latency_seconds + from_disk * nbytes / hardware.disk_read_bytes_per_second
    return PartLoads(nbytes=nbytes, link_seconds=link, disk_seconds=disk)


def pass_loads(block: BlockShape, case: Case, cut: ExpertCut | None, from_disk: float) -> PartLoads:
    """The experts that a visit loads in a forward, and again in a backward. `from_disk`: the share read from disk.

    A prompt finds the experts that the prompt before it left on the device. In training, backward and the next forward
    each begin with the experts of as many layers on the device as there are banks.
    """
    if cut is None or not block.experts:
        return NO_EXPERTS
    there = min(1.0, cut.banks[0] / cut.layers)
    if not case.trains:
        there = cut.passing_hit_rate(block.wanted_experts(case.work.tokens))
    return loads_of(block, case.work.tokens, there, case.share, from_disk=from_disk)
