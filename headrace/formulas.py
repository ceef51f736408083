"""How long does it take, does it hide, and what does it hold? Closed formulas on plain numbers, for estimates by hand.

Times in seconds, sizes in bytes, rates in bytes or operations per second; a link has one rate for each direction.
"The tutorial" is the one on extending memory beyond the GPU that the project started from; where it errs, the
docstring says how. `headrace.plan` simulates, and counts a model's blocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = [
    "Compression",
    "MemoryTable",
    "Precision",
    "Row",
    "batch_multiplier",
    "codec_cores",
    "compression_break_even",
    "efficiency",
    "layer_activation_bytes",
    "memory_table",
    "overlap",
    "prefetch_depth",
    "reserved_peak_blocks",
    "resident_fraction",
    "step_seconds",
    "tokens_to_hide",
    "wear_steps",
]


def tokens_to_hide(
    bytes_per_parameter: float,
    flops_per_second: float,
    link_rate: float,
    *,
    flops_per_parameter: float = 2.0,
    total_over_active: float = 1.0,
    context_over_hidden: float = 0.0,
) -> float:
    """The number of tokens per load from which a block's load hides behind its compute.

    n = b / k * F / B for b bytes moved and k operations per parameter and token: 2 in forward, 4 in backward, 6 in
    backward with recomputation. Attention adds compute, so it divides by (1 + S / 6H), with S / H given as
    `context_over_hidden` (half of it where a causal kernel skips what is masked); a mixture of experts multiplies by
    total over active parameters.

    The tutorial ("Compute-Communication Overlap Analysis") has 9750 for an A100. That holds for forward, for the
    advertised rates, and without attention; at the rates reached in practice (half of the operations, 25 GB/s) it is
    6240.
    """
    plain = bytes_per_parameter / flops_per_parameter * flops_per_second / link_rate
    return plain * total_over_active / (1 + context_over_hidden / 6)


def batch_multiplier(transfer_seconds: float, compute_seconds: float) -> float:
    """How many times as many tokens hide the transfer; 1 if it hides already.

    The tutorial (exercise 1) has 2.19 and then asks for 2.5. It assumes that at twice the batch a layer computes for 80
    ms. In fact it computes for 50 ms, beside a transfer of 54.7 ms, so twice the batch is 91% efficient, and 2.19 times
    is enough.
    """
    return max(1.0, transfer_seconds / compute_seconds)


def resident_fraction(transfer_seconds: float, compute_seconds: float) -> float:
    """The share of blocks that must stay on the device for the rest to hide: 1 - Tc / Tt, at least 0.

    This helps if the transfer takes longer than compute and the number of tokens is fixed. The tutorial has no such
    formula.
    """
    return max(0.0, 1.0 - compute_seconds / transfer_seconds) if transfer_seconds else 0.0


def step_seconds(
    compute_seconds: float, transfer_seconds: float, *, layers: int = 1, sync_seconds: float = 0.0
) -> float:
    """Seconds of a pass whose transfers run one layer ahead of compute, from totals over `layers` equal layers.

    The formula is t + (L - 1) max(t, c) + c + sync, where c and t are those of one layer. With one layer nothing
    overlaps, and it is the sum. With many layers it approaches max(Tc, Tt) + sync, which is what the tutorial
    ("Throughput Model") gives for any number. In training each direction of the link is a transfer of its own: take the
    longer one.
    """
    if layers < 1:
        raise ValueError(f"layers={layers}; at least 1")
    compute, transfer = compute_seconds / layers, transfer_seconds / layers
    return transfer + (layers - 1) * max(compute, transfer) + compute + sync_seconds


def efficiency(baseline_seconds: float, step_seconds: float) -> float:
    """The baseline's step time over the offloaded one. Above 0.9, the overhead is under 11.1% of compute.

    The tutorial ("Efficiency Metric") says under 10%. The baseline is the step without offloading, or compute alone if
    that does not fit.
    """
    return baseline_seconds / step_seconds


def overlap(compute_seconds: float, transfer_seconds: float, step_seconds: float) -> float:
    """The share of the transfers that hides: 1 - (step - compute) / transfer, between 0 and 1.

    It complements the efficiency, which is high if compute is long, whatever hides. The tutorial has no measure of it.
    """
    if not transfer_seconds:
        return 1.0
    return min(1.0, max(0.0, 1.0 - (step_seconds - compute_seconds) / transfer_seconds))


def prefetch_depth(transfer_seconds: float | Sequence[float], compute_seconds: float) -> int | None:
    """How many blocks in flight keep compute busy; None if no number of them does.

    `transfer_seconds` is the time of one block over the link, or over each stage of a chain (disk to host, host to
    device), and `compute_seconds` is the compute time of one block. The result is ceil(sum of stages / compute) if
    every stage keeps up with compute. If one does not, the slowest stage sets the pace, whatever the depth: keep some
    blocks on the device (`resident_fraction`) or process more tokens (`batch_multiplier`).

    The tutorial (exercise 6) gives ceil(Tt / Tc), which is 2 for 2 GB at 32 GB/s and 50 ms, and says that compute is
    then busy. But that would need 40 GB/s over a link of 32.
    """
    stages = [transfer_seconds] if isinstance(transfer_seconds, int | float) else list(transfer_seconds)
    if any(stage > compute_seconds * (1 + 1e-9) for stage in stages):
        return None
    return max(1, math.ceil(sum(stages) / compute_seconds - 1e-9))


@dataclass(frozen=True)
class Compression:
    """What a codec does to a transfer: seconds without it, stage after stage, and in chunks with all stages at once.

    `needed_rate`: bytes per second that each stage of the codec must exceed for compression in chunks to pay.
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
        """Whether it saves time when each stage waits until the one before is done."""
        return self.serial_seconds < self.plain_seconds * 0.999

    @property
    def gain(self) -> float:
        """How many times as fast the transfer is in chunks; below 1, it is slower."""
        return self.plain_seconds / self.pipelined_seconds


