"""How does Python reach the native code that packs? Through ctypes, by addresses; other threads run meanwhile."""

import ctypes
import functools

import torch

from headrace.runtime.native import load_native

__all__ = ["available", "choose", "level", "pack", "unpack"]

_VERSION = 1


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = load_native(__file__, "headrace_packed_version", _VERSION)
    if library is None:
        return None
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.headrace_packed_choose.argtypes = [pointer, count, pointer]
    library.headrace_packed_choose.restype = None
    library.headrace_packed_pack.argtypes = [pointer, count, pointer, pointer, pointer, count, ctypes.c_int32]
    library.headrace_packed_pack.restype = count
    library.headrace_packed_unpack.argtypes = [
        *(pointer, pointer, pointer, count, count, count, pointer),
        ctypes.c_int32,
    ]
    library.headrace_packed_unpack.restype = None
    return library


def available() -> bool:
    """Whether the native code was built with this installation. Without it, nothing is packed."""
    return _library() is not None


def level() -> int:
    """Vector instructions in use: 0 baseline, 1 AVX2, 2 AVX-512. Results do not depend on them."""
    return int(_built().headrace_packed_best_level())


def choose(words: torch.Tensor, palette: torch.Tensor) -> None:
    """Puts the 15 most frequent exponents of `words` (int16, contiguous) into `palette` (uint8, (16,))."""
    _built().headrace_packed_choose(words.data_ptr(), words.numel(), palette.data_ptr())


def pack(words: torch.Tensor, palette: torch.Tensor, groups: torch.Tensor, escapes: torch.Tensor) -> int:
    """Packs `words` into `groups` (uint8, 192 bytes for 128 words), and escapes into `escapes` (int32). Returns the
    number of escapes; -1: there are more than fit.
    """
    return int(
        _built().headrace_packed_pack(
            words.data_ptr(),
            words.numel(),
            palette.data_ptr(),
            groups.data_ptr(),
            escapes.data_ptr(),
            escapes.numel(),
            level(),
        )
    )


def unpack(groups: torch.Tensor, palette: torch.Tensor, escapes: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """Unpacks words from `first` on into `out` (int16, contiguous). `groups` begins with the group of word `first`."""
    _built().headrace_packed_unpack(
        groups.data_ptr(),
        palette.data_ptr(),
        escapes.data_ptr(),
        escapes.numel(),
        first,
        out.numel(),
        out.data_ptr(),
        level(),
    )


def _built() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("the native code that packs was not built; headrace.memory.packed.available() is False")
    return library
