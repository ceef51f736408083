"""What does this operating system lack that Linux has, and what replaces it, so that macOS and Windows can import this?

Linux has all that is needed: direct I/O, files without names, page maps. macOS can map files as memory, but has no
direct I/O. Windows has neither, so there is no disk tier there.
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


# Flags of os.open. O_BINARY is for Windows, which opens files as text otherwise.
CLOSED_IN_CHILDREN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
NOT_A_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_NAME = getattr(os, "O_TMPFILE", 0)  # 0: files get a name, which is removed at once

NO_FILE_MEMORY = (
    f"files cannot be read as memory on {sys.platform}, so nothing can rest on disk here: leave disk= and checkpoint="
    " out, or use Linux (on Windows: WSL)"
)

_AT_ONCE_BYTES = 8 << 20  # read or written by one call, where the bytes pass through a Python object
_seeking = threading.Lock()  # for systems whose calls use a file's one position


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def after_fork(in_child: Callable[[], Any], **hooks: Callable[[], Any]) -> None:
    """Has `in_child` called in each process that is forked from this one. Does nothing on systems without fork.

    `hooks`: `before` is called in this process before it forks, `in_parent` after that.
    """
    if hasattr(os, "register_at_fork"):
        names = {"before": "before", "in_parent": "after_in_parent"}
        os.register_at_fork(after_in_child=in_child, **{names[name]: hook for name, hook in hooks.items()})


def libc() -> Any:
    """The C library of this process; None on Windows, where its functions cannot be looked up."""
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows
        return None


def read_some(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Reads as `os.pread` does."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, nbytes, offset)
    with _at(descriptor, offset):
        return os.read(descriptor, nbytes)


def read_at(descriptor: int, buffers: list[Any], offset: int) -> int:
    """Reads as `os.preadv` does, into one buffer on systems that lack it."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    memory = memoryview(buffers[0]).cast("B")
    found = read_some(descriptor, min(memory.nbytes, _AT_ONCE_BYTES), offset)
    memory[: len(found)] = found
    return len(found)


def write_at(descriptor: int, buffers: list[Any], offset: int) -> int:
    """Writes as `os.pwritev` does, from one buffer on systems that lack it."""
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, buffers, offset)
    with _at(descriptor, offset):
        return os.write(descriptor, memoryview(buffers[0]).cast("B")[:_AT_ONCE_BYTES])


@contextlib.contextmanager
def _at(descriptor: int, offset: int) -> Iterator[None]:
    """Within this context, the file's position is `offset`, and no other thread moves it."""
    with _seeking:
        os.lseek(descriptor, offset, os.SEEK_SET)
        yield


def reserve(descriptor: int, offset: int, nbytes: int) -> None:
    """Reserves room on the drive for these bytes of a file; where that is impossible, extends it. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, nbytes)
    elif os.fstat(descriptor).st_size < offset + nbytes:
        os.ftruncate(descriptor, offset + nbytes)


def free_bytes(place: int | Path) -> int:
    """Bytes that this user can still write on the drive of a directory, or of an open file (not on Windows)."""
    if hasattr(os, "statvfs"):
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize
    return shutil.disk_usage(place).free


def host_name() -> str:
    """The name that tells this host from others that share a filesystem with it."""
    return socket.gethostname()


def lock_file(descriptor: int) -> None:
    """Locks an open file for this process alone. Raises OSError (EACCES, EAGAIN) when another process has locked it.

    Does nothing on systems without such locks.
    """
    if fcntl is not None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def lock_directory(directory: Path) -> int | None:
    """Locks a directory. Returns the descriptor that holds the lock while it is open; None on systems without locks.

    Raises BlockingIOError when another process has locked it.
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
    """Makes renames in the directory safe from a loss of power. Does nothing on Windows, which cannot open one."""
    if sys.platform == "win32":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
