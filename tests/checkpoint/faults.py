"""What may happen at each system call of a save or a load? It fails, the process is killed, or the power is lost."""

import ctypes
import errno
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import headrace
from headrace.checkpoint import directory
from headrace.runtime.system import libc
from tests.checkpoint.runs import Run, run
from tests.support.compare import assert_same

EVERY = int(
    os.environ.get("EVERY_CALL", "3")
)  # EVERY_CALL=1 pytest -m extended tests/checkpoint strikes at all of them

_CALLS = [
    (os, name)
    for name in (
        *("open", "close", "mkdir", "rmdir", "rename", "link", "symlink", "unlink", "scandir", "listdir"),
        *("stat", "lstat", "fstat", "fsync", "pwritev", "pread", "preadv", "posix_fallocate", "utime", "chmod"),
    )
] + [(io, "open"), (fcntl, "flock")]


@contextmanager
def at_each_call(happens: Callable[[str], None], *, exchanges: bool = True) -> Iterator[None]:
    """`happens` is told each system call before it is made; what it raises is how the call fails.

    `exchanges`: whether directories can change places at one stroke.
    """

    within = threading.local()  # calls that `happens` makes are not told
    one_at_a_time = threading.Lock()

    def told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            if getattr(within, "a_call", False):
                return call(*arguments, **named)
            within.a_call = True
            try:
                with one_at_a_time:
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
    """Something happens at call `number`, from 0, or, if `on`, at it and all later ones. Only calls named `of` count;
    None: all do, those of other threads too, whose number may differ from one save to the next.
    """

    def __init__(self, number: int, what: Callable[[], None], *, on: bool = False, of: str | None = None) -> None:
        self._number, self._what, self._on, self._of = number, what, on, of
        self.calls: list[str] = []

    @property
    def happened(self) -> bool:
        return len(self.calls) > self._number

    def __call__(self, name: str) -> None:
        if self._of not in (None, name):
            return
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


KINDS: dict[str, dict[str, Any]] = {  # of optimizers
    "AdamW": {},
    "amsgrad": {"amsgrad": True},
    "8bit": {"state_dtype": "8bit"},
    "split": {"dtype": torch.bfloat16},
    "full": {"dtype": torch.bfloat16, "master_form": "full"},
    "SGD": {"optimizer": "SGD", "momentum": 0.9},
    "Lion": {"optimizer": "Lion"},
    "Adafactor": {"optimizer": "Adafactor"},
    "Muon": {"optimizer": "Muon"},
}


class Saved:
    """A run that has saved its first step under `directory`, and has taken another. Each is the same as all others."""

    def __init__(self, kind: str, place: str) -> None:
        self.kind, self.place = kind, place
        self.values: list[list[torch.Tensor]] = []  # saved first, and next

    @contextmanager
    def begun(self, directory: Path) -> Iterator[Run]:
        with run(self.place, directory / "tiers", **KINDS[self.kind]) as one:
            one.step()
            headrace.save(directory / "runs" / "step-1", one.model, one.optimizer)
            first = one.values()
            one.step()
            self.values = self.values or [first, one.values()]
            yield one

    def save(self, one: Run, directory: Path, *, wait: bool) -> bool:
        """Saves the second step, in the place of the first or beside steps. Whether that went well."""
        number = 1 if wait else 2
        try:
            saving = headrace.save(directory / "runs" / f"step-{number}", one.model, one.optimizer, keep=1, wait=wait)
        except Exception:
            return False
        if not wait:
            with suppress(Exception):  # its own reads and writes may be what fails
                one.step()
        try:
            saving.wait()
        except Exception:
            return False
        return True

    def holds(self, directory: Path) -> int:
        """Which values the newest checkpoint there has: 0 for the first, 1 for the next."""
        newest = headrace.checkpoint.newest(directory / "runs")
        assert newest is not None
        with run("device", directory / "other", seed=1, **KINDS[self.kind]) as again:
            headrace.load(newest, again.model, again.optimizer)
            found = again.values()
        return next(n for n in (1, 0) if all(map(torch.equal, self.values[n], found)))

    def load(self, one: Run, directory: Path) -> bool:
        """Loads the first step. Whether that went well; else the run is as it was, or says that it is not."""
        try:
            headrace.load(directory / "runs" / "step-1", one.model, one.optimizer)
        except Exception:
            return False
        return True

    def is_loaded(self, one: Run, directory: Path, *, well: bool) -> None:
        """After a `load` that went `well`, or not; which is repeated then."""
        if not well:
            try:
                is_whole = all(map(torch.equal, one.values(), self.values[1]))
            except headrace.HeadraceError:
                is_whole = False
            if not is_whole:
                with pytest.raises(headrace.StateError):
                    one.step()
                one.optimizer.zero_grad()  # it may have come to the optimizer's step, which is what is refused then
            try:
                headrace.load(directory / "runs" / "step-1", one.model, one.optimizer)
            except headrace.DiskError:  # of a drive that took none of the weights: it is not written to again
                assert self.place == "disk"
                return
        assert_same(one.values(), self.values[0])
        one.step()
        assert_same(one.values(), self.values[1])
