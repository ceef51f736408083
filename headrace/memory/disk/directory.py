"""Who uses the directory of a disk store, and what is in it? One store at a time, or any number; files without names.

A spill file loses its name as soon as it is open, or never gets one (O_TMPFILE). The kernel frees its bytes when the
process ends, however it ends. So there is nothing to clean up at exit, and no signal to catch.
"""

import errno
import os
import secrets
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil

from headrace.config import format_bytes
from headrace.errors import DiskError, StateError
from headrace.runtime.system import (
    CLOSED_IN_CHILDREN,
    NO_FILE_MEMORY,
    NO_NAME,
    NOT_A_LINK,
    after_fork,
    free_bytes,
    libc,
    lock_file,
    read_some,
    write_at,
)

_LOCK_NAME = ".headrace-lock"
_FILE_PREFIX = ".headrace-file-"  # of files that have a name only for a moment
IN_RAM = ("tmpfs", "ramfs")  # kinds of filesystems whose files are host memory
_lock = threading.RLock()  # a finalizer may run while this thread holds it
_held: set[tuple[int, int]] = set()  # device and inode of the directories in use: file locks are per process


def filesystem_of(directory: Path) -> str:
    """The kind of filesystem that `directory` is on, such as "ext4"; "" if the system does not tell."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    place = directory.resolve()
    return next((mounts[p] for p in (place, *place.parents) if p in mounts), "")


class StoreDirectory:
    """A directory for the files of a store. If it is missing, it is made, for its owner only.

    With `alone`, no other store that wants to be alone uses it until `close`; others may, at the same time.

    Raises ValueError if `path` is no directory, StateError if another store or process uses it, DiskError if no file
    can be made in it.
    """

    def __init__(self, path: str | os.PathLike[str], *, alone: bool = True) -> None:
        if libc() is None:
            raise DiskError(errno.ENOSYS, NO_FILE_MEMORY)
        self.path = Path(path).expanduser().resolve()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._identity = _identity(self.path)
            if not alone:
                self._descriptor = os.open(self.path, os.O_RDONLY | CLOSED_IN_CHILDREN)
        except FileExistsError as error:
            raise ValueError(f"disk={str(self.path)!r} is a file; give a directory") from error
        except OSError as error:
            raise self._unusable(error) from error
        self._closer: Callable[[], object]
        if not alone:
            self._closer = weakref.finalize(self, os.close, self._descriptor)
            return
        with _lock:
            if self._identity in _held:
                raise StateError(
                    f"another disk store of this process uses {self.path}; give each its own directory, such as"
                    f" {self.path / 'other'}, or close the other one"
                )
            self._descriptor = self._acquire()
            _held.add(self._identity)
        self._closer = weakref.finalize(
            self, _release, self._descriptor, self.path / _LOCK_NAME, self._identity, os.getpid()
        )
        for stale in self.path.glob(f"{_FILE_PREFIX}*"):  # left by processes that died
            if not stale.is_dir():
                stale.unlink(missing_ok=True)

    @property
    def in_ram(self) -> bool:
        """Whether the filesystem keeps its files in RAM."""
        return filesystem_of(self.path) in IN_RAM

    def free_bytes(self) -> int:
        """Bytes that this user can still write in this directory."""
        return free_bytes(self._descriptor)  # works also if the directory has vanished

    def check_free(self, nbytes: int, what: str) -> None:
        """Raises DiskError (ENOSPC) when `nbytes` more do not fit on that disk."""
        free = self.free_bytes()
        if nbytes > free:
            raise DiskError(
                errno.ENOSPC,
                f"{what} needs {format_bytes(nbytes, at_least=True)} of disk, but {self.path} has"
                f" {format_bytes(free)} free; free some, or give a directory on a larger disk",
            )

    def create_file(self) -> int:
        """A descriptor of a new file without a name, readable and writable by its owner only."""
        try:
            if NO_NAME:
                return os.open(self.path, NO_NAME | os.O_RDWR | CLOSED_IN_CHILDREN, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise self._unusable(error) from error
        path = self.path / f"{_FILE_PREFIX}{secrets.token_hex(8)}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | NOT_A_LINK | os.O_RDWR | CLOSED_IN_CHILDREN, 0o600)
            path.unlink(missing_ok=True)  # another store may have removed it
        except OSError as error:
            raise self._unusable(error) from error
        return descriptor

    def close(self) -> None:
        """Lets others use the directory. May be called twice."""
        self._closer()

    def _acquire(self) -> int:
        """A descriptor that holds the lock."""
        path = self.path / _LOCK_NAME
        while True:
            try:
                descriptor = os.open(path, os.O_CREAT | NOT_A_LINK | os.O_RDWR | CLOSED_IN_CHILDREN, 0o600)
            except OSError as error:
                raise self._unusable(error) from error
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:  # its bytes could be those of another file
                os.close(descriptor)
                raise self._unusable(OSError(errno.EEXIST, f"{_LOCK_NAME} in it is no file of headrace"))
            try:
                lock_file(descriptor)
                if _identity(path) == _identity(descriptor):  # else its owner removed it after we had opened it
                    os.ftruncate(descriptor, 0)
                    write_at(descriptor, [f"{os.getpid()}\n".encode()], 0)
                    return descriptor
            except FileNotFoundError:
                pass
            except OSError as error:
                owner = read_some(descriptor, 20, 0).decode(errors="replace").strip()
                os.close(descriptor)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise self._unusable(error) from error
                raise StateError(
                    f"process {owner or 'unknown'} uses {self.path} as its disk tier; wait for its end, or give a"
                    f" directory of your own, such as {self.path / 'other'}"
                ) from error
            os.close(descriptor)

    def _unusable(self, error: OSError) -> DiskError:
        return DiskError(
            error.errno,
            f"{self.path} cannot be used as disk tier: {error.strerror}. Give a directory, on a local disk, in which"
            " this user can make files.",
        )


def _forked() -> None:
    """Called in a forked child: the lock may be held by a thread that the child does not have."""
    global _lock
    _lock = threading.RLock()


after_fork(_forked)


def _identity(path: Path | int) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _release(descriptor: int, path: Path, identity: tuple[int, int], owner: int) -> None:
    """Removes the lock file, if it is still ours, and then releases the lock.

    A forked child only closes its descriptor.
    """
    with _lock:
        try:
            if os.getpid() == owner and _identity(path) == _identity(descriptor):
                path.unlink()
        except OSError:  # the directory is gone or read-only by now; the lock is released all the same
            pass
        os.close(descriptor)
        _held.discard(identity)
