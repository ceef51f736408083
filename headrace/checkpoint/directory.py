"""How does a directory appear atomically? It is made under another name, and takes its place when it is complete.

Whatever ends the process, either the old directory or the new one is there, with all that others put into it. What a
killed process left is removed when the next process on its host saves beside it, or looks for the newest checkpoint.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Set
from pathlib import Path

from headrace.checkpoint.manifest import MANIFEST, read_manifest
from headrace.config import check_count, path_of
from headrace.errors import CheckpointError, DiskError
from headrace.runtime.system import flush_directory, host_name, libc, lock_directory

_PREFIX = ".headrace-saving-"
_BEFORE = ".headrace-before-"
_AT_FDCWD, _EXCHANGE = -100, 2
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_NUMBER = re.compile(r"(.*?)(\d+)")


class NewDirectory:
    """A directory that becomes `path` when it is published. Raises DiskError if it cannot be made.

    Makes missing parents.
    """

    def __init__(self, path: Path) -> None:
        self.target = path
        self.path = _other_name(path)
        try:
            _make_parents(path.parent)
            restore_interrupted(path.parent)
            _remove(path.parent / f"{_BEFORE}{path.name}")  # left over from a replacement that was completed
            _remove_stale(path.parent)
            if path.exists() and not _is_replaceable(path):
                raise DiskError(
                    errno.EEXIST,
                    f"{path} is there and is no checkpoint of headrace, so it is not replaced; name another directory",
                )
            self._locks = [_make_locked(self.path)]
        except DiskError:
            raise
        except OSError as error:
            raise DiskError(error.errno, f"{path} cannot be made: {error.strerror}; name another directory") from error

    def publish(self) -> None:
        """Puts the directory in place of `target`. If it raises DiskError, `target` is what it was before."""
        try:
            replaces = self.target.exists()
            if replaces:
                with contextlib.suppress(BlockingIOError):  # a lock of any process keeps it from being taken for stale
                    self._locks.append(lock_directory(self.target))
                _keep_others(self.target, self.path)
            _flush_directories(self.path)
            move: Callable[[Path, Path], None] = exchange if replaces else os.rename
            move(self.path, self.target)
            back = (self.path, self.target) if replaces else (self.target, self.path)
            with contextlib.ExitStack() as undo:
                undo.callback(move, back[0], back[1])
                if replaces:
                    _keep_others(self.path, self.target)  # what others added meanwhile
                flush_directory(self.target.parent)
                undo.pop_all()
        except OSError as error:
            about = f" ({error.filename})" if error.filename else ""
            raise DiskError(
                error.errno, f"{self.target} could not be put in its place: {error.strerror}{about}"
            ) from error
        _delete(self.path)  # what `target` was before
        self._unlock()

    def discard(self) -> None:
        """Removes the directory, unless it was published."""
        made = self._locks[0] if self._locks else None
        with contextlib.suppress(OSError):
            if made is None or os.path.samestat(os.fstat(made), self.path.stat()):
                _delete(self.path)
        self._unlock()

    def _unlock(self) -> None:
        while self._locks:
            descriptor = self._locks.pop()
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


def newest(directory: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint in `directory` with the highest number at the end of its name; None if there is none.

    Also cleans up after a process that was killed while saving: what it left is removed, or restored.
    """
    directory = path_of(directory, "directory").expanduser()
    restore_interrupted(directory)
    _remove_stale(directory)
    found = _numbered(directory)
    return found[-1][2] if found else None


def remove_older(path: Path, keep: int) -> None:
    """Removes checkpoints older than `path`, named like it but for the number, except the `keep` - 1 newest of them."""
    own, stem = _split(path.name)
    try:
        older = [other for number, _, other in _numbered(path.parent, stem) if number < own]
    except OSError as error:
        warnings.warn(f"older checkpoints beside {path} stay: {error.strerror}", RuntimeWarning, stacklevel=2)
        return
    for other in older[: max(0, len(older) - keep + 1)]:
        # Renamed first, safe from a loss of power: half a checkpoint must not look like a whole one.
        going = _other_name(other)
        try:
            if other.is_symlink():
                other.unlink()
                continue
            os.rename(other, going)
            _remove(going)
        except OSError as error:
            warnings.warn(f"the older checkpoint {other} stays: {error.strerror}", RuntimeWarning, stacklevel=2)


def check_keep(path: Path, keep: int) -> None:
    """Raises TypeError if `keep` is no whole number, and ValueError if it is less than 1, or if `path`'s name does not
    end in a number, which tells the older ones.
    """
    check_count(keep, "keep")
    if _NUMBER.fullmatch(path.name) is None:
        raise ValueError(
            f"keep={keep} wants a name that ends in a number, such as {path.name + '-300'!r}, so that older ones are"
            f" known; {path.name!r} does not"
        )


def _split(name: str) -> tuple[int, str]:
    """The number at the end of a name, and what is before it."""
    found = _NUMBER.fullmatch(name)
    return (-1, name) if found is None else (int(found[2]), found[1])


def _numbered(directory: Path, stem: str | None = None) -> list[tuple[int, str, Path]]:
    """The complete checkpoints in `directory` whose names are `stem` (None: anything) and a number, by that number."""
    found = [(*_split(path.name), path) for path in (directory.iterdir() if directory.is_dir() else ())]
    named = [one for one in found if one[0] >= 0 and stem in (None, one[1])]
    ours = [one for one in named if not one[2].name.startswith((_PREFIX, _BEFORE))]
    return sorted(one for one in ours if (one[2] / MANIFEST).is_file())


