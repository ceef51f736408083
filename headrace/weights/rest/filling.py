"""How does a whole block come to its extent on disk? As an image of it, grain by grain, past the page cache.

A few grains are read while others are written. What was written is known to be what is read back: each grain has its
checksum from here, and nobody has to look at it again.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from headrace.memory.disk import DISK_ALIGNMENT_BYTES, Request, disk_pages, release_pages
from headrace.memory.pages import map_pages
from headrace.weights.model.slot import Layout
from headrace.weights.rest.pieces import Piece, Range, ReadEvent

__all__ = ["Source", "fill", "from_files", "from_memory", "parts_of"]

_AHEAD = 3  # grains that are read, or written, while one is put together
_Read = tuple[Piece, torch.Tensor, ReadEvent]


@dataclass(frozen=True)
class Source:
    """Where the bytes of an image come from: `begin(first, end)` asks for them, `put` lays out what has come."""

    begin: Callable[[int, int], list[_Read]]
    put: Callable[[int, int, torch.Tensor, list[_Read]], None]


def from_memory(parts: Sequence[tuple[int, torch.Tensor]]) -> Source:
    """Contiguous uint8 tensors of the CPU, each with the first byte of its place in the block."""

    def put(first: int, end: int, image: torch.Tensor, _: list[_Read]) -> None:
        for place, memory in parts:
            begin, stop = max(first, place), min(end, place + memory.nbytes)
            if begin < stop:
                source = memory.data_ptr() + begin - place
                ctypes.memmove(image.data_ptr() + begin - first, source, stop - begin)
                release_pages(source, stop - begin)

    return Source(lambda *_: [], put)


def parts_of(parameters: Sequence[nn.Parameter], layouts: Sequence[Layout]) -> list[tuple[int, torch.Tensor]] | None:
    """Those of dense parameters of the CPU that lie in the block as they do in memory; None if one does not."""
    parts = []
    for parameter, layout in zip(parameters, layouts, strict=True):
        data = parameter.detach()
        dense = data.device.type == "cpu" and torch.ops.aten.is_non_overlapping_and_dense(data)
        if not dense or data.dtype != layout.dtype or tuple(data.stride()) != tuple(layout.stride):
            return None
        parts.append((layout.offset, data.as_strided((data.numel(),), (1,)).view(torch.uint8)))
    return parts


def from_files(
    regions: Sequence[tuple[int, int]], grain_bytes: int, pieces: Callable[[int, Sequence[Range]], Sequence[Piece]]
) -> Source:
    """What `pieces(most bytes of one, ranges)` reads; `regions`: first byte and bytes of what there is in the block."""
    most_bytes = disk_pages(grain_bytes) + 2 * DISK_ALIGNMENT_BYTES
    free: list[torch.Tensor] = []

    def begin(first: int, end: int) -> list[_Read]:
        cut = [(max(first, place), min(end, place + nbytes)) for place, nbytes in regions]
        ranges = [(begin, stop - begin, begin - first) for begin, stop in cut if begin < stop]
        reads = []
        for piece in pieces(most_bytes, ranges):
            chunk = free.pop() if free else _pages(most_bytes)
            reads.append((piece, chunk, piece.read(chunk)))
        return reads

    def put(_: int, __: int, image: torch.Tensor, reads: list[_Read]) -> None:
        for piece, chunk, reading in reads:
            reading.synchronize()
            for begin, nbytes, to in piece.parts:
                ctypes.memmove(image.data_ptr() + to, chunk.data_ptr() + begin, nbytes)
            free.append(chunk)

    return Source(begin, put)


def fill(nbytes: int, grain_bytes: int, source: Source, write: Callable[[torch.Tensor, int], Request]) -> None:
    """Writes `nbytes` of `source` in grains; returns when all are written. `write` submits memory to an offset."""
    reading: deque[tuple[int, int, list[_Read]]] = deque()
    writing: deque[tuple[torch.Tensor, Request]] = deque()

    def write_one() -> None:
        first, end, reads = reading.popleft()
        if len(writing) == _AHEAD:
            image, request = writing.popleft()
            request.synchronize()
        else:
            image = _pages(disk_pages(grain_bytes))
        source.put(first, end, image, reads)
        writing.append((image, write(image[: disk_pages(end - first)], first)))

    for first in range(0, nbytes, grain_bytes):
        end = min(first + grain_bytes, nbytes)
        reading.append((first, end, source.begin(first, end)))
        if len(reading) > _AHEAD:
            write_one()
    while reading:
        write_one()
    for _, request in writing:
        request.synchronize()


def _pages(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(map_pages(nbytes, touched=False), dtype=torch.uint8)
