"""How does a directory come into being at one stroke? Under another name, which is exchanged when all is in it.

Whatever ends the process, there is the directory of before or the new one. What a process left that was killed goes
when the next one saves beside it, or looks for the newest.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path

from headrace.checkpoint.manifest import MANIFEST, read_manifest
from headrace.errors import CheckpointError, DiskError
from headrace.runtime.system import flush_directory, libc, lock_directory

__all__ = ["NewDirectory", "check_keep", "newest", "remove_older", "restore_interrupted", "write_whole"]

_PREFIX = ".headrace-saving-"
_BEFORE = ".headrace-before-"
_AT_FDCWD, _EXCHANGE = -100, 2
_NUMBER = re.compile(r"(.*?)(\d+)")


class NewDirectory:
    """A directory that becomes `path` when it is published. Raises DiskError when it cannot be made.

    Missing parents are made.
    """

    def __init__(self, path: Path) -> None:
        self.target = path
        self.path = path.parent / f"{_PREFIX}{path.name}-{secrets.token_hex(4)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            restore_interrupted(path.parent)
            shutil.rmtree(path.parent / f"{_BEFORE}{path.name}", ignore_errors=True)  # `path` has been replaced
            _remove_stale(path.parent)
            if path.exists() and not _is_replaceable(path):
                raise DiskError(
                    errno.EEXIST,
                    f"{path} is there and is no checkpoint of headrace, so it is not replaced; name another directory",
                )
            self._lock: int | None = _make_locked(self.path)
        except DiskError:
            raise
        except OSError as error:
            raise DiskError(error.errno, f"{path} cannot be made: {error.strerror}; name another directory") from error

    def publish(self) -> None:
        """It is `target` from now on. Raises DiskError."""
        try:
            flush_directory(self.path)
            if self.target.exists():
                _exchange(self.path, self.target)
                _keep_others(self.path, self.target)
            else:
                os.rename(self.path, self.target)
            flush_directory(self.target.parent)
        except OSError as error:
            raise DiskError(error.errno, f"{self.target} could not be put in its place: {error.strerror}") from error
        self.discard()

    def discard(self) -> None:
        """What is left under the other name goes: all of it, or after `publish` what `target` was before."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint in `directory` with the highest number at the end of its name; None when there is none.

    What a process that was killed while it saved has left there is put in order: it goes, or is whole again.
    """
    directory = Path(directory).expanduser()
    restore_interrupted(directory)
    _remove_stale(directory)
    found = [path for path in _numbered(directory) if (path / MANIFEST).is_file()]
    return max(found, key=lambda path: _split(path.name)[1], default=None)


def remove_older(path: Path, keep: int) -> None:
    """Of the checkpoints beside `path`, named alike but for the number at the end, the `keep` newest stay."""
    stem, own = _split(path.name)
    older = [
        other
        for other in _numbered(path.parent)
        if _split(other.name)[0] == stem and _split(other.name)[1] < own and (other / MANIFEST).is_file()
    ]
    older.sort(key=lambda other: _split(other.name)[1])
    for other in older[: max(0, len(older) - keep + 1)]:
        # Renamed first: half a checkpoint must not look like one.
        going = other.parent / f"{_PREFIX}{other.name}-{secrets.token_hex(4)}"
        try:
            if other.is_symlink():
                other.unlink()
                continue
            os.rename(other, going)
        except OSError as error:
            warnings.warn(f"the older checkpoint {other} stays: {error.strerror}", RuntimeWarning, stacklevel=2)
            continue
        shutil.rmtree(going, ignore_errors=True)


def check_keep(path: Path, keep: int) -> None:
    """Raises ValueError when `keep` older checkpoints cannot be told by their names."""
    if keep < 1:
        raise ValueError(f"keep is {keep}; give 1 or more")
    if _NUMBER.fullmatch(path.name) is None:
        raise ValueError(
            f"keep={keep} wants a name that ends in a number, such as {path.name + '-300'!r}, so that older ones are"
            f" known; {path.name!r} does not"
        )


def _split(name: str) -> tuple[str, int]:
    """A name without the number at its end, and the number."""
    found = _NUMBER.fullmatch(name)
    return (name, -1) if found is None else (found[1], int(found[2]))


def _numbered(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [
        path
        for path in directory.iterdir()
        if _NUMBER.fullmatch(path.name) and not path.name.startswith((_PREFIX, _BEFORE)) and path.is_dir()
    ]


def _keep_others(before: Path, now: Path) -> None:
    """What others put beside the files of a checkpoint that was replaced stays there."""
    try:
        ours = {MANIFEST, *read_manifest(before).files}
    except CheckpointError:
        ours = set()
    for entry in before.iterdir():
        if entry.name not in {name.split("/")[0] for name in ours} and not (now / entry.name).exists():
            os.rename(entry, now / entry.name)


def _is_replaceable(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir()))


def _make_locked(directory: Path) -> int | None:
    while True:
        directory.mkdir(exist_ok=True)
        try:
            descriptor = lock_directory(directory)
        except (FileNotFoundError, BlockingIOError):  # another process takes it for a stale one
            continue
        if descriptor is None or directory.exists():
            return descriptor
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    """Directories that nobody has locked any more were left by processes that ended while they saved."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = lock_directory(path)
        except OSError:
            continue
        if descriptor is None:  # it may be in use: nobody can tell
            continue
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the two have changed places; False where the system or the filesystem has no such call."""
    rename = getattr(libc(), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number))


def _exchange(one: Path, other: Path) -> None:
    """Swaps two directories at one stroke. Where the filesystem cannot, `restore_interrupted` makes up for a crash."""
    if _exchanged(one, other):
        return
    before = other.parent / f"{_BEFORE}{other.name}"
    os.rename(other, before)
    os.rename(one, other)
    os.rename(before, one)


def write_whole(path: Path, data: bytes) -> None:
    """A small file, safe from a loss of power. Raises DiskError."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DiskError(error.errno, f"{path} could not be written: {error.strerror}") from error


def restore_interrupted(parent: Path) -> None:
    """What a crash left under another name, while it was being replaced without an exchange, is there again."""
    for path in parent.glob(f"{_BEFORE}*"):
        target = parent / path.name.removeprefix(_BEFORE)
        if not target.exists():
            with contextlib.suppress(OSError):  # another process did it first
                os.rename(path, target)
