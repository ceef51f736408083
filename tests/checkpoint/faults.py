"""What may happen at each system call of a save? It fails, or the process is killed, or the power is lost."""

import ctypes
import errno
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import headrace
from headrace.checkpoint import directory
from headrace.runtime.system import libc

EVERY = int(
    os.environ.get("EVERY_CALL", "3")
)  # EVERY_CALL=1 pytest -m extended tests/checkpoint strikes at all of them

_CALLS = [
    (os, name)
    for name in (
        *("open", "close", "mkdir", "rmdir", "rename", "link", "symlink", "unlink", "scandir", "listdir"),
        *("stat", "lstat", "fstat", "fsync", "pwritev", "posix_fallocate", "utime", "chmod"),
    )
] + [(io, "open"), (fcntl, "flock")]


@contextmanager
def at_each_call(happens: Callable[[str], None], *, exchanges: bool = True) -> Iterator[None]:
    """`happens` is told each system call before it is made; what it raises is how the call fails.

    `exchanges`: whether directories can change places at one stroke.
    """

    within = threading.local()  # calls that `happens` makes are not told

    def told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            if getattr(within, "a_call", False):
                return call(*arguments, **named)
            within.a_call = True
            try:
                happens(name)
                return call(*arguments, **named)
            except OSError:
                if name == "close":
                    call(*arguments)  # as Linux does it
                raise
            finally:
                within.a_call = False

        return made

    def renameat2(*arguments: Any) -> int:
        try:
            happens("renameat2")
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1
        found: int = libc().renameat2(*arguments)
        return found

    library = mock.Mock(renameat2=renameat2) if exchanges else None
    patches = [mock.patch.object(module, name, told(name, getattr(module, name))) for module, name in _CALLS]
    patches.append(mock.patch.object(directory, "libc", return_value=library))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


class Nth:
    """Something happens at the n-th call, or, if `on`, at it and all later ones."""

    def __init__(self, number: int, what: Callable[[], None], *, on: bool = False) -> None:
        self._number, self._what, self._on = number, what, on
        self.calls: list[str] = []

    @property
    def happened(self) -> bool:
        return len(self.calls) > self._number

    def __call__(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self._number + 1 or (self._on and self.happened):
            self._what()


def fails() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def is_killed() -> None:
    os.kill(os.getpid(), 9)


class Flushed:
    """What of a directory is on the drive for certain: what was flushed, of files and of directories' names."""

    def __init__(self, root: Path) -> None:
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}  # by inode; of directories
        self._bytes: dict[int, bytes] = {}  # of files
        self._links: dict[int, str] = {}
        self._held: list[int] = []  # so that no inode's number is used again
        self._root = root.stat().st_ino
        self._fsync = os.fsync
        for path in (root, *root.rglob("*")):
            self._take(path)

    def _take(self, path: Path) -> None:
        self._held.append(os.open(path, os.O_PATH | os.O_NOFOLLOW))
        number = path.lstat().st_ino
        if path.is_symlink():
            self._links[number] = os.readlink(path)
        elif path.is_dir():
            self._names[number] = {
                entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in os.scandir(path)
            }
            for entry in path.iterdir():
                if entry.is_symlink():  # has no bytes to flush
                    self._take(entry)
        else:
            self._bytes[number] = path.read_bytes()

    def fsync(self, descriptor: int) -> None:
        """Stands in the place of `os.fsync`."""
        self._fsync(descriptor)
        self._take(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def restore(self, into: Path, *, removed: frozenset[int] = frozenset()) -> None:
        """Writes what is left after a loss of power; `removed`: inodes whose removal had come to the drive."""
        self._restore(self._root, into, removed)

    def gone(self) -> frozenset[int]:
        """Inodes that no name leads to any more."""
        found = [os.fstat(descriptor) for descriptor in self._held]
        return frozenset(one.st_ino for one in found if not one.st_nlink)

    def _restore(self, number: int, directory: Path, removed: frozenset[int]) -> None:
        directory.mkdir()
        for name, (inode, is_directory) in self._names.get(number, {}).items():
            if inode in removed:
                continue
            if is_directory:
                self._restore(inode, directory / name, removed)
            elif inode in self._links:
                (directory / name).symlink_to(self._links[inode])
            else:
                (directory / name).write_bytes(self._bytes.get(inode, b""))

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)


class Watched:
    """A checkpoint that is replaced by another, and what others put into it and beside it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "runs" / "step-2"
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 8)
        headrace.save(self.path, self.model)
        (self.path / "tokenizer.json").write_text("{}")
        (self.path / "link").symlink_to("tokenizer.json")
        (self.path / "logs" / "deep").mkdir(parents=True)
        (self.path / "logs" / "deep" / "log.txt").write_text("years of work")
        (self.path / "empty").mkdir()
        self.others = self.found(directory)
        self.weights = [[p.detach().clone() for p in self.model.parameters()]]
        with torch.no_grad():
            self.model.weight.add_(1)
        self.weights.append([p.detach().clone() for p in self.model.parameters()])

    def found(self, directory: Path) -> dict[str, str]:
        """What others put there."""
        root = directory / "runs" / "step-2"
        names = ("tokenizer.json", "link", "logs/deep/log.txt", "empty")
        return {name: (root / name).read_text() if (root / name).is_file() else "" for name in names}

    def holds(self, directory: Path) -> int:
        """Which weights the newest checkpoint there has: 0 for those of before, 1 for those that are saved."""
        newest = headrace.checkpoint.newest(directory / "runs")
        assert newest == directory / "runs" / "step-2"
        assert self.found(directory) == self.others
        assert (newest / "link").is_symlink()
        assert (newest / "empty").is_dir()
        again = torch.nn.Linear(8, 8)
        headrace.load(newest, again)
        return next(n for n in (0, 1) if all(map(torch.equal, self.weights[n], again.parameters())))
