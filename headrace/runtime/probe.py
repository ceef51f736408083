"""How fast is this machine? Copies, matrix products, the update, memory and the disk are each measured alone."""

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from headrace.runtime.device import is_accelerator
from headrace.runtime.lanes import Copy, Lane, open_lanes
from headrace.runtime.page_locks import locked_tensor
from headrace.runtime.system import free_bytes, read_at, write_at

_COPY_BYTES = 256 * 2**20
_DISK_BLOCK_BYTES = 8 * 2**20
_DISK_FILE_BYTES = 512 * 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)
_HOST = torch.device("cpu")
_ROUNDS = 5
# DRAM traffic per parameter: gradient, weight and two moments in float32 are read, and the last three are written.
_UPDATE_BYTES = 28
_UPDATE_PARAMETERS = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Bytes per second between host and device; `pageable_onload` is from memory that is not page-locked.

    `locked`: whether memory could be page-locked; if not, all rates are those of pageable memory. `both_share`: the
    share of its rate that each direction keeps when both run at once. `notes`: what looks wrong.
    """

    onload: float
    offload: float
    pageable_onload: float
    both_share: float
    locked: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Bytes per second of a disk. `direct`: whether the page cache was bypassed; `notes`: what looks wrong."""

    read: float
    write: float
    direct: bool
    free_bytes: int
    notes: tuple[str, ...]


def median_seconds(device: torch.device, work: Callable[[], object], before: Callable[[], object] = int) -> float:
    """The median seconds that a device takes for `work` over some rounds, after one that does not count; `before` is
    called before each. They are measured by the device's own events, or by the clock on the CPU.
    """
    found = []
    with closing(open_lanes(device)) as lanes:
        for _ in range(_ROUNDS + 1):
            before()
            begun = lanes.tick()
            work()
            found.append(lanes.seconds(begun, lanes.tick()))
    return median(found[1:])


def link_rates(device: torch.device, *, copy_bytes: int = _COPY_BYTES) -> LinkRates:
    """The rates of copies of `copy_bytes`. On the CPU, which has no link, they are those of host memory."""
    made = [locked_tensor(device, copy_bytes) for _ in range(2)] if is_accelerator(device) else []
    held = [each for each in made if each is not None]
    try:
        locked = [tensor for tensor, _unlock in held] if len(held) == 2 else None
        return _rates(device, copy_bytes, locked)
    finally:
        for _tensor, unlock in held:
            unlock()


