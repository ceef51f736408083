"""The chunks in which blocks come from disk."""

import pytest

from headrace.weights.rest.placement import ring_size

MIB = 2**20


@pytest.mark.parametrize(
    ("host", "largest", "chunk"),
    [
        (64 * MIB, 436 * MIB, 2 * MIB),  # four chunks fit in an eighth of the host's budget
        (256 * MIB, 436 * MIB, 8 * MIB),
        (512 * MIB, 436 * MIB, 16 * MIB),
        (64 << 30, 63 * MIB, 8 * MIB),  # a block has at least four large chunks
        (64 << 30, 64 * MIB, 16 * MIB),
        (64 << 30, 128 * MIB, 32 * MIB),
        (64 << 30, 4 << 30, 32 * MIB),
    ],
)
def test_large_blocks_come_in_large_chunks(host: int, largest: int, chunk: int) -> None:
    chunk_bytes, chunks = ring_size(host, 1 << 30, largest)
    assert chunk_bytes == chunk
    assert chunks >= 4
    assert chunks * chunk_bytes <= host // 4
