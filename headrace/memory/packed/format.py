"""What are packed weights made of? A header, groups of a fixed size, and escapes. Any range can be unpacked alone.

    header   64 bytes: 15 exponents and a zero, then the number of words and that of escapes (uint32, little-endian)
    groups   192 bytes for each 128 words: sign and mantissa in 8 bits, the exponent's place in the header in 4
    escapes  uint32 each, in order of their words: 256 times the word's number, and its exponent

Words are 16-bit patterns of any kind. A word whose exponent is not among the 15 escapes; if so many escape that little
would be saved, nothing is packed.
"""

from dataclasses import dataclass

import torch

from headrace.memory.packed import kernel

__all__ = [
    "GROUP_BYTES",
    "GROUP_WORDS",
    "HEADER_BYTES",
    "Packed",
    "pack",
    "pack_in_place",
    "pack_into",
    "unpack",
    "unpack_in_place",
]

HEADER_BYTES = 64
GROUP_WORDS, GROUP_BYTES = 128, 192
_PLAIN_GROUP_BYTES = 2 * GROUP_WORDS
_ESCAPE_BYTES = 4
_MOST_WORDS = 1 << 24  # an escape cannot number more
_WORTH = 0.9  # of the plain bytes: words that would take more are not packed


@dataclass(frozen=True)
class Packed:
    """Packed words, in memory (uint8, (nbytes,)) on any device."""

    memory: torch.Tensor
    words: int
    escapes: int

    @staticmethod
    def in_memory(memory: torch.Tensor) -> "Packed":
        """The packed words that `memory`, on the CPU, begins with."""
        words, escapes = memory[16:24].view(torch.int32).tolist()
        return Packed(memory[: packed_bytes(words, escapes)], words, escapes)

    @property
    def palette(self) -> torch.Tensor:
        """The exponent for each code: uint8, (16,). Code 15 is that of words that escaped."""
        return self.memory[:16]

    @property
    def groups(self) -> torch.Tensor:
        """The groups: uint8, (groups, GROUP_BYTES)."""
        return self.memory[HEADER_BYTES : HEADER_BYTES + _groups(self.words) * GROUP_BYTES].view(-1, GROUP_BYTES)

    @property
    def escaped(self) -> torch.Tensor:
        """The escapes: int32, (escapes,)."""
        return self.memory[HEADER_BYTES + _groups(self.words) * GROUP_BYTES :].view(torch.int32)


def packed_bytes(words: int, escapes: int) -> int:
    """Bytes that `words` words take, of which `escapes` escape."""
    return HEADER_BYTES + _groups(words) * GROUP_BYTES + escapes * _ESCAPE_BYTES


def pack(source: torch.Tensor) -> torch.Tensor | None:
    """Packs `source` into uint8, (bytes,). None if that is not worth it: it would take more than 0.9 of the bytes.

    `source` is contiguous, on the CPU, with an even number of bytes. Raises RuntimeError without native code.
    """
    words = source.reshape(-1).view(torch.uint8).view(torch.int16)
    most = _most_escapes(words.numel())
    if most < 0:
        return None
    memory = torch.empty(packed_bytes(words.numel(), most), dtype=torch.uint8, device="cpu")
    nbytes = _pack(words, memory, most)
    return memory[:nbytes].clone() if nbytes else None


def pack_in_place(memory: torch.Tensor) -> int:
    """Packs the bytes of `memory` (uint8, an even number, contiguous) in place. Returns the number of packed bytes.

    0: it was not worth it, and the contents of `memory` are lost.
    """
    return pack_into(memory, memory)


def pack_into(source: torch.Tensor, memory: torch.Tensor) -> int:
    """Packs `source` (contiguous, on the CPU) into `memory` (uint8), from its first byte on. Returns the bytes taken.

    0: it is not worth it, `source` has an odd number of bytes, or `memory` has no room; its contents may be lost.
    """
    if source.nbytes % 2:
        return 0
    words = source.reshape(-1).view(torch.uint8).view(torch.int16)
    most = min(_most_escapes(words.numel()), (memory.nbytes - packed_bytes(words.numel(), 0)) // _ESCAPE_BYTES)
    return 0 if most < 0 else _pack(words, memory, most)


def unpack(packed: Packed, into: torch.Tensor, first: int = 0) -> None:
    """Unpacks the words from `first` on into all of `into`: contiguous, on the CPU."""
    words = into.view(-1).view(torch.uint8).view(torch.int16)
    _check(packed, first, words.numel())
    kernel.unpack(packed.groups[first // GROUP_WORDS :], packed.palette, packed.escaped, first, words)


def unpack_in_place(memory: torch.Tensor, begin: int) -> None:
    """Unpacks the words that are packed from byte `begin` of `memory` on into its first bytes. `memory`: on the CPU.

    `begin` is a multiple of 64.
    """
    packed = Packed.in_memory(memory[begin:])
    words = memory[: 2 * packed.words].view(torch.int16)
    # A group may be unpacked to where earlier groups were, but not to where it is itself, or later groups are.
    lie = begin + HEADER_BYTES
    safe = max(0, (lie - _PLAIN_GROUP_BYTES) // (_PLAIN_GROUP_BYTES - GROUP_BYTES) + 1)
    safe = min(safe, packed.words // GROUP_WORDS)
    palette, escaped, rest = packed.palette.clone(), packed.escaped.clone(), packed.groups[safe:].clone()
    split = safe * GROUP_WORDS
    kernel.unpack(packed.groups, palette, escaped, 0, words[:split])
    kernel.unpack(rest, palette, escaped, split, words[split:])


def _check(packed: Packed, first: int, count: int) -> None:
    if not 0 <= first <= first + count <= packed.words:
        raise ValueError(f"words {first} to {first + count} are not within the {packed.words} that are packed")


def _groups(words: int) -> int:
    return -(-words // GROUP_WORDS)


def _most_escapes(words: int) -> int:
    """The most escapes with which packing is worth it; negative: it is not, even without any."""
    if words > _MOST_WORDS:
        return -1
    return (int(2 * words * _WORTH) - packed_bytes(words, 0)) // _ESCAPE_BYTES


def _pack(words: torch.Tensor, memory: torch.Tensor, most: int) -> int:
    """Packs `words` into `memory`, which may be their own. Returns the bytes written; 0: too many words escape."""
    count = words.numel()
    escapes = torch.empty(most, dtype=torch.int32, device="cpu")
    header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    kernel.choose(words, header)
    escaped = kernel.pack(words, header, memory[HEADER_BYTES:], escapes)
    if escaped < 0:
        return 0
    header[16:24].view(torch.int32).copy_(torch.tensor([count, escaped], dtype=torch.int32, device="cpu"))
    nbytes = packed_bytes(count, escaped)
    memory[:HEADER_BYTES] = header
    memory[nbytes - escaped * _ESCAPE_BYTES : nbytes].view(torch.int32).copy_(escapes[:escaped])
    return nbytes