def _other_name(path: Path) -> Path:
    """A name for a directory that will become `path`, or will be removed. It ends in the host's name.

    Locks of directories hold on one host only, even on a filesystem that hosts share.
    """
    return path.parent / f"{_PREFIX}{path.name}-{secrets.token_hex(4)}@{host_name()}"


def _make_parents(directory: Path) -> None:
    """Makes the directory and its parents, safe from a loss of power."""
    if not directory.is_dir():
        _make_parents(directory.parent)
        directory.mkdir(exist_ok=True)
        flush_directory(directory.parent)


def _flush_directories(directory: Path) -> None:
    """Flushes the directory and those in it, so that the names of all files are safe."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                _flush_directories(directory / entry.name)
    flush_directory(directory)


def _remove(directory: Path) -> None:
    """Deletes a directory that was replaced or moved away, once that is safe from a loss of power."""
    if directory.exists():
        flush_directory(directory.parent)
        _delete(directory)


def _delete(directory: Path) -> None:
    """Deletes a directory as far as possible; the rest stays."""
    with contextlib.suppress(OSError):  # rmtree may raise in spite of `ignore_errors`
        shutil.rmtree(directory, ignore_errors=True)


def _keep_others(before: Path, now: Path) -> None:
    """Links files that others put into the old checkpoint `before` into the new one, `now`."""
    try:
        ours = {MANIFEST, *read_manifest(before).files}
    except CheckpointError:
        ours = set()
    _link_others(before, now, {before / name for name in ours})


def _link_others(before: Path, now: Path, ours: Set[Path]) -> None:
    with os.scandir(before) as entries:
        for entry in entries:
            there, place = before / entry.name, now / entry.name
            if entry.is_dir(follow_symlinks=False):
                is_ours = any(there in path.parents for path in ours)
                if not is_ours and not os.path.lexists(place):
                    place.mkdir()
                    shutil.copystat(there, place)
                if is_ours or place.is_dir():
                    _link_others(there, place, ours)
            elif there not in ours and not os.path.lexists(place):
                place.parent.mkdir(exist_ok=True)
                _link(there, place, is_symlink=entry.is_symlink())


def _link(there: Path, place: Path, *, is_symlink: bool) -> None:
    """Makes `place` the same file as `there`, or a copy if the filesystem has no links."""
    if is_symlink:
        place.symlink_to(os.readlink(there))
        return
    try:
        os.link(there, place)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(there, place)
        with place.open("rb") as file:
            os.fsync(file.fileno())


def _is_replaceable(path: Path) -> bool:
    return path.is_dir() and ((path / MANIFEST).is_file() or not any(path.iterdir()))


def _make_locked(directory: Path) -> int | None:
    while True:
        with contextlib.suppress(FileExistsError):  # not `exist_ok`, which raises if it vanishes at once
            directory.mkdir()
        descriptor = None
        try:
            descriptor = lock_directory(directory)
            if descriptor is None or directory.exists():
                return descriptor
            os.close(descriptor)
        except (FileNotFoundError, BlockingIOError):  # another process takes it for stale
            continue
        except OSError:
            _delete(directory)
            if descriptor is not None:
                os.close(descriptor)
            raise


def _remove_stale(parent: Path) -> None:
    """Removes directories of this host that nobody locks: they were left by processes that ended while saving."""
    for path in parent.glob(f"{_PREFIX}*"):
        if not path.name.endswith(f"@{host_name()}"):
            continue
        try:
            descriptor = lock_directory(path)
        except OSError:
            continue
        if descriptor is None:  # there are no locks here: it may be in use
            continue
        with contextlib.suppress(OSError):
            _remove(path)
        os.close(descriptor)


def exchange(one: Path, other: Path) -> None:
    """Swaps two directories atomically, or else by renaming, where `restore_interrupted` makes up for a crash."""
    rename = getattr(libc(), "renameat2", None)
    if rename is not None:
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(number, os.strerror(number))
    before = other.parent / f"{_BEFORE}{other.name}"
    with contextlib.ExitStack() as undo:
        for source, target in ((other, before), (one, other), (before, one)):
            os.rename(source, target)
            undo.callback(os.rename, target, source)
        undo.pop_all()


def write_whole(path: Path, data: bytes) -> None:
    """Writes a small new file, safe from a loss of power. Raises DiskError."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DiskError(error.errno, f"{path} could not be written: {error.strerror}") from error


def replace_whole(path: Path, data: bytes) -> None:
    """Writes a small file in the place of an older one: whoever reads meanwhile finds that one, or this. Raises
    DiskError. A link stays, and the file that it leads to is replaced.
    """
    path = Path(os.path.realpath(path))
    if os.path.exists(path) and not os.path.isfile(path):  # such as /dev/null, which root could replace
        raise DiskError(errno.EEXIST, f"{path} cannot be written (it is no regular file); name a file that can be")
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            write_whole(new, data)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO)
        raise DiskError(error.errno, f"{path} cannot be written ({why}); name a file that can be") from error


def restore_interrupted(parent: Path) -> None:
    """Restores directories that a crash left under another name, in the middle of a swap by renaming."""
    for path in parent.glob(f"{_BEFORE}*"):
        target = parent / path.name.removeprefix(_BEFORE)
        if not target.exists():
            with contextlib.suppress(OSError):  # another process did it first
                os.rename(path, target)
