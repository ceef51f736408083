"""What can a user set? Frozen, validated settings; sizes are bytes, given as an int or as text such as "8GiB"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

__all__ = ["BlocksSpec", "OffloadConfig", "Size", "format_bytes", "parse_bytes"]


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

Size = int | str
BlocksSpec = Literal["auto"] | Size | Sequence[nn.Module | str]


def parse_bytes(size: Size, *, name: str = "size") -> int:
    """Bytes of `size`: an int of bytes, or text with a unit (B, KB, MB, GB, TB of 1000; KiB, MiB, GiB, TiB of 1024).

    Raises TypeError when `size` is neither, ValueError when the text has no such form or the size is negative; both
    name the setting `name`.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f'{name} is {size!r}; give bytes as an int, or text such as "8GiB"')
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'{name}={size!r} is not a size; give bytes as an int, or text such as "8GiB" or "500MB"')
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 0:
        raise ValueError(f"{name}={size} is negative; give a size of 0 bytes or more")
    return size


def format_bytes(nbytes: float) -> str:
    """`nbytes` for people: three significant digits and a unit of 1024, such as "1.50 GiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The settings of `millrace.offload`, validated; see there for what each one means."""

    device: torch.device
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    blocks: BlocksSpec = "auto"
    resident: tuple[nn.Module | str, ...] = ()
    prefetch_blocks: int | None = None
    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(
                    f"{name}={dtype!r} is not a floating-point torch.dtype; give one such as torch.bfloat16"
                )
        if self.prefetch_blocks is not None and self.prefetch_blocks < 0:
            raise ValueError(f'prefetch={self.prefetch_blocks} is negative; give "auto" or a number of blocks')