def _rates(device: torch.device, copy_bytes: int, locked: list[torch.Tensor] | None) -> LinkRates:
    pageable = [torch.zeros(copy_bytes, dtype=torch.uint8, device="cpu") for _ in range(2)]
    host = locked or pageable
    there = [torch.zeros(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    seconds = partial(median_seconds, device)
    onload = copy_bytes / seconds(lambda: there[0].copy_(host[0], non_blocking=True))
    offload = copy_bytes / seconds(lambda: host[1].copy_(there[1], non_blocking=True))
    slow = copy_bytes / seconds(lambda: there[0].copy_(pageable[0], non_blocking=True))
    share, notes = 1.0, []
    if is_accelerator(device):
        both = _seconds_of_both(device, {Lane.ONLOAD: (there[0], host[0]), Lane.OFFLOAD: (host[1], there[1])})
        share = min(1.0, max(copy_bytes / onload, copy_bytes / offload) / both)
        if locked is None:
            notes.append(
                "host memory could not be page-locked: the rates are those of pageable memory, and compute waits for"
                " its copies; headrace doctor looks for the cause"
            )
        elif slow > 1.1 * onload:
            notes.append(
                f"copies from pageable memory ({slow / 1e9:.1f} GB/s) are faster than from page-locked memory"
                f" ({onload / 1e9:.1f} GB/s): page-locking does not work here (a virtual machine, or WSL)"
            )
        if locked is not None and onload < 5e9:
            notes.append(
                f"the link carries {onload / 1e9:.1f} GB/s, less than a quarter of PCIe 4 with 16 lanes: look at the"
                " slot, riser and power state (lspci -vv, LnkSta)"
            )
    return LinkRates(
        onload=onload,
        offload=offload,
        pageable_onload=slow,
        both_share=share,
        locked=locked is not None or not is_accelerator(device),
        notes=tuple(notes),
    )


def _seconds_of_both(device: torch.device, copies: dict[Lane, Copy]) -> float:
    """The seconds until both copies are done, each on its lane."""
    with closing(open_lanes(device)) as lanes:

        def both() -> None:
            for copied in [lanes.copy(lane, [copy], lanes.mark()) for lane, copy in copies.items()]:
                lanes.wait(copied.done)

        return median_seconds(device, both)


def memory_rate(device: torch.device = _HOST, *, copy_bytes: int = _COPY_BYTES) -> float:
    """Bytes read and written per second by a copy within the device's memory; on the CPU, on all threads."""
    source, target = (torch.zeros(copy_bytes // 4, device=device) for _ in range(2))
    return 2 * copy_bytes / median_seconds(device, lambda: target.copy_(source))


def update_rate(*, parameters: int = _UPDATE_PARAMETERS) -> float:
    """Bytes of DRAM traffic per second that AdamW in float32 reaches on all threads, at 28 bytes per parameter."""
    weight = torch.zeros(parameters)
    weight.grad = torch.zeros(parameters)
    step = torch.optim.AdamW([weight], fused=True).step
    return _UPDATE_BYTES * parameters / median_seconds(_HOST, step)


def matmul_rates(device: torch.device, *, size: int | None = None) -> dict[str, float]:
    """Operations per second of square matrix products, by dtype."""
    size = size or (4096 if is_accelerator(device) else 1024)
    rates = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        multiply = partial(torch.mm, left, right)
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / median_seconds(device, multiply)
    return rates


def disk_rates(directory: Path, *, file_bytes: int = _DISK_FILE_BYTES) -> DiskRates:
    """Writes and reads one file of `file_bytes` in `directory`, and removes it.

    Raises OSError when nothing can be written there.
    """
    free = free_bytes(directory)
    file_bytes = min(file_bytes, free // 4) // _DISK_BLOCK_BYTES * _DISK_BLOCK_BYTES
    if file_bytes == 0:
        raise OSError(f"{directory} has {free:,} bytes left, too few to measure it; make room or name another")
    block = mmap.mmap(-1, _DISK_BLOCK_BYTES)  # whole pages, which direct access requires
    block.write(os.urandom(_DISK_BLOCK_BYTES))  # so that a drive that compresses does not look fast
    handle, name = tempfile.mkstemp(prefix="headrace-probe-", dir=directory)
    os.close(handle)
    try:
        direct = _opens(name, os.O_RDWR | _DIRECT)
        flags = _DIRECT if direct else 0
        write = file_bytes / _disk_seconds(name, os.O_WRONLY | flags, write_at, block, file_bytes)
        if not flags and hasattr(os, "posix_fadvise"):
            with open(name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = file_bytes / _disk_seconds(name, os.O_RDONLY | flags, read_at, block, file_bytes)
    finally:
        os.unlink(name)
        block.close()
    notes = []
    if not direct:
        notes.append(f"{directory} refuses direct access (O_DIRECT): reads pass the page cache, at about half the rate")
    if min(read, write) < 0.5e9:
        notes.append(f"the disk under {directory} does {min(read, write) / 1e9:.2f} GB/s: too slow to offload to")
    return DiskRates(read=read, write=write, direct=direct, free_bytes=free, notes=tuple(notes))


def _opens(name: str, flags: int) -> bool:
    try:
        os.close(os.open(name, flags))
    except OSError:
        return False
    return bool(_DIRECT)


def _disk_seconds(name: str, flags: int, move: Callable[..., int], block: mmap.mmap, file_bytes: int) -> float:
    handle = os.open(name, flags)
    try:
        begun = time.perf_counter()
        for offset in range(0, file_bytes, _DISK_BLOCK_BYTES):
            move(handle, [block], offset)
        if flags & os.O_WRONLY:
            os.fsync(handle)
        return time.perf_counter() - begun
    finally:
        os.close(handle)
