"""What are packed weights made of? A header, groups of a fixed size, and escapes. Any range can be unpacked alone.

Native code packs and unpacks. It is called through ctypes, by addresses; other threads run meanwhile.

    header   64 bytes: 15 exponents and a zero, then the numbers of words and of escapes (uint32, little-endian)
    groups   192 bytes for each 128 words: sign and mantissa in 8 bits, the exponent's place in the header in 4
    escapes  uint32 each, in order of their words: 256 times the word's number, and its exponent

Words are 16-bit patterns of any kind. A word escapes if its exponent is not among the 15. If so many words escape that
little would be saved, nothing is packed.
"""

import ctypes
import functools
import time
from dataclasses import dataclass

import torch

from headrace.runtime.native import load_native

_VERSION = 1  # of the native code
_HEADER_BYTES = 64
GROUP_WORDS, _GROUP_BYTES = 128, 192
_PLAIN_GROUP_BYTES = 2 * GROUP_WORDS
_ESCAPE_BYTES = 4
_MOST_WORDS = 1 << 24  # an escape has 24 bits for a word's number
_TIMED_WORDS = 1 << 18
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
        """The groups: uint8, (groups, 192)."""
        return self.memory[_HEADER_BYTES : _HEADER_BYTES + _groups(self.words) * _GROUP_BYTES].view(-1, _GROUP_BYTES)

    @property
    def escaped(self) -> torch.Tensor:
        """The escapes: int32, (escapes,)."""
        return self.memory[_HEADER_BYTES + _groups(self.words) * _GROUP_BYTES :].view(torch.int32)


def packed_bytes(words: int, escapes: int) -> int:
    """Bytes that `words` words take if `escapes` of them escape."""
    return _HEADER_BYTES + _groups(words) * _GROUP_BYTES + escapes * _ESCAPE_BYTES


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_native(__file__, "headrace_packed_version", _VERSION)
    if library is None:
        return None
    pointer, count, instructions = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.headrace_packed_choose.argtypes = [pointer, count, pointer]
    library.headrace_packed_choose.restype = None
    library.headrace_packed_pack.argtypes = [pointer, count, pointer, pointer, pointer, count, instructions]
    library.headrace_packed_pack.restype = count
    library.headrace_packed_unpack.argtypes = [*([pointer] * 3), *([count] * 3), pointer, instructions]
    library.headrace_packed_unpack.restype = None
    return library


def _native() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("the native code that packs was not built; headrace.memory.packed.available() is False")
    return library


def available() -> bool:
    """Whether the native code was built with this installation. Without it, nothing is packed."""
    return _library() is not None


def level() -> int:
    """Vector instructions in use: 0 baseline, 1 AVX2, 2 AVX-512. Results do not depend on them."""
    return int(_native().headrace_packed_best_level())


def pack(source: torch.Tensor) -> torch.Tensor | None:
    """Packs `source` into uint8, (bytes,). None if that is not worth it: it would take more than 0.9 of the bytes.

    `source` is contiguous, on the CPU, with an even number of bytes. Raises RuntimeError without native code.
    """
    memory = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu")
    nbytes = pack_into(source, memory)
    return memory[:nbytes].clone() if nbytes else None


def pack_into(source: torch.Tensor, memory: torch.Tensor) -> int:
    """Packs `source` (contiguous, on the CPU) into `memory` (uint8), from its first byte on. Returns the bytes taken.

    The two may be the same memory. 0: it is not worth it, `source` has an odd number of bytes, or `memory` has no room;
    its contents may be lost.
    """
    if source.nbytes % 2:
        return 0
    words = source.reshape(-1).view(torch.uint8).view(torch.int16)
    count = words.numel()
    most_bytes = min(memory.nbytes, int(source.nbytes * _WORTH))
    most_escapes = (most_bytes - packed_bytes(count, 0)) // _ESCAPE_BYTES
    if most_escapes < 0 or count > _MOST_WORDS:
        return 0
    escapes = torch.empty(most_escapes, dtype=torch.int32, device="cpu")
    header = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
    _native().headrace_packed_choose(words.data_ptr(), count, header.data_ptr())
    groups = memory.data_ptr() + _HEADER_BYTES
    escaped = _native().headrace_packed_pack(
        words.data_ptr(), count, header.data_ptr(), groups, escapes.data_ptr(), most_escapes, level()
    )
    if escaped < 0:  # there are more than fit
        return 0
    header[16:24].view(torch.int32).copy_(torch.tensor([count, escaped], dtype=torch.int32, device="cpu"))
    nbytes = packed_bytes(count, escaped)
    memory[:_HEADER_BYTES] = header
    memory[nbytes - escaped * _ESCAPE_BYTES : nbytes].view(torch.int32).copy_(escapes[:escaped])
    return nbytes


def unpack(packed: Packed, into: torch.Tensor, first: int = 0) -> None:
    """Unpacks the words from `first` on into all of `into`: contiguous, on the CPU."""
    words = into.view(-1).view(torch.uint8).view(torch.int16)
    if not 0 <= first <= first + words.numel() <= packed.words:
        raise ValueError(f"words {first} to {first + words.numel()} are not within the {packed.words} that are packed")
    _unpack(packed.groups[first // GROUP_WORDS :], packed.palette, packed.escaped, first, words)


def _unpack(groups: torch.Tensor, palette: torch.Tensor, escapes: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Unpacks words from `first` on into `out` (int16, contiguous). `groups` begins with the group of word `first`."""
    addresses = groups.data_ptr(), palette.data_ptr(), escapes.data_ptr()
    _native().headrace_packed_unpack(*addresses, escapes.numel(), first, out.numel(), out.data_ptr(), level())


def unpack_in_place(memory: torch.Tensor, begin: int) -> None:
    """Unpacks words that lie packed in `memory`, on the CPU, from byte `begin` on: to the first bytes of `memory`.

    `begin` is a multiple of 64.
    """
    packed = Packed.in_memory(memory[begin:])
    words = memory[: 2 * packed.words].view(torch.int16)
    # A group may be unpacked to where earlier groups were, but not to where it is itself, or later groups are.
    lie = begin + _HEADER_BYTES
    safe = max(0, (lie - _PLAIN_GROUP_BYTES) // (_PLAIN_GROUP_BYTES - _GROUP_BYTES) + 1)
    safe = min(safe, packed.words // GROUP_WORDS)
    palette, escaped, rest = packed.palette.clone(), packed.escaped.clone(), packed.groups[safe:].clone()
    split = safe * GROUP_WORDS
    _unpack(packed.groups, palette, escaped, 0, words[:split])
    _unpack(rest, palette, escaped, split, words[split:])


def _groups(words: int) -> int:
    return -(-words // GROUP_WORDS)


@functools.cache
def unpacking_speed() -> float:
    """Bytes of words per second that one thread unpacks, measured at the first call: the best of three runs over half
    a MiB, a millisecond in all.
    """
    words = (torch.arange(_TIMED_WORDS, dtype=torch.int32, device="cpu") % 0x0700 + 0x3800).to(torch.int16)
    memory = pack(words)
    if memory is None:
        return 0.0
    packed, best = Packed.in_memory(memory), float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        unpack(packed, words)
        best = min(best, time.perf_counter() - begin)
    return words.nbytes / best
