"""How fast does a model write, one token of each sequence at a time? By the share of wanted experts that is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.planning.cost.experts import ExpertCut, cut_of, loads_of
from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.packing import mean_read_share
from headrace.planning.cost.shape import BlockKind, BlockShape, ModelShape
from headrace.planning.cost.tiers import Tiers
from headrace.planning.cost.work import Method, Place, Spread, Training, Work

__all__ = ["Decoding", "DecodingRate", "decoding_of"]

_HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)
_CACHE_ELEMENT_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class DecodingRate:
    """Bytes that move for a token, and tokens of all sequences in a second, where that share of experts is there."""

    hit_rate: float
    onload_bytes: int
    fetch_bytes: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoding `sequences` at once, `context` tokens each, whose keys and values take `cache_bytes` on the device.

    - `cut`: the experts that come one by one, and the room for them; None: none do.
    - `wanted_experts`: of each layer, by a token of each sequence, with even routing.
    - `even`: with even routing; `rates`: by the share of experts that is there; `given`: by the one that was given.
    - `whole`: with whole layers; what is decoded where no experts come one by one.
    - `disk_share`: of the weights that travel, those that rest on disk; `experts_disk_share`: of experts that come one
      by one, those that come from there, with even routing. The others were given up by the device to host memory.
    """

    sequences: int
    context: int
    cache_bytes: int
    compute_seconds: float
    disk_share: float
    whole: DecodingRate
    cut: ExpertCut | None = None
    wanted_experts: float = 0.0
    experts_disk_share: float = 0.0
    even: DecodingRate | None = None
    given: DecodingRate | None = None
    rates: tuple[DecodingRate, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        cut = self.cut
        return {
            "sequences": self.sequences,
            "context": self.context,
            "cache_bytes": self.cache_bytes,
            "compute_seconds": self.compute_seconds,
            "disk_share": self.disk_share,
            "experts": None
            if cut is None
            else {
                "layers": cut.layers,
                "count": cut.count,
                "routed": cut.routed,
                "bytes": cut.expert_bytes,
                "wanted": self.wanted_experts,
                "slots": cut.slots,
                "held_share": cut.held_share,
                "disk_share": self.experts_disk_share,
                "other_bytes": cut.other_bytes,
            },
            "whole": vars(self.whole),
            "even": None if self.even is None else vars(self.even),
            "given": None if self.given is None else vars(self.given),
            "rates": [vars(rate) for rate in self.rates],
        }


def decoding_of(
    shape: ModelShape,
    work: Work,
    spread: Spread,
    method: Method,
    hardware: Hardware,
    tiers: Tiers,
    hit_rate: float | None = None,
) -> Decoding | None:
    """Of a run that infers, on one device, after a prompt of the work's length; None for others.

    Keys and values have a part of what the prompt's pass leaves for weights, as far as weights need not have it.
    """
    if work.training is not Training.NONE or spread.data > 1:
        return None
    token = replace(work, sequence_length=1)
    elements = sum(block.cache_elements for block in shape.blocks)
    cache_bytes = work.tokens * elements * _CACHE_ELEMENT_BYTES
    free_bytes = tiers.capacity[Place.DEVICE] - tiers.total(Place.DEVICE)
    budget = shape.weight_bytes
    if method.streamed:
        budget = max(0, tiers.streaming_bytes - max(0, cache_bytes - free_bytes))
    read_share = mean_read_share(shape, work, spread, method, hardware)
    parts = _Parts(shape, token, method, hardware, tiers, work.sequence_length, read_share)
    cut = cut_of(shape, token, spread, method, budget)
    whole = parts.rate(1.0, max(0, shape.weight_bytes - budget), None)
    found = Decoding(
        sequences=work.batch_size,
        context=work.sequence_length,
        cache_bytes=cache_bytes,
        compute_seconds=parts.compute_seconds,
        disk_share=parts.disk_share,
        whole=whole,
    )
    if cut is None:
        return found
    wanted = max(block.wanted_experts(token.tokens) for block in shape.blocks)

    def rate(there: float) -> DecodingRate:
        return parts.rate(there, cut.other_bytes - cut.other_room_bytes, cut)

    return replace(
        found,
        cut=cut,
        wanted_experts=wanted,
        experts_disk_share=parts.experts_disk_share(cut),
        even=rate(cut.hit_rate(wanted)),
        given=None if hit_rate is None else rate(hit_rate),
        rates=tuple(map(rate, _HIT_RATES)),
    )


class _Parts:
    """What a token takes."""

    def __init__(
        self,
        shape: ModelShape,
        token: Work,
        method: Method,
        hardware: Hardware,
        tiers: Tiers,
        context: int,
        read_share: float,
    ) -> None:
        self._shape = shape
        self._tokens = token.tokens
        self._hardware = hardware
        self.disk_share = 0.0
        if method.weights is Place.DISK:
            room = tiers.capacity[Place.HOST] - tiers.total(Place.HOST)
            self.disk_share = min(1.0, max(0.0, 1.0 - room / shape.weight_bytes))
        self._read_share = read_share
        self.compute_seconds = sum(self._compute_seconds(block, context) for block in shape.blocks)

    def experts_disk_share(self, cut: ExpertCut) -> float:
        """Host memory has experts that the device gave up, in experts' part of the room that it has for weights."""
        all_bytes = cut.layers * cut.count * cut.expert_bytes
        return cut.read_share((1.0 - self.disk_share) * all_bytes) if self.disk_share else 0.0

    def _compute_seconds(self, block: BlockShape, context: int) -> float:
        if block.kind is BlockKind.EMBEDDING:
            return 0.0
        cache = self._tokens * context * block.cache_elements * _CACHE_ELEMENT_BYTES
        flops = block.forward_flops(self._tokens, context)
        read = (block.read_bytes(self._tokens) + cache) / self._hardware.device_bytes_per_second
        return max(flops / self._hardware.flops_per_second, read)

    def rate(self, there: float, visiting_bytes: float, cut: ExpertCut | None) -> DecodingRate:
        """Missing experts come while nothing computes; weights that visit come beside compute, behind them."""
        hardware = self._hardware
        from_disk = 0.0 if cut is None else self.experts_disk_share(cut)
        loads = [
            loads_of(block, self._tokens, there, hardware, from_disk=from_disk)
            for block in self._shape.blocks
            if cut is not None and block.experts
        ]
        experts = sum(one.nbytes for one in loads)
        visits = 0.0
        read_bytes = self.disk_share * self._read_share * visiting_bytes
        if visiting_bytes:
            latency = hardware.link_latency_seconds * len(self._shape.blocks)
            visits = latency + visiting_bytes / hardware.onload_bytes_per_second
            if self.disk_share:
                visits = max(visits, read_bytes / hardware.disk_read_bytes_per_second)
        seconds = sum(one.seconds for one in loads) + max(self.compute_seconds, visits)
        return DecodingRate(
            hit_rate=there,
            onload_bytes=round((experts + visiting_bytes) / self._tokens),
            fetch_bytes=round((from_disk * experts + read_bytes) / self._tokens),
            tokens_per_second=self._tokens / seconds,
        )
