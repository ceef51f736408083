"""How does host memory get page-locked, and what becomes of it where the system refuses? It stays pageable.

Results stay the same. One warning per device says what that costs, with numbers; the stats go on counting such memory.
"""

import contextlib
import ctypes
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from headrace.config import format_bytes
from headrace.memory.fork_safe import map_fork_safe
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.pages import map_pages
from headrace.runtime.device import (
    allocate_locked_memory,
    can_register_host_memory,
    is_accelerator,
    register_host_memory,
    waits_for_device,
)
from headrace.runtime.numa import nodes_for
from headrace.runtime.page_locks import limit_text
from headrace.runtime.probe import link_rates
from headrace.runtime.threads import keeps_interrupts

_PROBED_BYTES = 4 << 20  # copied to measure what pageable memory costs

_ledgers: "weakref.WeakSet[Ledger]" = weakref.WeakSet()  # of all models and optimizers in this process
_told: set[torch.device] = set()


def host_memory(nbytes: int, device: torch.device, ledger: Ledger, purpose: str, *, computed: bool) -> tuple[Any, bool]:
    """Memory of whole pages, booked in `ledger` for as long as it lives; and whether it is page-locked for `device`.

    `computed`: whether cores compute in it, so that it should come from all their NUMA nodes, not from the device's.
    Warns of the first refusal for each device.
    """
    if is_accelerator(device) and can_register_host_memory(device):
        memory, address = map_fork_safe(nbytes, nodes_for(device, computed=computed))
        unlock = lock(memory, address, nbytes, nbytes, device, ledger, purpose)
        if unlock is not None:
            weakref.finalize(memory, keeps_interrupts(unlock)).atexit = False
        return memory, unlock is not None
    memory = _allocated(nbytes, device) if is_accelerator(device) else None
    locked = memory is not None
    if memory is None:
        memory = map_pages(nbytes, touched=True, nodes=nodes_for(device, computed=computed))
    _keep_book(memory, nbytes, device, ledger, purpose, locked=locked)
    return memory, locked


def lock(
    owner: Any, address: int, nbytes: int, booked_bytes: int, device: torch.device, ledger: Ledger, purpose: str
) -> Callable[[], Any] | None:
    """Page-locks memory that lives as long as `owner`, and books `booked_bytes` of it, this process's share.

    Returns the call to make before the memory is unmapped; None if it is not locked.
    """
    unlock = None
    if is_accelerator(device) and can_register_host_memory(device):
        unlock = register_host_memory(device, address, nbytes)
    _keep_book(owner, booked_bytes, device, ledger, purpose, locked=unlock is not None)
    return unlock


def _keep_book(memory: Any, nbytes: int, device: torch.device, ledger: Ledger, purpose: str, *, locked: bool) -> None:
    refused = is_accelerator(device) and not locked
    _ledgers.add(ledger)
    ledger.book(memory, Tier.HOST, purpose, nbytes, locked=True if locked else False if refused else None)
    if refused and device not in _told:
        _told.add(device)
        warnings.warn(_told_of(device, nbytes, purpose), RuntimeWarning, stacklevel=4)


def _allocated(nbytes: int, device: torch.device) -> Any:
    """Memory of PyTorch's allocator, for devices that cannot register a caller's memory; None if it is refused.

    The allocator does not know of copies within the memory, and would hand it out again while they are under way.
    """
    owner = allocate_locked_memory(nbytes)
    if owner is None:
        return None
    view = (ctypes.c_char * nbytes).from_address(owner.data_ptr())
    weakref.finalize(view, keeps_interrupts(waits_for_device(device)), owner).atexit = False
    return view


def _told_of(device: torch.device, nbytes: int, purpose: str) -> str:
    locked_bytes = sum(ledger.locked()["host_locked_bytes"] for ledger in _ledgers)
    return (
        f"{device}: {format_bytes(nbytes)} of host memory ({purpose}) could not be page-locked, beside"
        f" {format_bytes(locked_bytes)} that are. What is refused stays pageable: results are the same, but compute"
        f" waits for its copies{_cost(device)}. {limit_text(device)} Said once; stats() go on counting"
        " (host_locked_bytes, host_refused_bytes)."
    )


def _cost(device: torch.device) -> str:
    """Tells the rate of copies from pageable memory, measured now; empty if the device has no room for that."""
    with contextlib.suppress(RuntimeError):
        rates = link_rates(device, copy_bytes=_PROBED_BYTES)
        beside = f", page-locked ones {rates.onload / 1e9:.1f} GB/s" if rates.locked else ""
        return f" (they reach {rates.pageable_onload / 1e9:.1f} GB/s here{beside})"
    return ""
