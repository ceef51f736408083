"""How are packed words unpacked on the device? By a Triton kernel; without Triton, by PyTorch's operators.

The host knows how many words escaped, so nothing waits for the device.
"""

import functools
import importlib.util

import torch

from headrace.memory.packed.format import GROUP_WORDS, Packed

_AT_A_TIME = 1 << 13  # groups that PyTorch's operators unpack at once, to limit the memory that they take


def unpack_on_device(packed: Packed, into: torch.Tensor) -> None:
    """Unpacks all words into `into`: contiguous, of as many bytes, on the device of `packed.memory`. Does not wait.

    With Triton, no other memory is needed; PyTorch's operators need up to 30 MiB for a moment.
    """
    words = into.view(-1).view(torch.uint8).view(torch.int16)
    if words.numel() != packed.words:
        raise ValueError(f"{packed.words} words are packed, and {words.numel()} have room where they go")
    if unpacks_by_kernel(words.device):
        from headrace.memory.packed.triton_kernel import unpack_by_triton

        unpack_by_triton(packed, words)
    else:
        unpack_by_torch(packed, words)


def unpacks_by_kernel(device: torch.device) -> bool:
    """Whether unpacking on the device is done by Triton, and needs no memory beside the packed and unpacked words."""
    return device.type in ("cuda", "xpu") and _has_triton()


def unpack_by_torch(packed: Packed, words: torch.Tensor) -> None:
    """As `unpack_on_device`, by PyTorch's operators. `words`: int16, (packed.words,)."""
    palette = packed.palette.to(torch.int32) << 7
    for first in range(0, len(packed.groups), _AT_A_TIME):
        groups = packed.groups[first : first + _AT_A_TIME].to(torch.int32)
        byte, codes = groups[:, :GROUP_WORDS], groups[:, GROUP_WORDS:]
        exponents = palette[torch.cat([codes & 15, codes >> 4], dim=1)]
        part = words[first * GROUP_WORDS : (first + _AT_A_TIME) * GROUP_WORDS]
        part.copy_(((byte & 0x80) << 8 | exponents | byte & 0x7F).view(-1)[: part.numel()])
    if packed.escapes:
        places = (packed.escaped >> 8) & 0xFFFFFF
        words[places] = (words[places] & -0x7F81) | ((packed.escaped & 0xFF) << 7).to(torch.int16)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
