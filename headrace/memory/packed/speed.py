"""How fast are packed words unpacked on this machine, by one thread? It is measured once, at the first call."""

import functools
import time

import torch

from headrace.memory.packed.format import Packed, pack, unpack

__all__ = ["unpacking_speed"]

_WORDS = 1 << 18
_ROUNDS = 3


@functools.cache
def unpacking_speed() -> float:
    """Bytes per second that unpacking yields: the best of three runs over half a MiB, a millisecond in all."""
    words = (torch.arange(_WORDS, dtype=torch.int32, device="cpu") % 0x0700 + 0x3800).to(torch.int16)
    memory = pack(words)
    if memory is None:
        return 0.0
    packed, best = Packed.in_memory(memory), float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        unpack(packed, words)
        best = min(best, time.perf_counter() - begin)
    return words.nbytes / best
