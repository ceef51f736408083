"""Which weights on disk are read packed, and what share of their bytes is that? See docs/design/packed.md."""

from collections.abc import Iterable

from headrace.planning.cost.shape import BlockKind, BlockShape
from headrace.planning.cost.work import Case, Place, Training

_PACKED_SHARE = 0.75  # of the bytes: 12 bits of 16; trained weights have been measured at 12.006 to 12.101
_UNPACKED_BYTES_PER_SECOND = 38e9  # by one thread in its caches, with AVX2
# The rate above must be this many times the drive's: from memory, only a third is reached, and compute runs beside it.
TIMES_AS_FAST = 4
LEFT_FREE_BYTES = 1 << 30  # on the drive, for what must be written there later


def packs(case: Case) -> bool:
    """Whether a run packs weights that come from disk again and again: only frozen weights, in one process."""
    if case.method.weights is not Place.DISK or case.work.training is Training.FULL or case.spread.data > 1:
        return False
    pays = case.hardware.disk_read_bytes_per_second * TIMES_AS_FAST <= _UNPACKED_BYTES_PER_SECOND
    return pays and (1 + _PACKED_SHARE) * case.shape.weight_bytes + LEFT_FREE_BYTES <= case.hardware.disk_bytes


def read_share(block: BlockShape) -> float:
    """The share of a block's bytes that is read if a run packs: 16-bit weights are packed if they are read whole."""
    in_parts = block.experts or block.kind is BlockKind.EMBEDDING
    return _PACKED_SHARE if block.weight_bits == 16 and not in_parts else 1.0


def mean_read_share(case: Case) -> float:
    """The share that a run reads of the bytes of all weights that come from disk."""
    shape = case.shape
    if not packs(case):
        return 1.0
    return sum(read_share(block) * block.weight_bytes for block in shape.blocks) / max(1, shape.weight_bytes)


def packed_bytes(blocks: Iterable[BlockShape]) -> int:
    """Bytes of these blocks' packed weights, which lie on disk beside the weights themselves."""
    return round(sum(read_share(block) * block.weight_bytes for block in blocks if read_share(block) < 1))
