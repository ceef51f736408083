"""What does a safetensors file hold, and where? Its own library checks the header; this file reads where tensors lie.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header, then the
tensors' bytes without holes.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.errors import CheckpointError
from headrace.memory.disk.saved_file import SavedFile, TensorInFile

_LENGTH_BYTES = 8

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,  # two values in each element: headers count values, PyTorch counts elements
}


def read_header(file: SavedFile) -> list[TensorInFile]:
    """The tensors of a file, in the order of their bytes. Raises CheckpointError if the file is not sound."""
    try:
        with safe_open(file.path, "numpy"):  # checks sizes, dtypes, and ranges for overlaps and holes
            pass
        length = int.from_bytes(file.peek(0, _LENGTH_BYTES), "little")
        header = json.loads(file.peek(_LENGTH_BYTES, length))
        header.pop("__metadata__", None)
        tensors = [_tensor(file, _LENGTH_BYTES + length, name, entry) for name, entry in header.items()]
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{file.path} is not a sound safetensors file: {error}. Download or save it again."
        ) from error
    return sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))


def _tensor(file: SavedFile, data: int, name: str, entry: Mapping[str, Any]) -> TensorInFile:
    """The tensor of one header entry, which may have more keys than the format's. `data`: where tensor bytes begin."""
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name!r} is of {dtype}, and PyTorch has {', '.join(DTYPES)}")
    if dtype == "F4" and shape:
        shape = [*shape[:-1], shape[-1] // 2]
    tensor = TensorInFile(torch.empty(shape, dtype=DTYPES[dtype], device="meta"), name, file, data + begin)
    if tensor.nbytes != end - begin:
        raise ValueError(f"{name!r} of two values a byte has rows of an odd number of values")
    return tensor