def compression_break_even(
    nbytes: float, ratio: float, compress_rate: float, decompress_rate: float, link_rate: float
) -> Compression:
    """Whether compressing `nbytes` for a link or a drive saves time.

    Rates are in bytes per second; the codec's count uncompressed bytes. For one direction, give `math.inf` as the rate
    of the stage that is not used: a write only compresses, and a read only decompresses. In chunks the transfer takes
    max(M / C, M / (R B), M / D), so it pays only if C > B and D > B, and gains at most R. With a ratio below 1.05,
    bytes are not compressed.

    The tutorial (exercise 5) has one stage after the other and no decompression: C > B / (1 - 1 / R). That is right for
    a program that compresses everything and then writes it. The tutorial concludes that ratios above 10 pay; with C
    below B, none does.
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

    Chunk by chunk, it pays when the codec is faster than the disk in each direction that is used; the result is 0 if
    none is used. Measured with byte planes and zstd at level 1 (1.46 times smaller; a core does 0.39 GB/s in and 0.38
    GB/s out). The tutorial says that LZ4 makes weights 1.3 to 1.5 times smaller; on bf16 weights it makes them 1.00
    times smaller.
    """
    return max(math.ceil(read_rate / DECODE_RATE), math.ceil(write_rate / ENCODE_RATE))


def wear_steps(written_bytes_per_step: float, endurance_bytes: float) -> float:
    """Optimizer steps until the drives' guaranteed writes are used up. The tutorial does not ask this."""
    return endurance_bytes / written_bytes_per_step if written_bytes_per_step else math.inf


_OFFLOADABLE = ("state", "gradients", "weights")
_IN_USE = 2  # blocks: one computes while the next arrives, or while gradients of the one before leave


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one parameter: weight and gradient as they compute, the master copy, and all moments together.

    The default is Adam in mixed precision, 2 + 2 + 4 + 8 = 16, as in the tutorial ("Memory Savings"). Other common
    settings are everything in float32 (4, 4, 0, 8), a master that holds only the 16 bits that the weight lacks, as in
    `headrace.optim` (2, 2, 2, 8), moments in 8 bits (state 2.0625), and plain SGD (state 0).
    """

    weight: float = 2.0
    gradient: float = 2.0
    master: float = 4.0
    state: float = 8.0


@dataclass(frozen=True)
class Row:
    """Bytes of one device's part for one purpose, on the device and on its host."""

    purpose: str
    device_bytes: float
    host_bytes: float


@dataclass(frozen=True)
class MemoryTable:
    """The rows of a run: weights, gradients, master weights, optimizer state, activations."""

    rows: tuple[Row, ...]

    @property
    def device_bytes(self) -> float:
        return sum(row.device_bytes for row in self.rows)

    @property
    def host_bytes(self) -> float:
        return sum(row.host_bytes for row in self.rows)

    def to_text(self) -> str:
        """The rows as a table, in GB of 10^9 bytes."""
        rows = [(row.purpose, row.device_bytes, row.host_bytes) for row in self.rows]
        lines = [f"{'GB per device':<16}{'device':>10}{'host':>10}"]
        for purpose, device, host in [*rows, ("in all", self.device_bytes, self.host_bytes)]:
            lines.append(f"{purpose:<16}{device / 1e9:>10.2f}{host / 1e9:>10.2f}")
        return "\n".join(lines) + "\n"


