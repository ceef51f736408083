"""How do all parameters lie in one file, in the model's order? As a safetensors file, which says what is in it."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headrace.memory.disk.safetensors_header import DTYPES

__all__ = ["pack_layers_sequentially"]

_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "F4"}  # F4 counts shapes in another way
_ALIGNMENT_BYTES = 4096  # the first tensor begins at a page, which the header is padded to


def pack_layers_sequentially(model: nn.Module, filepath: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
    """Writes the parameters of `model` one behind the other; one at a time is copied to host memory.

    Returns each one's name, offset in the file, size in bytes, shape and dtype, and the bytes of all. The file appears
    only when it is whole and on the drive. `headrace.offload(checkpoint=filepath)` and `headrace.load` read it. Raises
    TypeError for a dtype that safetensors does not have.
    """
    named = list(model.named_parameters())
    order: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    at = 0
    for name, parameter in named:
        if parameter.dtype not in _NAMES or parameter.layout is not torch.strided:
            raise TypeError(f"{name!r}: safetensors files have no {parameter.layout} tensors of {parameter.dtype}")
        shape, end = tuple(parameter.shape), at + parameter.nbytes
        header[name] = {"dtype": _NAMES[parameter.dtype], "shape": shape, "data_offsets": [at, end]}
        dtype = str(parameter.dtype).removeprefix("torch.")
        order.append({"name": name, "offset": at, "size": parameter.nbytes, "shape": shape, "dtype": dtype})
        at = end
    text = json.dumps(header).encode()
    text = text.ljust(-(-(8 + len(text)) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES - 8)
    path = Path(filepath)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, parameter in named:
                flat = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                file.write(flat.numpy().data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    for entry in order:
        entry["offset"] += 8 + len(text)
    return order, at
