"""Which closed formulas tell when transfers hide behind compute? The usual ones, corrected.

Times in seconds, sizes in bytes, rates in bytes or operations per second; a link has one rate for each direction.
"The tutorial" is the one on extending memory beyond the GPU that the project started from; where it errs, the
docstring says how. Bytes that a run holds: `tables.py`. Users find both in `headrace.formulas`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "ADAM_BYTES",
    "Compression",
    "adam_seconds",
    "arithmetic_intensity",
    "batch_multiplier",
    "codec_cores",
    "compression_break_even",
    "efficiency",
    "fraction_step_seconds",
    "hideable_activation_share",
    "layers_per_second",
    "overlap",
    "pipelined_seconds",
    "prefetch_bytes",
    "prefetch_depth",
    "resident_fraction",
    "step_seconds",
    "tokens_to_hide",
    "transfer_seconds",
    "wear_steps",
]

ADAM_BYTES = 28  # DRAM traffic of one update: gradient 2, weight out 2, and master and two moments read and written


def adam_seconds(parameters: float, dram_rate: float, *, copies_share: bool = False) -> float:
    """What Adam's update takes on the host, by its DRAM traffic: 28 bytes per parameter, 34 if copies share the DRAM.

    The tutorial ("Bandwidth Requirements") asks only whether gradients and weights cross the link in time. It counts 4
    bytes of each where 2 travel, and leaves the update out, which takes longer than both: 10B parameters at 200 GB/s
    are 1.4 s.
    """
    return parameters * (ADAM_BYTES + 6 * copies_share) / dram_rate


def fraction_step_seconds(
    baseline_seconds: float, fraction: float, host_update_seconds: float, *, device_update_seconds: float = 0.0
) -> float:
    """A step of which `fraction` of the optimizer's update runs on the host after backward, the rest on the device.

    `baseline_seconds`: with all of it on the device, which takes `device_update_seconds` of them; beside it the host
    works on its own part, which alone would take `host_update_seconds` for everything. Megatron-Bridge's page on CPU
    offloading says that the penalty scales linearly, with 1.9 times at 25% and 4.2 times at 100%: a line from 1.0 to
    4.2 has 1.8 at 25%, so a part of the cost does not depend on the fraction.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction}; give a share from 0 to 1")
    rest = baseline_seconds - device_update_seconds
    return rest + max((1 - fraction) * device_update_seconds, fraction * host_update_seconds)


def transfer_seconds(nbytes: float, rate: float, *, latency_seconds: float = 0.0, in_flight: int = 1) -> float:
    """What each of many transfers of `nbytes` adds, with `in_flight` of them on their way at once.

    max(s / B, (latency + s / B) / in_flight): alone it is latency and bytes over the rate; several hide each other's
    latency, up to the rate. The tutorial's table of tiers has latencies ("Bandwidth Analysis") that none of its
    formulas uses; its 10 us for NVMe is a fifth to a tenth of what a read of flash takes.
    """
    if in_flight < 1:
        raise ValueError(f"in_flight={in_flight}; at least 1 transfer is on its way")
    return max(nbytes / rate, (latency_seconds + nbytes / rate) / in_flight)


def arithmetic_intensity(
    tokens: float, bytes_per_parameter: float = 2.0, *, flops_per_parameter: float = 2.0, active_share: float = 1.0
) -> float:
    """Operations for each byte of weights that is loaded, with `tokens` tokens per load.

    k n / b: `flops_per_parameter` is 2 in forward, 4 in backward, 6 in backward with recomputation; `active_share` of
    the parameters meets a token (a mixture of experts: less than 1). A transfer hides when this is at least the
    machine's operations per second over the link's bytes per second. The tutorial ("Compute-Communication Overlap
    Analysis") has it for a dense layer in forward: 24 n H^2 operations for 24 H^2 bytes.
    """
    return flops_per_parameter * tokens * active_share / bytes_per_parameter


def tokens_to_hide(
    bytes_per_parameter: float,
    flops_per_second: float,
    link_rate: float,
    *,
    flops_per_parameter: float = 2.0,
    total_over_active: float = 1.0,
    context_over_hidden: float = 0.0,
) -> float:
    """Tokens per load from which a block's load hides behind its compute.

    n = b / k * F / B for b bytes moved and k operations per parameter and token: 2 in forward, 4 in backward, 6 in
    backward with recomputation. Attention adds compute, so it divides by (1 + S / 6H), with S / H given as
    `context_over_hidden` (half of it where a causal kernel skips what is masked); a mixture of experts multiplies by
    total over active parameters.

    The tutorial ("Compute-Communication Overlap Analysis") has 9750 for an A100, which holds for forward, for the
    rates as sold, and without attention; at what is reached (half of the operations, 25 GB/s) it is 6240.
    """
    plain = bytes_per_parameter / flops_per_parameter * flops_per_second / link_rate
    return plain * total_over_active / (1 + context_over_hidden / 6)


