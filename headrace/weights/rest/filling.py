"""How does a whole block come to its extent on disk? As an image of it, grain by grain, past the page cache.

A few grains are read while others are written. Each grain gets its checksum as it is written here, so later reads are
checked without another pass over the data.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import nn

from headrace.memory.disk import DISK_ALIGNMENT_BYTES, Request, disk_pages, new_pages, release_pages
from headrace.weights.model.managed_param import Layout
from headrace.weights.rest.reads import DiskRead, Range

_AHEAD = 3  # grains that are read, or written, while one is put together
# Begins to read bytes `first` to `end` of an image. The function that it returns lays them out in memory.
Source = Callable[[int, int], Callable[[torch.Tensor], None]]


def from_memory(parts: Sequence[tuple[int, torch.Tensor]]) -> Source:
    """A source that copies contiguous uint8 tensors of the CPU, given with the first byte of each one's place."""

    def begin(first: int, end: int) -> Callable[[torch.Tensor], None]:
        def lay_out(image: torch.Tensor) -> None:
            for place, memory in parts:
                begin, stop = max(first, place), min(end, place + memory.nbytes)
                if begin < stop:
                    source = memory.data_ptr() + begin - place
                    ctypes.memmove(image.data_ptr() + begin - first, source, stop - begin)
                    release_pages(source, stop - begin)

        return lay_out

    return begin


def memory_of(parameters: Sequence[nn.Parameter], layouts: Sequence[Layout]) -> list[tuple[int, torch.Tensor]] | None:
    """The `parts` for `from_memory`, if all parameters lie in the block as they do in the CPU's memory; else None."""
    parts = []
    for parameter, layout in zip(parameters, layouts, strict=True):
        data = parameter.detach()
        dense = data.device.type == "cpu" and torch.ops.aten.is_non_overlapping_and_dense(data)
        if not dense or data.dtype != layout.dtype or tuple(data.stride()) != tuple(layout.stride):
            return None
        parts.append((layout.offset, data.as_strided((data.numel(),), (1,)).view(torch.uint8)))
    return parts


def from_files(
    regions: Sequence[tuple[int, int]], grain_bytes: int, pieces: Callable[[int, Sequence[Range]], Sequence[DiskRead]]
) -> Source:
    """A source that reads what `pieces(most bytes of one, ranges)` gives.

    `regions`: first byte and number of bytes of each range of the block that holds data.
    """
    most_bytes = disk_pages(grain_bytes) + 2 * DISK_ALIGNMENT_BYTES
    free: list[torch.Tensor] = []

    def begin(first: int, end: int) -> Callable[[torch.Tensor], None]:
        cut = [(max(first, place), min(end, place + nbytes)) for place, nbytes in regions]
        ranges = [Range(begin, stop - begin, begin - first) for begin, stop in cut if begin < stop]
        chunks = [(piece, free.pop() if free else new_pages(most_bytes)) for piece in pieces(most_bytes, ranges)]
        reads = [(piece, chunk, piece.read(chunk)) for piece, chunk in chunks]

        def lay_out(image: torch.Tensor) -> None:
            for piece, chunk, reading in reads:
                reading.synchronize()
                for begin, nbytes, to in piece.ranges:
                    ctypes.memmove(image.data_ptr() + to, chunk.data_ptr() + begin, nbytes)
                free.append(chunk)

        return lay_out

    return begin


def fill(nbytes: int, grain_bytes: int, source: Source, write: Callable[[torch.Tensor, int], Request]) -> None:
    """Writes `nbytes` of `source` in grains, and returns when all are written. `write(memory, offset)` submits one."""
    reading: deque[tuple[int, int, Callable[[torch.Tensor], None]]] = deque()
    writing: deque[tuple[torch.Tensor, Request]] = deque()

    def write_one() -> None:
        first, end, lay_out = reading.popleft()
        if len(writing) == _AHEAD:
            image, request = writing.popleft()
            request.synchronize()
        else:
            image = new_pages(disk_pages(grain_bytes))
        lay_out(image)
        writing.append((image, write(image[: disk_pages(end - first)], first)))

    for first in range(0, nbytes, grain_bytes):
        end = min(first + grain_bytes, nbytes)
        reading.append((first, end, source(first, end)))
        if len(reading) > _AHEAD:
            write_one()
    while reading:
        write_one()
    for _, request in writing:
        request.synchronize()
