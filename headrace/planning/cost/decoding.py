"""How fast does a model write, one token of each sequence at a time? It depends on the experts on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.planning.cost.experts import ExpertCut, PartLoads, cut_of, loads_of
from headrace.planning.cost.hardware import Hardware
from headrace.planning.cost.packing import mean_read_share
from headrace.planning.cost.rows import room_for_rows, row_loads, without_tables
from headrace.planning.cost.shape import BlockKind, BlockShape
from headrace.planning.cost.tiers import Tiers, cache_bytes, taken_by_cache
from headrace.planning.cost.work import Case, Place, Work

_HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class DecodingRate:
    """Bytes moved per token, and tokens per second of all sequences, if `hit_rate` of the experts are on the device."""

    hit_rate: float
    onload_bytes: int
    fetch_bytes: int
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Decoding `sequences` at once, `context` tokens each, whose keys and values take `cache_bytes`.

    - `lacks_bytes`: what the device lacks for keys and values that stay there. The rates leave it out of account.
    - `cut`: the experts that come one by one, and the room for them. None: no experts do.
    - `wanted_experts`: how many experts of each layer one token of each sequence wants, with even routing.
    - `even`: the rate with even routing; `rates`: the rates for several shares of experts on the device; `given`: the
      rate for the share that the caller gave.
    - `whole`: the rate with whole layers. It applies if no experts come one by one.
    - `disk_share`: the share of travelling weights that rests on disk; `experts_disk_share`: the share of loaded
      experts that is read from disk. The others went to host memory when the device gave them up.
    """

    sequences: int
    context: int
    cache_bytes: int
    lacks_bytes: int
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
        """The same as plain data, for JSON."""
        cut, experts = self.cut, None
        if cut is not None:
            own = {
                name: getattr(cut, name) for name in ("layers", "count", "routed", "slots", "held_share", "other_bytes")
            }
            experts = own | {"bytes": cut.expert_bytes, "wanted": self.wanted_experts}
            experts["disk_share"] = self.experts_disk_share
        plain = ("sequences", "context", "cache_bytes", "lacks_bytes", "compute_seconds", "disk_share")
        rates = {name: getattr(self, name) for name in ("whole", "even", "given")}
        return {
            **{name: getattr(self, name) for name in plain},
            "experts": experts,
            **{name: None if rate is None else vars(rate) for name, rate in rates.items()},
            "rates": [vars(rate) for rate in self.rates],
        }


def decoding_of(case: Case, tiers: Tiers, hit_rate: float | None = None) -> Decoding | None:
    """How a run decodes after a prompt of the work's length; None unless it is inference on one device.

    Keys and values on the device take free memory first, and then a part of what the prompt's pass has for weights.
    Others come once for each token, as `offload_cache` brings them.
    """
    shape, work, method, hardware = case.shape, case.work, case.method, case.hardware
    if case.trains or case.spread.data > 1:
        return None
    token = replace(work, sequence_length=1)
    cached = sum(cache_bytes(block, work) for block in shape.blocks)
    taken_bytes = taken_by_cache(case, tiers)
    budget = max(0, tiers.streaming_bytes - taken_bytes) if method.streamed else shape.weight_bytes
    disk_share = 0.0
    if method.weights is Place.DISK:
        beside = sum(held.nbytes for held in tiers.held if held.place is Place.HOST and held.purpose != "weights")
        room = tiers.capacity[Place.HOST] - beside
        disk_share = min(1.0, max(0.0, 1.0 - room / shape.weight_bytes))
    compute = sum(_compute_seconds(block, token, work.sequence_length, hardware) for block in shape.blocks)
    visiting = without_tables(case, tiers.tables)
    rows = [row_loads(shape.blocks[index], case, token.tokens, float(index in tiers.on_disk)) for index in tiers.tables]
    one = _Token(
        token.tokens,
        hardware,
        compute,
        len(shape.blocks),
        disk_share * mean_read_share(case),
        onload_bytes=cached if method.cache is not Place.DEVICE else 0,
        fetch_bytes=cached if method.cache is Place.DISK else 0,
    )
    found = Decoding(
        sequences=work.batch_size,
        context=work.sequence_length,
        cache_bytes=cached,
        lacks_bytes=max(0, taken_bytes - (tiers.streaming_bytes - tiers.least_bytes)),
        compute_seconds=compute,
        disk_share=disk_share,
        whole=one.rate(1.0, max(0, visiting.shape.weight_bytes - budget), rows),
    )
    cut = cut_of(replace(visiting, work=token), budget - room_for_rows(case, tiers.tables, token.tokens))
    if cut is None:
        return found
    wanted = max(block.wanted_experts(token.tokens) for block in shape.blocks)
    # Experts that the device gave up are in host memory, in the experts' part of its room for weights.
    on_host = (1.0 - disk_share) * cut.layers * cut.count * cut.expert_bytes
    from_disk = cut.read_share(on_host) if disk_share else 0.0

    def rate(there: float) -> DecodingRate:
        loads = [loads_of(block, token.tokens, there, hardware, from_disk=from_disk) for block in shape.blocks]
        loads += rows
        return one.rate(there, cut.other_bytes - cut.other_room_bytes, loads, from_disk)

    return replace(
        found,
        cut=cut,
        wanted_experts=wanted,
        experts_disk_share=from_disk,
        even=rate(cut.hit_rate(wanted)),
        given=None if hit_rate is None else rate(hit_rate),
        rates=tuple(map(rate, _HIT_RATES)),
    )


def _compute_seconds(block: BlockShape, token: Work, context: int, hardware: Hardware) -> float:
    """Seconds that the block computes for one token of each sequence, which reads keys and values of its context."""
    if block.kind is BlockKind.EMBEDDING:
        return 0.0
    cached = cache_bytes(block, replace(token, sequence_length=context))
    read = (block.read_bytes(token.tokens) + cached) / hardware.device_bytes_per_second
    flops = block.forward_flops(token.tokens, block.cached_tokens(context))
    return max(flops / hardware.flops_per_second, read)


@dataclass(frozen=True)
class _Token:
    """What all rates have in common: the figures of one token of each sequence."""

    tokens: int
    hardware: Hardware
    compute_seconds: float
    blocks: int
    read_share: float  # the share of visiting weights that is read from disk
    onload_bytes: int  # of keys and values that come to the device
    fetch_bytes: int  # of these, those that are read from disk

    def rate(
        self, there: float, visiting_bytes: float, experts: Sequence[PartLoads], from_disk: float = 0.0
    ) -> DecodingRate:
        """The rate if first missing experts come, while nothing computes, and then, beside compute, visiting weights,
        keys and values.
        """
        hardware, visits = self.hardware, 0.0
        expert_bytes = sum(load.nbytes for load in experts)
        read_bytes = self.read_share * visiting_bytes + self.fetch_bytes
        visits_bytes = visiting_bytes + self.onload_bytes
        if visits_bytes:
            kinds = (visiting_bytes > 0) + (self.onload_bytes > 0)
            latency = hardware.link_latency_seconds * self.blocks * kinds
            visits = latency + visits_bytes / hardware.onload_bytes_per_second
        if read_bytes:
            visits = max(visits, read_bytes / hardware.disk_read_bytes_per_second)
        seconds = sum(load.seconds for load in experts) + max(self.compute_seconds, visits)
        return DecodingRate(
            hit_rate=there,
            onload_bytes=round((expert_bytes + visits_bytes) / self.tokens),
            fetch_bytes=round((from_disk * expert_bytes + read_bytes) / self.tokens),
            tokens_per_second=self.tokens / seconds,
        )
