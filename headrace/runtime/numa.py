"""On which NUMA nodes should host memory lie? On the device's; where cores compute, on all whose cores this process may
use, in turn.

What is only copied to and from a device lies nearest to it. An update of weights takes its chunks in any order on any
core. If all its memory lay on one node, only that node's bandwidth would be used. A process that is bound to the cores
of one node gets that node's memory from the kernel anyway, so nothing is done there, nor on machines with one node or
without libnuma. Where each rank copies only its own range of shared memory, the range lies at that rank's device.
"""

import contextlib
import ctypes
import functools
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.runtime.device import pci_address

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def interleave(address: int, nbytes: int, nodes: tuple[int, ...]) -> bool:
    """Makes the pages of memory that is not touched yet come from `nodes` in turn. False: there is no libnuma."""
    library = libnuma()
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


def bind(address: int, nbytes: int, node: int) -> bool:
    """Makes the pages of memory that is not touched yet come from one node, as long as it has free ones. False: there
    is no libnuma, or this process may not have memory of that node.
    """
    library = libnuma()
    if library is None or not _has_memory(node):
        return False
    library.numa_tonode_memory(address, nbytes, node)
    return True


def nodes_for(device: torch.device, *, computed: bool) -> tuple[int, ...]:
    """The nodes from which memory for copies to and from `device` should come, in turn; (): as the kernel chooses.

    `computed`: cores of this process also compute in that memory, as in an update.
    """
    nodes = nodes_of_process()
    if len(nodes) < 2:
        return ()
    node = None if computed or device.type == "cpu" else node_of(device)
    return nodes if node is None else (node,)


def node_of(device: torch.device, pci_devices: Path = _PCI_DEVICES) -> int | None:
    """The node that a device is at; for the CPU, the node of this process's cores. None: unknown, or several."""
    if device.type == "cpu":
        nodes = nodes_of_process()
        return nodes[0] if len(nodes) == 1 else None
    address = pci_address(device)
    if address is not None:
        with contextlib.suppress(OSError, ValueError):
            node = int((pci_devices / address / "numa_node").read_text())
            return node if node >= 0 else None
    return None


@dataclass(frozen=True)
class Spread:
    """Where memory that ranks share is to lie: on `nodes` in turn; or each rank's equal part on its node in `of_ranks`,
    as far as that is known (None: unknown).
    """

    nodes: tuple[int, ...] = ()
    of_ranks: tuple[int | None, ...] = ()

    def place(self, address: int, nbytes: int, *, by_ranks: bool) -> None:
        """Places memory of whole pages that is not touched yet; with `by_ranks`, each rank's part on its node."""
        if len({*self.nodes, *self.of_ranks} - {None}) < 2:
            return
        if len(self.nodes) > 1:
            interleave(address, nbytes, self.nodes)
        count = len(self.of_ranks)
        for rank, node in enumerate(self.of_ranks if by_ranks else ()):
            begin, end = (_page(nbytes * one // count) for one in (rank, rank + 1))
            if node is not None and begin < end:
                bind(address + begin, end - begin, node)


def _page(offset: int) -> int:
    """The page boundary that is nearest to `offset`."""
    return (offset + mmap.PAGESIZE // 2) // mmap.PAGESIZE * mmap.PAGESIZE


@functools.cache
def _has_memory(node: int) -> bool:
    """Whether the node has memory, and this process may have it. Binding to another one prints an error of libnuma."""
    library = libnuma()
    allowed = library.numa_get_mems_allowed()
    try:
        return bool(library.numa_bitmask_isbitset(allowed, node))
    finally:
        library.numa_bitmask_free(allowed)


@functools.cache
def libnuma() -> Any:
    """The library; None if it is missing, or if the kernel lacks what it needs."""
    try:
        library = ctypes.CDLL("libnuma.so.1")
    except OSError:
        return None
    library.numa_allocate_nodemask.restype = ctypes.c_void_p
    library.numa_bitmask_setbit.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.numa_bitmask_setbit.restype = ctypes.c_void_p
    library.numa_bitmask_free.argtypes = [ctypes.c_void_p]
    library.numa_bitmask_isbitset.argtypes = [ctypes.c_void_p, ctypes.c_uint]
    library.numa_get_mems_allowed.restype = ctypes.c_void_p
    library.numa_interleave_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    library.numa_tonode_memory.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library if library.numa_available() >= 0 else None


@functools.cache
def nodes_of_process() -> tuple[int, ...]:
    """The nodes whose cores this process may use, by libnuma. Asked once, since memory in place does not move."""
    library = libnuma() if hasattr(os, "sched_getaffinity") else None
    if library is None:
        return ()
    nodes = {library.numa_node_of_cpu(core) for core in os.sched_getaffinity(0)}
    return tuple(sorted(nodes - {-1}))  # -1 is for an unknown core
