"""What does this operating system lack of what Linux has, and what stands in for it? So that macOS and Windows import.

Linux is where everything is: direct I/O, files without names, page maps. macOS has files as memory, and no direct I/O;
Windows has neither, so there is no disk tier there.
"""

import contextlib
import ctypes
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "CLOSED_IN_CHILDREN",
    "NOT_A_LINK",
    "NO_FILE_MEMORY",
    "NO_NAME",
    "after_fork",
    "available_cores",
    "flush_directory",
    "free_bytes",
    "host_name",
    "libc",
    "lock_directory",
    "lock_file",
    "read_at",
    "read_some",
    "reserve",
    "write_at",
]

# Flags of os.open. O_BINARY is of Windows, where files are text otherwise.
CLOSED_IN_CHILDREN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
NOT_A_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_NAME = getattr(os, "O_TMPFILE", 0)  # 0: files get a name, and lose it at once

NO_FILE_MEMORY = (
    f"files cannot be read as memory on {sys.platform}, so nothing can rest on disk here: leave disk= and checkpoint="
    " out, or use Linux (on Windows: WSL)"
)

_AT_ONCE_BYTES = 8 << 20  # copied, where memory cannot be handed to the system
_seeking = threading.Lock()  # where a file has one position for all threads


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def after_fork(in_child: Callable[[], Any]) -> None:
    """`in_child` is called in each process that is forked from this one; where there is no fork, never."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)


def libc() -> Any:
    """The C library of this process; None where it is none that can be looked into."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows
        return None


def read_some(descriptor: int, nbytes: int, offset: int) -> bytes:
    """`os.pread`."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, nbytes, offset)
    with _at(descriptor, offset):
        return os.read(descriptor, nbytes)


def read_at(descriptor: int, buffers: list[Any], offset: int) -> int:
    """`os.preadv` into one buffer."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    memory = memoryview(buffers[0]).cast("B")
    found = read_some(descriptor, min(memory.nbytes, _AT_ONCE_BYTES), offset)
    memory[: len(found)] = found
    return len(found)


def write_at(descriptor: int, buffers: list[Any], offset: int) -> int:
    """`os.pwritev` of one buffer."""
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, buffers, offset)
    with _at(descriptor, offset):
        return os.write(descriptor, memoryview(buffers[0]).cast("B")[:_AT_ONCE_BYTES])


@contextlib.contextmanager
def _at(descriptor: int, offset: int) -> Iterator[None]:
    """The file's position is there, for the length of a with block."""
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        yield


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """The file has room for these bytes from now on; where that cannot be asked for, it is made that long. OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, nbytes)
    elif os.fstat(descriptor).st_size < offset + nbytes:
        os.ftruncate(descriptor, offset + nbytes)


def free_bytes(place: int | Path) -> int:
    """Bytes that this user can still write on the drive of a directory, or of an open file where that can be asked."""
    if hasattr(os, "statvfs"):
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize
    return shutil.disk_usage(place).free


def host_name() -> str:
    """What tells this host from others with which it shares a filesystem."""
    return socket.gethostname()


def lock_file(descriptor: int) -> None:
    """Locks an open file for this process alone. Raises OSError (EACCES, EAGAIN) when another has it.

    Where there are no such locks, it does nothing.
    """
    if fcntl is not None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_directory(directory: Path) -> int | None:
    """A descriptor that keeps others from locking the directory while it is open; None where there are no such locks.

    Raises BlockingIOError when another process has it.
    """
    if fcntl is None:
        return None
    descriptor = os.open(directory, os.O_RDONLY | CLOSED_IN_CHILDREN)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def flush_directory(directory: Path) -> None:
    """What was renamed in it is safe from a loss of power; on Windows, which opens no directories, sooner or later."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
