"""How is a moment kept in 8 bits? As codes relative to the largest value of their run of 128 elements.

A code is the upper bits of a float: of the value's magnitude, relative to the largest of its run, plus a small offset.
Codes are linear near zero, then logarithmic with 16 codes for each power of two; zero is code 0. First moments have a
sign and 8 powers of two, second moments no sign and 16. Rounding is stochastic, so that a step's change to a moment is
not lost if it is less than half a code. A second moment above zero never becomes zero: updates divide by it. A run with
a value that is not finite is NaN as a whole.

Codes and scale lie together: a moment is a tensor of shape (runs, 132) and dtype uint8, 128 codes and the 4 bytes of a
float32 in each row. The native kernel has the same arithmetic.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

RUN_ELEMENTS = 128
RECORD_BYTES = RUN_ELEMENTS + 4
SUFFIX = "_8bit"  # ends the names of such moments in a parameter's state
LEAST_ELEMENTS = 4096  # smaller tensors keep float32: little to gain, and biases and norms are the sensitive ones
_MANTISSA_SHIFT = 19  # leaves 4 bits of a float's mantissa
_NEAREST = 1 << (_MANTISSA_SHIFT - 1)
_SMALLEST = 0x00800000  # bits of the smallest scale; below it a run counts as zero
_INFINITE = 0x7F800000


class _Code:
    """The numbers of a code that reaches `octaves` powers of two below the largest value of a run."""

    def __init__(self, octaves: int, largest: int) -> None:
        self.base = (127 - octaves) << 23  # bits of the offset
        self.offset = 2.0**-octaves
        self.top = 0.96875 - self.offset  # the largest value of a run is scaled to this: it has the last code
        self.inverse = float(np.float32(1) / np.float32(self.top))  # rounded as in the kernel
        self.largest = largest


_SIGNED = _Code(8, 127)
_UNSIGNED = _Code(16, 255)


def fits(parameter: torch.Tensor) -> bool:
    """Whether moments of a parameter can be kept in 8 bits. Others are kept in float32 (float64 for float64)."""
    return parameter.numel() >= LEAST_ELEMENTS and parameter.is_contiguous() and parameter.dtype != torch.float64


def records(elements: int) -> int:
    """How many runs this number of elements makes."""
    return -(-elements // RUN_ELEMENTS)


def nbytes(elements: int, dtype: torch.dtype) -> int:
    """The bytes of a state of this many elements; dtype uint8 stands for a moment in 8 bits."""
    return records(elements) * RECORD_BYTES if dtype == torch.uint8 else elements * dtype.itemsize


def zeros(elements: int, device: torch.device) -> torch.Tensor:
    """An 8-bit moment of this many elements, which are all zero."""
    return torch.zeros(records(elements), RECORD_BYTES, dtype=torch.uint8, device=device)


def is_record(value: torch.Tensor, elements: int) -> bool:
    """Whether `value` has the form of an 8-bit moment of this many elements."""
    return value.dtype == torch.uint8 and value.shape == (records(elements), RECORD_BYTES)


def decode(moment: torch.Tensor, elements: int, *, signed: bool) -> torch.Tensor:
    """The float32 values, flat, of a moment of shape (runs, 132) or flat."""
    code = _SIGNED if signed else _UNSIGNED
    moment = moment.view(-1, RECORD_BYTES)
    codes = moment[:, :RUN_ELEMENTS].to(torch.int32)
    unit = _scales(moment) * code.inverse
    values = (((codes & code.largest) << _MANTISSA_SHIFT) + code.base).view(torch.float32) - code.offset
    values *= unit[:, None]
    if signed:
        values = (values.view(torch.int32) | ((codes & 0x80) << 24)).view(torch.float32)
    return values.view(-1)[:elements]


def encode(values: torch.Tensor, moment: torch.Tensor, random: torch.Tensor | None, *, signed: bool) -> None:
    """Writes float32 `values`, flat, into a moment of shape (runs, 132) or flat.

    `random` has 16 bits for each value; None rounds to the nearest.
    """
    code = _SIGNED if signed else _UNSIGNED
    moment = moment.view(-1, RECORD_BYTES)
    bits = _in_runs(values, len(moment)).view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF
    scale_bits = magnitudes.amax(dim=1)
    scale_bits = torch.where(scale_bits < _SMALLEST, 0, torch.where(scale_bits >= _INFINITE, 0x7FC00000, scale_bits))
    scales = scale_bits.view(torch.float32)
    sound = (scales > 0)[:, None]
    places = magnitudes.view(torch.float32) * (torch.full_like(scales, code.top) / scales)[:, None]
    places += code.offset
    up = _NEAREST if random is None else _in_runs(random, len(moment)) << (_MANTISSA_SHIFT - 16)
    codes = ((places.view(torch.int32) - code.base + up) >> _MANTISSA_SHIFT).clamp_(max=code.largest)
    if signed:
        codes |= (bits >> 24) & 0x80
    else:
        codes |= (codes == 0) & (magnitudes > 0)
    moment[:, :RUN_ELEMENTS] = torch.where(sound, codes, 0).to(torch.uint8)
    moment[:, RUN_ELEMENTS:] = scales.view(torch.uint8).view(-1, 4)


def convert(state: dict[str, Any], names: Iterable[str], parameter: torch.Tensor, *, narrow: bool) -> None:
    """Brings the moments `names` of a parameter's state, first moment first, into 8 bits, or out of them.

    Moments that have the wanted form already stay as they are.
    """
    for index, name in enumerate(names):
        signed = index == 0
        wide, packed = state.get(name), state.get(name + SUFFIX)
        if narrow and isinstance(wide, torch.Tensor) and wide.shape == parameter.shape:
            del state[name]
            moment = zeros(wide.numel(), wide.device)
            encode(wide.detach().to(torch.float32).reshape(-1), moment, None, signed=signed)
            state[name + SUFFIX] = moment
        elif not narrow and isinstance(packed, torch.Tensor) and is_record(packed, parameter.numel()):
            del state[name + SUFFIX]
            state[name] = decode(packed.contiguous(), parameter.numel(), signed=signed).view(parameter.shape)


def _scales(moment: torch.Tensor) -> torch.Tensor:
    return moment[:, RUN_ELEMENTS:].contiguous().view(torch.float32).view(-1)


def _in_runs(flat: torch.Tensor, runs: int) -> torch.Tensor:
    missing = runs * RUN_ELEMENTS - flat.numel()
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(runs, RUN_ELEMENTS)
