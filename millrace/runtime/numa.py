"""On which NUMA nodes should host memory lie? In turn on all whose cores this process may use.

An update of weights takes its chunks in any order on any core, so memory that lies on one node alone would have that
node's bandwidth and leave the others'. A process that is bound to the cores of one node gets that node's memory from
the kernel anyway: nothing is to be done there, nor on machines with one node or without libnuma.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["interleave", "nodes_in_use", "nodes_of_process"]

_NODES = Path("/sys/devices/system/node")


def nodes_in_use(cores: Iterable[int], nodes: Path = _NODES) -> tuple[int, ...]:
    """The nodes that these cores belong to, as the kernel lists them under `nodes`; empty where it lists none."""
    wanted = set(cores)
    found = []
    for directory in nodes.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if wanted & _listed((directory / "cpulist").read_text()):
                found.append(int(directory.name.removeprefix("node")))
    return tuple(sorted(found))


def interleave(address: int, nbytes: int, nodes: tuple[int, ...]) -> bool:
    """Has the pages of memory that nobody has touched yet come from `nodes` in turn. False: libnuma is not there."""
    library = _libnuma()
    if library is None:
        return False
    mask = library.numa_allocate_nodemask()
    try:
        for node in nodes:
            library.numa_bitmask_setbit(mask, node)
        library.numa_interleave_memory(address, nbytes, mask)
    finally:
        library.numa_bitmask_free(mask)
    return True


@functools.cache
def _libnuma() -> Any:
    try:
        library = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None
    library.numa_allocate_nodemask.restype = ctypes.c_void_p
    library.numa_bitmask_setbit.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.numa_bitmask_setbit.restype = ctypes.c_void_p
    library.numa_bitmask_free.argtypes = [ctypes.c_void_p]
    library.numa_interleave_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library if library.numa_available() >= 0 else None


@functools.cache
def nodes_of_process() -> tuple[int, ...]:
    """The nodes whose cores this process may use. Asked once: memory that is there does not move."""
    return nodes_in_use(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()


def _listed(text: str) -> set[int]:
    """The numbers of a kernel's list such as "0-3,8"."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers
