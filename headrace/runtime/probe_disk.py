"""How fast is the disk under a directory? Large blocks are written and read, past the page cache where it allows it."""

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.runtime.system import free_bytes, read_at, write_at

__all__ = ["DiskRates", "disk_rates"]

_BLOCK_BYTES = 8 * 2**20
_FILE_BYTES = 512 * 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, kw_only=True)
class DiskRates:
    """Bytes per second of a disk. `direct`: whether the page cache was bypassed; `notes`: what looks wrong."""

    read: float
    write: float
    direct: bool
    free_bytes: int
    notes: tuple[str, ...]


def disk_rates(directory: Path, *, file_bytes: int = _FILE_BYTES) -> DiskRates:
    """Writes and reads one file of `file_bytes` in `directory`, and removes it.

    Raises OSError when nothing can be written there.
    """
    free = free_bytes(directory)
    file_bytes = min(file_bytes, free // 4) // _BLOCK_BYTES * _BLOCK_BYTES
    if file_bytes == 0:
        raise OSError(f"{directory} has {free:,} bytes left, too few to measure it; make room or name another")
    block = mmap.mmap(-1, _BLOCK_BYTES)  # whole pages, which direct access requires
    block.write(os.urandom(_BLOCK_BYTES))  # so that a drive that compresses does not look fast
    handle, name = tempfile.mkstemp(prefix="headrace-probe-", dir=directory)
    os.close(handle)
    try:
        direct = _opens(name, os.O_RDWR | _DIRECT)
        flags = _DIRECT if direct else 0
        write = file_bytes / _seconds(name, os.O_WRONLY | flags, write_at, block, file_bytes)
        if not flags and hasattr(os, "posix_fadvise"):
            with open(name, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read = file_bytes / _seconds(name, os.O_RDONLY | flags, read_at, block, file_bytes)
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


def _seconds(name: str, flags: int, move: Callable[..., int], block: mmap.mmap, file_bytes: int) -> float:
    handle = os.open(name, flags)
    try:
        begun = time.perf_counter()
        for offset in range(0, file_bytes, _BLOCK_BYTES):
            move(handle, [block], offset)
        if flags & os.O_WRONLY:
            os.fsync(handle)
        return time.perf_counter() - begun
    finally:
        os.close(handle)
