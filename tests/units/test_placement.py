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
    chunk_bytes, chunks = ring_size(host, 1 << 30, [largest] * 10)
    assert chunk_bytes == chunk
    assert chunks >= 4
    assert chunks * chunk_bytes <= host // 4


def test_large_tables_beside_layers_do_not_make_chunks_larger() -> None:
    """A layer would have only a part of a chunk, and fewer layers would be read ahead."""
    assert ring_size(1 << 30, 1 << 30, [500 * MIB, 500 * MIB, *[40 * MIB] * 32]) == (8 * MIB, 32)
    assert ring_size(1 << 30, 1 << 30, [500 * MIB, 500 * MIB, *[40 * MIB] * 12])[0] == 32 * MIB  # the tables are most
    assert ring_size(1 << 30, 1 << 30, ())[0] == 8 * MIB
