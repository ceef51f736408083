"""Which closed formulas tell when transfers hide behind compute? The usual ones, corrected.

Restated from the offloading tutorial that the project started from; where it errs, the docstring says how. Times in
seconds, sizes in bytes, rates in bytes or operations per second; a link has one rate for each direction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Compression",
    "adam_seconds",
    "batch_multiplier",
    "break_even_tokens",
    "codec_cores",
    "compression",
    "efficiency",
    "hideable_activation_share",
    "overlap",
    "pipelined_seconds",
    "prefetch_depth",
    "resident_fraction",
    "staging_buffers",
    "wear_steps",
    "zero_bytes",
]

ADAM_BYTES = 28  # DRAM traffic of one update: gradient 2, weight out 2, and master and two moments read and written


def adam_seconds(parameters: float, dram_rate: float, *, copies_share: bool = False) -> float:
    """What the update takes on the host, by its DRAM traffic: 28 bytes per parameter, 34 with the copy engines' own.

    The tutorial leaves this out of its condition for hiding (T1).
    """
    return parameters * (ADAM_BYTES + 6 * copies_share) / dram_rate


def break_even_tokens(
    bytes_per_parameter: float,
    flops_per_second: float,
    link_rate: float,
    *,
    flops_per_parameter: float = 2.0,
    total_over_active: float = 1.0,
    context_over_hidden: float = 0.0,
) -> float:
    """Tokens per load from which a block's load hides behind its compute (T4).

    n = b / k * F / B for b bytes moved and k operations per parameter and token: 2 in forward, 4 in backward, 6 in
    backward with recomputation. Attention adds compute, so it divides by (1 + S / 6H), with S / H given as
    `context_over_hidden`; a mixture of experts multiplies by total over active parameters.
    """
    plain = bytes_per_parameter / flops_per_parameter * flops_per_second / link_rate
    return plain * total_over_active / (1 + context_over_hidden / 6)


def batch_multiplier(transfer_seconds: float, compute_seconds: float) -> float:
    """How many times more tokens hide the transfer; 1 when it hides already (T10)."""
    return max(1.0, transfer_seconds / compute_seconds)


def resident_fraction(transfer_seconds: float, compute_seconds: float) -> float:
    """The share of blocks that has to stay on the device so that the rest hides (T10, T20): 1 - Tc / Tt, at least 0."""
    return max(0.0, 1.0 - compute_seconds / transfer_seconds) if transfer_seconds else 0.0


def pipelined_seconds(
    compute_seconds: Sequence[float], transfer_seconds: Sequence[float], *, buffers: int = 2, links: int = 1
) -> float:
    """One pass over layers that arrive over `links` serial links into `buffers` buffers (T6, T13).

    A transfer starts when its link and a buffer are free. For equal layers on one link it comes to
    Tt + (L - 1) max(Tc, Tt) + Tc for any number of buffers from 2 on: a third absorbs variance and adds no bandwidth
    (the tutorial divides the transfer by two there).
    """
    if buffers < 1 or links < 1:
        raise ValueError(f"buffers={buffers} and links={links}; both must be at least 1")
    free = [0.0] * links
    ends: list[float] = []
    for layer, (compute, transfer) in enumerate(zip(compute_seconds, transfer_seconds, strict=True)):
        link = free.index(min(free))
        room = ends[layer - buffers] if layer >= buffers else 0.0
        free[link] = max(free[link], room) + transfer
        ends.append(max(free[link], ends[-1] if ends else 0.0) + compute)
    return ends[-1] if ends else 0.0


def efficiency(baseline_seconds: float, step_seconds: float) -> float:
    """Baseline over offloaded step time (T7); above 0.9 means an overhead under 11.1% of compute."""
    return baseline_seconds / step_seconds


def overlap(compute_seconds: float, transfer_seconds: float, step_seconds: float) -> float:
    """The share of the transfers that hides (T7): 1 - (step - compute) / transfer, between 0 and 1."""
    if not transfer_seconds:
        return 1.0
    return min(1.0, max(0.0, 1.0 - (step_seconds - compute_seconds) / transfer_seconds))


def prefetch_depth(stage_seconds: Sequence[float], period_seconds: float) -> int | None:
    """Blocks in flight that keep compute fed through the stages of a chain (T16): ceil(sum of stages / period).

    None when some stage alone takes longer than the period: then no depth helps, the slowest stage sets the pace. The
    tutorial's ceil(Tt / Tc) asks for two buffers there and promises what the link cannot carry.
    """
    if any(stage > period_seconds * (1 + 1e-9) for stage in stage_seconds):
        return None
    return max(1, math.ceil(sum(stage_seconds) / period_seconds - 1e-9))


def staging_buffers(fetch_seconds: float, onload_seconds: float, period_seconds: float) -> int:
    """Host buffers of the chain disk to host to device (T20): ceil((fetch + onload) / period) + 1."""
    return math.ceil((fetch_seconds + onload_seconds) / period_seconds - 1e-9) + 1


def hideable_activation_share(compute_seconds: float, activation_bytes: float, link_rate: float) -> float:
    """The share of a layer's activations whose offload hides behind its compute (T5): min(1, Tc B / bytes).

    Tokens cancel: a layer of width H does 24 H^2 operations per token for about 34 H bytes, so all of them hide from
    H = 1.42 F / B on, and the layer's input alone (2 H bytes) from H = 0.083 F / B on.
    """
    return min(1.0, compute_seconds * link_rate / activation_bytes) if activation_bytes else 1.0


@dataclass(frozen=True)
class Compression:
    """What a codec would do to a transfer: seconds without, with it in front, and with both running at once."""

    plain_seconds: float
    serial_seconds: float
    pipelined_seconds: float

    @property
    def pays(self) -> bool:
        """Whether it saves time when chunks are coded while others move."""
        return self.pipelined_seconds < self.plain_seconds * 0.999

    @property
    def gain(self) -> float:
        return self.plain_seconds / self.pipelined_seconds


def compression(nbytes: float, *, ratio: float, codec_rate: float, disk_rate: float) -> Compression:
    """Whether compressing what goes to a disk saves time (T14); for what comes from it give the decoder's rate.

    One after the other it pays when C > B / (1 - 1 / R), as the tutorial says; chunk by chunk it takes
    max(M / C, M / (R B)), so it needs C > B alone, and with C <= B no ratio helps. Under a ratio of 1.05 bytes are
    stored raw.
    """
    plain = nbytes / disk_rate
    if ratio < 1.05:
        return Compression(plain, plain, plain)
    coded, moved = nbytes / codec_rate, nbytes / (ratio * disk_rate)
    return Compression(plain, coded + moved, max(coded, moved))


# Byte planes apart, then zstd at its fastest, on bf16 weights: measured on one core.
WEIGHTS_RATIO = 1.46
ENCODE_RATE = 0.3e9  # bytes per second
DECODE_RATE = 0.84e9


def codec_cores(*, read_rate: float, write_rate: float) -> int:
    """Cores that must do nothing else for compression to pay on weights and state between host and disk.

    Chunk by chunk it pays when the codec outruns the disk, in each direction that is used (T14, T15); 0: none is.
    """
    return max(math.ceil(read_rate / DECODE_RATE), math.ceil(write_rate / ENCODE_RATE))


def zero_bytes(parameters: float, *, stage: int, data: int, tensor: int = 1) -> float:
    """Bytes per device of weights, gradients and Adam state in mixed precision (2 + 2 + 12), by ZeRO stage (T8).

    The tutorial's 5.5 GB for 175B on 64 devices counts weights alone; with gradients and state it is 43.75 GB.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}; ZeRO has the stages 0 to 3")
    own = parameters / tensor
    weights = own * 2 / (data if stage >= 3 else 1)
    gradients = own * 2 / (data if stage >= 2 else 1)
    return weights + gradients + own * 12 / (data if stage >= 1 else 1)


def wear_steps(written_bytes_per_step: float, endurance_bytes: float) -> float:
    """Optimizer steps until the drives' guaranteed writes are used up."""
    return endurance_bytes / written_bytes_per_step if written_bytes_per_step else math.inf
