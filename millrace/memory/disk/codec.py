"""Do bytes take less room on their way to disk? Byte planes apart, each compressed where that is worth it.

The first byte of a bfloat16 (sign and exponent) repeats itself, the second hardly does: apart, zstd finds the former.
"""

import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard

__all__ = ["WORTH_RATIO", "Speeds", "decode", "encode", "measure", "pays"]

WORTH_RATIO = 1.05  # of raw bytes over encoded ones: below, bytes are stored as they are
_LEVEL = 1  # of zstd: higher ones gain a few percent on weights, at a fraction of the speed
_contexts = threading.local()  # zstd's contexts are for one thread each


def encode(memory: torch.Tensor, element_bytes: int) -> bytes | None:
    """`memory`, uint8 of shape (nbytes,), encoded; None when that is not worth it.

    A header of one length for each plane comes first; a plane that is as long as it was is stored as it was.
    """
    planes = np.ascontiguousarray(_elements(memory, element_bytes).T)  # (element_bytes, elements)
    parts = []
    for plane in planes:
        packed = _context("compressor").compress(plane)
        parts.append(packed if len(packed) * WORTH_RATIO < plane.nbytes else plane.tobytes())
    encoded = struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts)
    return encoded if len(encoded) * WORTH_RATIO < memory.nbytes else None


def decode(encoded: memoryview, destination: torch.Tensor, element_bytes: int) -> None:
    """Fills `destination` with what was encoded. Raises ValueError when `encoded` is damaged."""
    elements = _elements(destination, element_bytes)
    count = elements.shape[1]
    lengths = struct.unpack_from(f"<{count}I", encoded)
    at = 4 * count
    if at + sum(lengths) != len(encoded):
        raise ValueError(f"planes of {lengths} bytes do not make up {len(encoded)}")
    for plane, length in enumerate(lengths):
        part = encoded[at : at + length]
        at += length
        if length != len(elements):
            try:
                part = _context("decompressor").decompress(part, max_output_size=len(elements))
            except zstandard.ZstdError as error:
                raise ValueError(f"plane {plane} of {count}: {error}") from error
        if len(part) != len(elements):
            raise ValueError(f"plane {plane} of {count} has {len(part)} bytes, not {len(elements)}")
        elements[:, plane] = np.frombuffer(part, np.uint8)


@dataclass(frozen=True)
class Speeds:
    """Raw bytes per second that the codec takes in and gives out, and raw bytes over encoded ones."""

    encode: float
    decode: float
    ratio: float


def measure(memory: torch.Tensor, element_bytes: int, threads: int) -> Speeds:
    """How fast `threads` at once encode and decode bytes such as these. Takes a moment."""
    begin = time.perf_counter()
    encoded = encode(memory, element_bytes)
    middle = time.perf_counter()
    if encoded is None:
        return Speeds(0.0, 0.0, 1.0)
    decode(memoryview(encoded), torch.empty_like(memory), element_bytes)
    end = time.perf_counter()
    nbytes = threads * memory.nbytes
    return Speeds(nbytes / (middle - begin), nbytes / (end - middle), memory.nbytes / len(encoded))


def pays(speeds: Speeds, write_bytes_per_second: float, read_bytes_per_second: float) -> bool:
    """Whether encoded traffic is faster than raw, both ways, when codec and drive work side by side.

    M bytes take max(M/C, M/(R B)) instead of M/B: so what counts is that the codec's C is above the drive's B, and not
    the ratio R, as long as there is one. (The serial rule, C > B/(1 - 1/R), is too strict.)
    """
    return (
        speeds.ratio >= WORTH_RATIO and speeds.encode > write_bytes_per_second and speeds.decode > read_bytes_per_second
    )


def _elements(memory: torch.Tensor, element_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """As (elements, bytes of one); in one plane when it does not come out even."""
    width = element_bytes if memory.nbytes % element_bytes == 0 else 1
    return memory.numpy().reshape(-1, width)


def _context(kind: str) -> Any:
    if not hasattr(_contexts, kind):
        _contexts.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        _contexts.decompressor = zstandard.ZstdDecompressor()
    return getattr(_contexts, kind)