def memory_table(
    parameters: float,
    *,
    stage: int = 0,
    data: int = 1,
    tensor: int = 1,
    precision: Precision | None = None,
    offload: Collection[str] = (),
    block_parameters: float = 0.0,
    activation_bytes: float = 0.0,
) -> MemoryTable:
    """Bytes for each of `data` times `tensor` devices, and for each one's share of its host.

    - `stage`: the stage of ZeRO. 1 divides master and state by `data`, 2 also the gradients, 3 also the weights.
    - `offload`: which of "state" (with the master), "gradients" and "weights" rest on the host.
    - `block_parameters`: parameters of the largest block. The device holds two blocks of what is offloaded or gathered
      for use: one computes while the other arrives or leaves. With 0 this is left out.
    - `activation_bytes`: activations of one device; see `layer_activation_bytes`.

    The tutorial's tables ("Memory Savings", "Offloading + ZeRO") leave out the blocks in use, so "only params" and
    "minimal memory" come to less than a run holds. They call 16 to 2 bytes a reduction by 4; it is a reduction by 8,
    and by 4 at the peak. The tutorial's code never frees gradients, so it stays at that peak; 2 bytes and two blocks
    are enough only if gradients go to host memory as soon as they are computed. For 175B it counts 1.4 TB of Adam's
    state, which lacks the master; with it, the state is 2.1 TB.

    The tutorial ("Offloading + Tensor Parallelism") has 5.5 GB for 175B on 64 devices. That is the weights alone. With
    gradients and state it is 43.75 GB.

    Raises ValueError for a stage or an `offload` that does not exist, and for degrees below 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}; ZeRO has the stages 0 to 3")
    if data < 1 or tensor < 1:
        raise ValueError(f"data={data}, tensor={tensor}; give at least 1 of each")
    unknown = sorted(set(offload) - set(_OFFLOADABLE))
    if unknown:
        raise ValueError(f"offload={unknown[0]!r}; give any of {', '.join(_OFFLOADABLE)}")
    sizes = precision or Precision()
    own, block = parameters / tensor, block_parameters / tensor
    weights = own * sizes.weight / (data if stage >= 3 else 1)
    gradients = own * sizes.gradient / (data if stage >= 2 else 1)
    share = own / (data if stage >= 1 else 1)
    visiting = min(own, _IN_USE * block) * sizes.weight
    leaving = min(own, _IN_USE * block) * sizes.gradient
    gathered = visiting if stage >= 3 and data > 1 else 0.0

    def row(purpose: str, nbytes: float, *, away: bool, in_use: float = 0.0, gathered: float = 0.0) -> Row:
        return Row(purpose, in_use if away else nbytes + gathered, nbytes if away else 0.0)

    return MemoryTable(
        (
            row("weights", weights, away="weights" in offload, in_use=visiting, gathered=gathered),
            row("gradients", gradients, away="gradients" in offload, in_use=leaving),
            row("master weights", share * sizes.master, away="state" in offload),
            row("optimizer state", share * sizes.state, away="state" in offload),
            row("activations", activation_bytes, away=False),
        )
    )


def layer_activation_bytes(
    tokens: int, hidden: int, *, heads: int = 0, sequence_length: int = 0, recomputed: bool = False, tensor: int = 1
) -> float:
    """What backward needs of one transformer layer's forward, in 16 bits: 34 n H, or its input alone, 2 n H.

    `heads` and `sequence_length` are for attention that keeps its scores: this adds 5 a S n (fused attention keeps
    none). `tensor` divides everything but the 10 n H outside matrices. From Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models" (2022). The tutorial's case study calls activations "variable".
    """
    if recomputed:
        return 2.0 * tokens * hidden
    scores = 5.0 * heads * sequence_length * tokens
    return 10.0 * tokens * hidden + (24.0 * tokens * hidden + scores) / tensor


def reserved_peak_blocks(blocks: int, reserved: int) -> int:
    """Blocks on the device at once when the first `reserved` stay and as many are prefetched: min(2 R + 1, N).

    MindIE-SD's page on CPU offload calls this setting the number of blocks that are always kept. But as many more are
    on their way, and one computes. So with the default of 2 there are 5 on the device, not 2.
    """
    return min(blocks, 2 * reserved + 1)
