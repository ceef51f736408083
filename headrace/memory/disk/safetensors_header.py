"""What does a safetensors file hold, and where? Its header, read and checked before anything is believed.

The format (https://huggingface.co/docs/safetensors): eight bytes of header length, a JSON header, then the
tensors' bytes without holes.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from headrace.errors import CheckpointError
from headrace.runtime.system import read_some

__all__ = ["DTYPES", "TensorRecord", "read_header"]

_LENGTH_BYTES = 8
_HEADER_LIMIT_BYTES = 100_000_000  # the format's own

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


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a checkpoint: its bytes are `nbytes` at `offset` of the file `path`."""

    name: str
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(descriptor: int, path: str) -> list[TensorRecord]:
    """The tensors of an open file, in the order of their bytes. Raises CheckpointError when it is not sound."""
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(read_some(descriptor, _LENGTH_BYTES, 0), "little") if size >= _LENGTH_BYTES else 0
    data = _LENGTH_BYTES + length
    if not 2 <= length <= min(_HEADER_LIMIT_BYTES, size - _LENGTH_BYTES):
        raise _unsound(path, f"its {size} bytes begin with a header length of {length}: truncated, or another format")
    try:
        header = json.loads(_read_all(descriptor, length, path), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _unsound(path, f"its header is no sound JSON ({error})") from error
    if not isinstance(header, dict):
        raise _unsound(path, "its header is no JSON object")
    _check_metadata(header.pop("__metadata__", {}), path)
    records = sorted((_record(path, data, *item) for item in header.items()), key=lambda r: (r.offset, r.nbytes))
    end, last = data, "the header"
    for record in records:
        if record.offset != end:
            between = "overlap" if record.offset < end else "leave a hole"
            raise _unsound(path, f"{last} and {record.name!r} {between} at byte {record.offset}")
        end, last = record.offset + record.nbytes, repr(record.name)
    if end != size:
        raise _unsound(path, f"it has {size} bytes, but its header tells of {end}: truncated, or not fully written")
    return records


def _read_all(descriptor: int, length: int, path: str) -> bytes:
    parts, at = [], _LENGTH_BYTES
    while length:
        parts.append(read_some(descriptor, length, at))
        if not parts[-1]:
            raise _unsound(path, f"it ends at byte {at}, within its header")
        at, length = at + len(parts[-1]), length - len(parts[-1])
    return b"".join(parts)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in it twice")
    return found


def _check_metadata(metadata: Any, path: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _unsound(path, "its __metadata__ is no map of texts")


def _record(path: str, data: int, name: str, entry: Any) -> TensorRecord:
    """The record of one entry of the header; `data` is where the tensors' bytes begin."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _unsound(path, f"{name!r} is not described by dtype, shape and data_offsets")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise _unsound(path, f"{name!r} has the dtype {entry['dtype']!r}, which is none of {', '.join(DTYPES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _unsound(path, f"{name!r} has shape {shape!r} and data_offsets {offsets!r}: not sizes")
    dtype = DTYPES[entry["dtype"]]
    if dtype is torch.float4_e2m1fn_x2:
        if not shape or shape[-1] % 2:
            raise _unsound(path, f"{name!r} of two values a byte has the shape {shape!r}, whose last size is not even")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise _unsound(
            path, f"{name!r} has {offsets[1] - offsets[0]} bytes, but {tuple(shape)} of {dtype} takes {nbytes}"
        )
    return TensorRecord(name, path, dtype, tuple(shape), data + offsets[0], nbytes)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _unsound(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a sound safetensors file: {why}. Download or save it again.")