def batch_multiplier(transfer_seconds: float, compute_seconds: float) -> float:
    """How many times more tokens hide the transfer; 1 when it hides already.

    The tutorial (exercise 1) has 2.19 and then asks for 2.5. It believes that at twice the batch a layer computes for
    80 ms; it is 50, beside a transfer of 54.7, so twice the batch is 91% efficient, and 2.19 times is enough.
    """
    return max(1.0, transfer_seconds / compute_seconds)


def resident_fraction(transfer_seconds: float, compute_seconds: float) -> float:
    """The share of blocks that has to stay on the device so that the rest hides: 1 - Tc / Tt, at least 0.

    What helps where the transfer is the longer one and the number of tokens is fixed. The tutorial has no such formula.
    """
    return max(0.0, 1.0 - compute_seconds / transfer_seconds) if transfer_seconds else 0.0


def step_seconds(
    compute_seconds: float, transfer_seconds: float, *, layers: int = 1, sync_seconds: float = 0.0
) -> float:
    """A pass whose transfers run one layer ahead of compute, in totals over `layers` equal layers.

    t + (L - 1) max(t, c) + c + sync, for c and t of one layer: with one layer nothing overlaps and it is the sum; with
    many it approaches max(Tc, Tt) + sync, which is what the tutorial ("Throughput Model") gives for any number.
    In training each direction of the link is a transfer of its own: take the longer.
    """
    if layers < 1:
        raise ValueError(f"layers={layers}; at least 1")
    compute, transfer = compute_seconds / layers, transfer_seconds / layers
    return transfer + (layers - 1) * max(compute, transfer) + compute + sync_seconds


