"""Which bytes of a file belong together? Those of an extent, which is allocated, fetched and spilled under one name."""

import mmap
from dataclasses import dataclass

import torch

from headrace.memory.ranges import Range

# The alignment that direct I/O requires of offsets, lengths and memory, and that mmap requires of offsets.
DISK_ALIGNMENT_BYTES = max(4096, mmap.PAGESIZE)
PIECE_BYTES = 8 << 20  # of one request to the drive; measured, see docs/design/disk.md


def disk_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages of the disk."""
    return -(-nbytes // DISK_ALIGNMENT_BYTES) * DISK_ALIGNMENT_BYTES


@dataclass(frozen=True)
class Extent:
    """`nbytes` at `offset` of the store's file, where `capacity_bytes` (whole pages) are its own.

    Each grain of `grain_bytes` (whole pages), counted from its begin, has a checksum; the last grain may be shorter.
    """

    name: str
    offset: int
    nbytes: int
    grain_bytes: int = PIECE_BYTES

    @property
    def capacity_bytes(self) -> int:
        """The bytes that it takes on disk."""
        return disk_pages(self.nbytes)


def pieces(offset: int, nbytes: int, piece_bytes: int = PIECE_BYTES) -> list[Range]:
    """Cuts a range at the multiples of `piece_bytes`, so that no page belongs to two pieces."""
    begins = [offset, *range(offset // piece_bytes * piece_bytes + piece_bytes, offset + nbytes, piece_bytes)]
    return list(zip(begins, [*begins[1:], offset + nbytes], strict=True)) if nbytes > 0 else []


def check_memory(extent: Extent, memory: torch.Tensor, offset: int, nbytes: int) -> None:
    """Raises TypeError for `memory` that the disk cannot use; ValueError if the bytes are not within `extent`."""
    if memory.dtype != torch.uint8 or memory.device.type != "cpu" or not memory.is_contiguous():
        raise TypeError(
            f"{extent.name!r}: the disk reads and writes contiguous uint8 memory of the CPU, not"
            f" {memory.dtype} on {memory.device} of stride {tuple(memory.stride())}; give tensor.view(torch.uint8)"
        )
    if not 0 <= offset <= offset + nbytes <= extent.capacity_bytes:
        raise ValueError(f"{extent.name!r}: {nbytes} bytes at offset {offset} are not within its {extent.nbytes} bytes")
