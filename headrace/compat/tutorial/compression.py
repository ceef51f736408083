"""How is one tensor compressed, without loss, and given back? Its bytes by significance, deflated, with a checksum."""

import struct
import zlib

import numpy as np
import torch
import xxhash

__all__ = ["compress_parameter", "decompress_parameter"]

_HEADER = struct.Struct("<8s24sQQ")  # magic, dtype, bytes of the tensor, their xxh3
_MAGIC = b"headrace"
_ALL_BITS = 15  # the largest window of deflate


def compress_parameter(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, packed where that is smaller, with their dtype, number and checksum. Any dtype and device.

    Raises TypeError for a tensor that is not plain bytes (sparse, quantised, on meta).
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} is not plain bytes")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    planes = np.ascontiguousarray(raw.reshape(-1, tensor.itemsize).T)  # exponents repeat, mantissas do not
    deflate = zlib.compressobj(1, zlib.DEFLATED, _ALL_BITS, 9, zlib.Z_RLE)
    packed = deflate.compress(planes.data) + deflate.flush() if raw.nbytes else b""
    header = _HEADER.pack(_MAGIC, _name(tensor.dtype), raw.nbytes, xxhash.xxh3_64_intdigest(raw.data))
    return header + (packed if len(packed) < raw.nbytes else raw.tobytes())


def decompress_parameter(
    compressed: bytes, shape: tuple[int, ...], dtype: "torch.dtype | np.dtype | type"
) -> torch.Tensor:
    """The tensor that `compress_parameter` was given, on the CPU, bit for bit.

    Raises ValueError if that tensor has another `shape` or `dtype`, and if a byte of `compressed` was changed.
    """
    if len(compressed) < _HEADER.size or not compressed.startswith(_MAGIC):
        raise ValueError(f"{len(compressed)} bytes are not what compress_parameter returned")
    _, name, nbytes, known = _HEADER.unpack_from(compressed)
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(np.dtype(dtype)))
    if _name(wanted) != name or int(np.prod(shape, dtype=np.int64)) * wanted.itemsize != nbytes:
        raise ValueError(
            f"the compressed tensor has {nbytes} bytes of {name.rstrip(bytes(1)).decode()}, not those of shape"
            f" {tuple(shape)} of {wanted}: give its own shape and dtype"
        )
    raw = np.frombuffer(compressed, np.uint8, offset=_HEADER.size)
    try:
        if raw.nbytes != nbytes:
            raw = np.frombuffer(zlib.decompress(raw.data), np.uint8).reshape(wanted.itemsize, -1).T
    except (zlib.error, ValueError) as error:
        raise ValueError(f"{len(compressed)} compressed bytes are damaged: {error}") from error
    raw = np.array(raw, order="C").reshape(-1)
    if xxhash.xxh3_64_intdigest(raw.data) != known:
        raise ValueError(f"the {nbytes} bytes are not those that were compressed: a byte changed since")
    return torch.from_numpy(raw).view(wanted).view(tuple(shape))


def _name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode().ljust(24, bytes(1))