def pipelined_seconds(
    compute_seconds: Sequence[float], transfer_seconds: Sequence[float], *, buffers: int = 2, links: int = 1
) -> float:
    """One pass over layers that arrive over `links` serial links into `buffers` buffers; a value for each layer.

    A transfer starts when its link and a buffer are free. For equal layers on one link it comes to
    Tt + (L - 1) max(Tc, Tt) + Tc for any number of buffers from 2 on. The tutorial's condition, that no transfer takes
    longer than the compute before it, is for two buffers; with more, sums over several layers count. And
    (exercise 4) it divides the transfer by two where there are three buffers, as though a buffer brought a link with
    it: 50 ms instead of 80. A third buffer absorbs variance and adds no bandwidth.
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
    """Baseline over offloaded step time; above 0.9 means an overhead under 11.1% of compute.

    The tutorial ("Efficiency Metric") says under 10%. The baseline is the step without offloading, or, where that
    does not fit, compute alone.
    """
    return baseline_seconds / step_seconds


def overlap(compute_seconds: float, transfer_seconds: float, step_seconds: float) -> float:
    """The share of the transfers that hides: 1 - (step - compute) / transfer, between 0 and 1.

    It complements the efficiency, which is high for a long compute, whatever hides. The tutorial has no measure of it.
    """
    if not transfer_seconds:
        return 1.0
    return min(1.0, max(0.0, 1.0 - (step_seconds - compute_seconds) / transfer_seconds))


def prefetch_depth(transfer_seconds: float | Sequence[float], compute_seconds: float) -> int | None:
    """Blocks in flight that keep compute fed, or None where no number of them does.

    `transfer_seconds`: of one block over the link, or over each stage of a chain (disk to host, host to device);
    `compute_seconds`: of one block. ceil(sum of stages / compute), if every stage keeps up; when one does not, the
    slowest sets the pace whatever the depth: keep some blocks (`resident_fraction`) or process more tokens
    (`batch_multiplier`).

    The tutorial (exercise 6) gives ceil(Tt / Tc), 2 for 2 GB at 32 GB/s and 50 ms, and calls compute busy then: that
    would be 40 GB/s over a link of 32.
    """
    stages = [transfer_seconds] if isinstance(transfer_seconds, int | float) else list(transfer_seconds)
    if any(stage > compute_seconds * (1 + 1e-9) for stage in stages):
        return None
    return max(1, math.ceil(sum(stages) / compute_seconds - 1e-9))


def layers_per_second(depth: int, transfer_seconds: float, compute_seconds: float) -> float:
    """Throughput of layers that come over one link, by prefetch depth: 1 / (Tc + Tt) at 0, else 1 / max(Tc, Tt).

    The tutorial (exercise 6) has 1 / (Tt / k) below its best depth, as though each prefetched layer had a link of its
    own.
    """
    return 1.0 / (compute_seconds + transfer_seconds if depth < 1 else max(compute_seconds, transfer_seconds))


def prefetch_bytes(depth: int, layer_bytes: float) -> float:
    """Device memory of the layer that computes and `depth` layers ahead of it: (k + 1) S, as the tutorial has it.

    In training gradients on their way out come on top: those of two layers.
    """
    return (depth + 1) * layer_bytes


def hideable_activation_share(compute_seconds: float, activation_bytes: float, link_rate: float) -> float:
    """The share of a layer's activations whose offload hides behind its compute: min(1, Tc B / bytes).

    Tokens cancel: a layer of width H does 24 H^2 operations per token for about 34 H bytes, so all of them hide from
    H = 1.42 F / B on, and the layer's input alone (2 H bytes) from H = 0.083 F / B on. The tutorial calls activations
    poor candidates whatever the width ("What to Offload").
    """
    return min(1.0, compute_seconds * link_rate / activation_bytes) if activation_bytes else 1.0


@dataclass(frozen=True)
class Compression:
    """What a codec does to a transfer. Seconds without it, stage after stage, and in chunks with all stages at once.

    `needed_rate`: bytes per second that each stage of the codec must exceed, so that compression in chunks pays.
    """

    plain_seconds: float
    serial_seconds: float
    pipelined_seconds: float
    needed_rate: float

    @property
    def pays(self) -> bool:
        """Whether it saves time when chunks are coded while others move."""
        return self.pipelined_seconds < self.plain_seconds * 0.999

    @property
    def pays_serially(self) -> bool:
        """Whether it saves time when each stage waits for all of the one before."""
        return self.serial_seconds < self.plain_seconds * 0.999

    @property
    def gain(self) -> float:
        """Times faster, in chunks; below 1: slower."""
        return self.plain_seconds / self.pipelined_seconds


def compression_break_even(
    nbytes: float, ratio: float, compress_rate: float, decompress_rate: float, link_rate: float
) -> Compression:
    """Whether compressing `nbytes` for a link or a drive saves time.

    Rates in bytes per second, those of the codec of uncompressed bytes. For one direction give `math.inf` as the rate
    of the stage that is not on its way: a write only compresses, a read only decompresses. In chunks it takes
    max(M / C, M / (R B), M / D), so it needs C > B and D > B, and gains at most R. Below a ratio of 1.05 bytes go raw.

    The tutorial (exercise 5) has one stage after the other and no decompression: C > B / (1 - 1 / R). That is right for
    a program that compresses all and then writes. It concludes that ratios above 10 pay; with C below B none does.
    """
    plain = nbytes / link_rate
    if ratio < 1.05:
        return Compression(plain, plain, plain, math.inf)
    stages = (nbytes / compress_rate, nbytes / (ratio * link_rate), nbytes / decompress_rate)
    return Compression(plain, sum(stages), max(stages), link_rate)


# Byte planes apart, zstd 1.5.7 at level 1, bf16 weights: CPU time of one core; docs/design/disk.md has the machine.
WEIGHTS_RATIO = 1.46
ENCODE_RATE = 0.39e9  # bytes per second
DECODE_RATE = 0.38e9


def codec_cores(*, read_rate: float, write_rate: float) -> int:
    """Cores that must do nothing else for compression to pay on weights and state between host and disk.

    Chunk by chunk it pays when the codec outruns the disk, in each direction that is used; 0: none is. Measured with
    byte planes and zstd at level 1 (1.46 times smaller, 0.39 GB/s of a core in, 0.38 GB/s out). The tutorial says that
    LZ4 makes weights 1.3 to 1.5 times smaller; on bf16 weights it makes them 1.00 times smaller.
    """
    return max(math.ceil(read_rate / DECODE_RATE), math.ceil(write_rate / ENCODE_RATE))


def wear_steps(written_bytes_per_step: float, endurance_bytes: float) -> float:
    """Optimizer steps until the drives' guaranteed writes are used up; the tutorial does not ask."""
    return endurance_bytes / written_bytes_per_step if written_bytes_per_step else math.inf
