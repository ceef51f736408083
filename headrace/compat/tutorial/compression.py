"""How is one tensor compressed, without loss, and given back? Its bytes by significance, deflated, with a checksum."""

import zlib

import numpy as np
import torch

__all__ = ["compress_parameter", "decompress_parameter"]

_ALL_BITS = 15  # the largest window of deflate


def compress_parameter(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes, deflated, with their dtype, number and checksum. Any dtype and device.

    Raises TypeError for a tensor that is not plain bytes (sparse, quantised, on meta).
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} is not plain bytes")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    planes = np.ascontiguousarray(raw.reshape(-1, tensor.itemsize).T)  # exponents repeat, mantissas do not
    deflate = zlib.compressobj(1, zlib.DEFLATED, _ALL_BITS, 9, zlib.Z_RLE)
    return _header(tensor.dtype, raw.nbytes) + deflate.compress(planes.data) + deflate.flush()


def decompress_parameter(
    compressed: bytes, shape: tuple[int, ...], dtype: "torch.dtype | np.dtype | type"
) -> torch.Tensor:
    """The tensor that `compress_parameter` was given, on the CPU, bit for bit.

    Raises ValueError if that tensor has another `shape` or `dtype`, and if `compressed` was changed so that another one
    comes out of it.
    """
    header, newline, deflated = compressed.partition(b"\n")
    if not newline or not header.startswith(b"headrace torch."):
        raise ValueError(f"{len(compressed)} bytes are not what compress_parameter returned")
    wanted = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(np.dtype(dtype)))
    if header + newline != _header(wanted, int(np.prod(shape, dtype=np.int64)) * wanted.itemsize):
        raise ValueError(
            f"the compressed tensor is {header.decode(errors='replace')} bytes, not those of shape {tuple(shape)} of"
            f" {wanted}: give its own shape and dtype"
        )
    try:
        planes = np.frombuffer(zlib.decompress(deflated), np.uint8).reshape(wanted.itemsize, -1)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"{len(compressed)} compressed bytes are damaged: {error}") from error
    return torch.from_numpy(np.array(planes.T, order="C").reshape(-1)).view(wanted).view(tuple(shape))


def _header(dtype: torch.dtype, nbytes: int) -> bytes:
    return f"headrace {dtype} {nbytes}\n".encode()
