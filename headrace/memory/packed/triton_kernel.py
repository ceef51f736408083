"""How does an accelerator unpack words itself? One lane for each word, and one for each that escaped. Needs Triton.

Arguments of kernels have only Triton's own annotations: it looks up every name in these when it compiles the kernel.
"""

import torch
import triton
import triton.language as tl

from headrace.memory.packed.format import Packed

_BLOCK = 1024


def unpack_by_triton(packed: Packed, words: torch.Tensor) -> None:
    """Unpacks all words into `words` (int16, (packed.words,)), on the current stream."""
    _unpack[(triton.cdiv(packed.words, _BLOCK),)](packed.groups, packed.palette, words, packed.words, BLOCK=_BLOCK)
    if packed.escapes:
        _escape[(triton.cdiv(packed.escapes, _BLOCK),)](packed.escaped, words, packed.escapes, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _unpack(groups, palette, words, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < count
    group = groups + word // 128 * 192
    place = word % 128
    byte = tl.load(group + place, mask=inside, other=0).to(tl.int32)
    codes = tl.load(group + 128 + place % 64, mask=inside, other=0).to(tl.int32)
    code = tl.where(place < 64, codes & 15, codes >> 4)
    exponent = tl.load(palette + code, mask=inside, other=0).to(tl.int32)
    tl.store(words + word, ((byte & 0x80) << 8 | exponent << 7 | byte & 0x7F).to(tl.int16), mask=inside)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _escape(escaped, words, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    escape = tl.load(escaped + entry, mask=inside, other=0)
    word = words + ((escape >> 8) & 0xFFFFFF)
    bits = tl.load(word, mask=inside, other=0).to(tl.int32)
    tl.store(word, (bits & 0x807F | (escape & 0xFF) << 7).to(tl.int16), mask=inside)
