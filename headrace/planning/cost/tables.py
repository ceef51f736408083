"""How many bytes does a training run hold for each purpose, by ZeRO stage, precision and what is offloaded?

For estimates by hand. What `headrace plan` prints counts a model's blocks instead: `tiers.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = [
    "MemoryTable",
    "Precision",
    "Row",
    "layer_activation_bytes",
    "memory_table",
    "power_of_two_bytes",
    "reserved_peak_blocks",
    "zero_bytes",
]

OFFLOADABLE = ("state", "gradients", "weights")
_GRADIENT_BLOCKS = 2  # leaving and being computed
_WEIGHT_BLOCKS = 2  # computing and arriving


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes of one parameter: weight and gradient as they compute, the master copy, and all moments together.

    The default is Adam in mixed precision, 2 + 2 + 4 + 8 = 16, as the tutorial has it ("Memory Savings"). Other usual
    ones: everything in float32 (4, 4, 0, 8); a master that holds only the 16 bits the weight lacks, as
    `headrace.optim` keeps it (2, 2, 2, 8); moments in 8 bits (state 2.0625); plain SGD (state 0).
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
        """As a table, in GB of 10^9 bytes."""
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

    - `stage`: of ZeRO. 1 divides master and state by `data`, 2 the gradients too, 3 the weights too.
    - `offload`: of "state" (with the master), "gradients" and "weights", what rests on the host.
    - `block_parameters`: of the largest block. Of what is offloaded or gathered for use, the device has two blocks:
      one computes while the next arrives, or leaves. With 0 this is left out.
    - `activation_bytes`: of one device, see `layer_activation_bytes`.

    The tutorial's tables ("Memory Savings", "Offloading + ZeRO") have no blocks in use, so "only params" and "minimal
    memory" come to less than a run holds. They call 16 to 2 bytes a reduction by 4; it is 8, and 4 at the peak.
    The tutorial's code never frees gradients, so it stays at that peak; 2 bytes and two blocks are enough only if
    gradients go to host memory as they come. For 175B it counts 1.4 TB of Adam's state, which lacks the master: 2.1 TB.

    Raises ValueError for a stage or an offload that does not exist, and degrees below 1.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}; ZeRO has the stages 0 to 3")
    if data < 1 or tensor < 1:
        raise ValueError(f"data={data}, tensor={tensor}; give at least 1 of each")
    unknown = sorted(set(offload) - set(OFFLOADABLE))
    if unknown:
        raise ValueError(f"offload={unknown[0]!r}; give any of {', '.join(OFFLOADABLE)}")
    sizes = precision or Precision()
    own, block = parameters / tensor, block_parameters / tensor
    weights = own * sizes.weight / (data if stage >= 3 else 1)
    gradients = own * sizes.gradient / (data if stage >= 2 else 1)
    share = own / (data if stage >= 1 else 1)
    visiting = min(own, _WEIGHT_BLOCKS * block) * sizes.weight
    leaving = min(own, _GRADIENT_BLOCKS * block) * sizes.gradient
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


def zero_bytes(
    parameters: float,
    *,
    stage: int,
    data: int,
    tensor: int = 1,
    precision: Precision | None = None,
    offload: Collection[str] = (),
) -> float:
    """Device bytes of weights, gradients, master and state by ZeRO stage; the rows are in `memory_table`.

    The tutorial ("Offloading + Tensor Parallelism") has 5.5 GB for 175B on 64 devices: that is the weights alone. With
    gradients and state it is 43.75 GB.
    """
    return memory_table(
        parameters, stage=stage, data=data, tensor=tensor, precision=precision, offload=offload
    ).device_bytes


def layer_activation_bytes(
    tokens: int, hidden: int, *, heads: int = 0, sequence_length: int = 0, recomputed: bool = False, tensor: int = 1
) -> float:
    """What backward needs of one transformer layer's forward, in 16 bits: 34 n H, or its input alone, 2 n H.

    With `heads` and `sequence_length`, of attention that keeps its scores: 5 a S n more (fused attention keeps none).
    `tensor` divides all but the 10 n H outside of matrices. From Korthikanti et al., "Reducing Activation
    Recomputation in Large Transformer Models" (2022). The tutorial's case study calls activations "variable".
    """
    if recomputed:
        return 2.0 * tokens * hidden
    scores = 5.0 * heads * sequence_length * tokens
    return 10.0 * tokens * hidden + (24.0 * tokens * hidden + scores) / tensor


def power_of_two_bytes(sizes: Iterable[int]) -> int:
    """Host memory for tensors that are page-locked one by one through PyTorch: each rounded up to a power of two.

    DiffSynth-Studio's page on offload training ("Pinned Memory Pool") has 17 MB becoming 32, and measured half as much
    to twice as much in all. Its pool still takes powers of two for whole chunks; headrace takes the sum of the sizes,
    each aligned to 64 bytes.
    """
    return sum(1 << (size - 1).bit_length() for size in sizes if size > 0)


def reserved_peak_blocks(blocks: int, reserved: int) -> int:
    """Blocks on the device at once when the first `reserved` stay and as many are prefetched: min(2 R + 1, N).

    MindIE-SD's page on CPU offload calls the setting the number of blocks that are always kept. Besides these, as
    many are on their way, and one computes: with its default of 2 there are 5 on the device, not 2.
    """
    return min(blocks, 2 * reserved + 1)
