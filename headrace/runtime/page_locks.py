"""How much host memory does the system page-lock, and what limits it?

CUDA's driver locks pages by itself: `ulimit -l` (RLIMIT_MEMLOCK) bounds mlock(2) and drivers that ask the system, not
`cudaHostRegister`. Windows limits what WSL and its containers may lock, but the limit cannot be queried: refusals at
0.5 GB (microsoft/WSL#14078), at 1 GB of 62.8 (FlashML-org/FreeToken#233) and at half of the RAM have been reported.
"""

import mmap
import platform
from collections.abc import Callable
from typing import Any

import torch

from headrace.runtime.device import (
    allocate_locked_memory,
    can_register_host_memory,
    is_accelerator,
    register_host_memory,
)
from headrace.runtime.host import total_host_bytes

LockedTensor = tuple[torch.Tensor, Callable[[], Any]]  # the tensor, and the call that unlocks it


def is_wsl(kernel_release: str | None = None) -> bool:
    """Whether this is Linux within Windows (WSL), or a container on it, by the release of the kernel."""
    return "microsoft" in (platform.release() if kernel_release is None else kernel_release).lower()


def memlock_matters(device: torch.device) -> bool:
    """Whether the device's driver may ask the system to lock pages. CUDA's does not; of others it is unknown."""
    return is_accelerator(device) and (device.type != "cuda" or torch.version.hip is not None)


def memlock_bytes() -> int | None:
    """Bytes that `ulimit -l` lets this process lock; None if there is no limit, or no `ulimit` on this system."""
    try:
        import resource  # on Unix only
    except ModuleNotFoundError:
        return None
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def limit_text(device: torch.device, kernel_release: str | None = None) -> str:
    """Tells a user, in sentences, what is known of the limit and what to do."""
    if is_wsl(kernel_release or None):
        return (
            "This is WSL: Windows bounds page-locked memory, at half of the RAM at most"
            f" ({total_host_bytes() / 2e9:.1f} GB here), and often far below."
            " Lower host_memory with disk=..., raise device_memory, or run on Linux itself."
        )
    limit = memlock_bytes()
    if limit is not None and memlock_matters(device):
        return (
            f"ulimit -l allows {limit:,} bytes, which bounds drivers that ask the system: ulimit -l unlimited; in a"
            " container: docker run --ulimit memlock=-1. Or lower host_memory."
        )
    return "The driver names no limit. Lower host_memory, or raise device_memory; see headrace doctor."


def locked_tensor(device: torch.device, nbytes: int) -> LockedTensor | None:
    """Page-locked uint8 memory of whole pages for measurements, made as arenas make theirs; None if it is refused."""
    if not can_register_host_memory(device):
        tensor = allocate_locked_memory(nbytes)
        return None if tensor is None else (tensor, lambda: None)
    pages = mmap.mmap(-1, nbytes)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    tensor.zero_()  # the pages are in memory from now on
    unregister = register_host_memory(device, tensor.data_ptr(), nbytes)
    return None if unregister is None else (tensor, unregister)


def lockable_bytes(device: torch.device, most_bytes: int, piece_bytes: int = 256 * 2**20) -> int:
    """How many of `most_bytes` the system locks, in pieces, before it refuses. All of it is unlocked again."""
    held: list[LockedTensor] = []
    try:
        while (len(held) + 1) * piece_bytes <= most_bytes:
            made = locked_tensor(device, piece_bytes)
            if made is None:
                break
            held.append(made)
        return len(held) * piece_bytes
    finally:
        for _tensor, unlock in held:  # the tensor keeps its memory alive until then
            unlock()
