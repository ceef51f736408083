"""When does it pay to compress what goes to a drive, and how is one tensor compressed? Without loss, or refused."""

import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from headrace.formulas import compression_break_even
from headrace.memory.single import pack, unpack
from headrace.runtime.probe_disk import disk_rates

__all__ = ["CompressionTrial", "compress_parameter", "decompress_parameter", "try_compression"]

_HEADER = struct.Struct("<8s24sQQ")  # magic, dtype, bytes of the tensor, their xxh3
_MAGIC = b"headrace"
_SAMPLE_BYTES = 4 << 20
_MEASURED_BYTES = 32 << 20  # written and read to measure the drive


@dataclass(frozen=True)
class CompressionTrial:
    """What a sample of one tensor showed: rates in bytes per second, `link_rate` of the slower direction."""

    pays: bool
    ratio: float
    compress_rate: float
    decompress_rate: float
    link_rate: float


def try_compression(tensor: torch.Tensor, directory: Path) -> CompressionTrial:
    """Compresses a sample, measures the drive under `directory`, and decides by the break-even."""
    raw = _bytes_of(tensor)[: _SAMPLE_BYTES // 16 * 16]
    begun = time.perf_counter()
    packed = pack(raw, tensor.itemsize) if raw.nbytes else None
    compress_seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    if packed is not None:
        unpack(packed, raw.nbytes, tensor.itemsize)
    decompress_seconds = time.perf_counter() - begun
    directory = directory.expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    rates = disk_rates(directory, file_bytes=_MEASURED_BYTES)
    ratio = 1.0 if packed is None else raw.nbytes / len(packed)
    compress, decompress = raw.nbytes / compress_seconds, raw.nbytes / max(decompress_seconds, 1e-9)
    link = min(rates.read, rates.write)
    pays = packed is not None and compression_break_even(max(1, raw.nbytes), ratio, compress, decompress, link).pays
    return CompressionTrial(pays, ratio, compress, decompress, link)


def compress_parameter(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, packed where that is smaller, with their dtype, number and checksum. Any dtype and device.

    Raises TypeError for one that is not plain bytes (sparse, quantised, on meta).
    """
    raw = _bytes_of(tensor)
    packed = pack(raw, tensor.itemsize) if raw.nbytes else None
    header = _HEADER.pack(_MAGIC, _name(tensor.dtype), raw.nbytes, xxhash.xxh3_64_intdigest(raw.numpy().data))
    return header + (raw.numpy().tobytes() if packed is None else packed)


def decompress_parameter(
    compressed: bytes, shape: tuple[int, ...], dtype: "torch.dtype | np.dtype | type"
) -> torch.Tensor:
    """The tensor that `compress_parameter` was given, on the CPU, bit for bit.

    Raises ValueError when that is not of this `shape` and `dtype`, and when a byte of `compressed` changed.
    """
    if len(compressed) < _HEADER.size or not compressed.startswith(_MAGIC):
        raise ValueError(f"{len(compressed)} bytes are not what compress_parameter returned")
    _, name, nbytes, known = _HEADER.unpack_from(compressed)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(np.dtype(dtype)))
    elements = int(np.prod(shape, dtype=np.int64))
    if _name(wanted) != name or elements * wanted.itemsize != nbytes:
        raise ValueError(
            f"the compressed tensor has {nbytes} bytes of {name.rstrip(bytes(1)).decode()}; shape {tuple(shape)} of"
            f" {wanted} has {elements * wanted.itemsize}: give its own shape and dtype"
        )
    body = compressed[_HEADER.size :]
    if len(body) == nbytes:
        raw = torch.frombuffer(bytearray(body), dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)
    else:
        raw = unpack(body, nbytes, wanted.itemsize)
    if xxhash.xxh3_64_intdigest(raw.numpy().data) != known:
        raise ValueError(f"the {nbytes} bytes are not those that were compressed: a byte changed since")
    return raw.view(wanted).view(tuple(shape))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} is not plain bytes")
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode().ljust(24, bytes(1))
