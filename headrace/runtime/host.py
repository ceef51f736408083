"""How much RAM may this process use? The least of what the machine and each cgroup of the process have left."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")
_CGROUPS, _OWN_CGROUPS = "sys/fs/cgroup", "proc/self/cgroup"
_RESERVE = 0.15  # of available memory
_NO_LIMIT_BYTES = 2**60  # version 1 says "no limit" with a huge number


def available_host_bytes() -> int:
    """Bytes of RAM that can still be taken: the machine's available memory, capped by the cgroup's limit."""
    left = (limit - used for limit, used in _limits(_ROOT))
    return min([int(psutil.virtual_memory().available), *(max(0, nbytes) for nbytes in left)])


def spare_host_bytes() -> int:
    """Bytes of RAM to take where no limit is given: what is available, less a share for the rest of the process."""
    return int(available_host_bytes() * (1 - _RESERVE))


def total_host_bytes() -> int:
    """Bytes of RAM of the machine."""
    return int(psutil.virtual_memory().total)


def container_limit_bytes(root: Path = _ROOT) -> int | None:
    """The lowest limit of this process's cgroup and of those above it; None if none has a limit."""
    return min((limit for limit, _used in _limits(root)), default=None)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Each limit of this process's cgroup and those above it (versions 2 and 1), with the bytes that count to it."""
    groups = root / _CGROUPS
    for group in _own_groups(root, "", groups):
        yield from _limit(group / "memory.max", group / "memory.current", "inactive_file")
    for group in _own_groups(root, "memory", groups / "memory") or [groups / "memory"]:
        limit, used = group / "memory.limit_in_bytes", group / "memory.usage_in_bytes"
        yield from _limit(limit, used, "total_inactive_file")


def _own_groups(root: Path, controller: str, mounted: Path) -> list[Path]:
    """The directories of this process's cgroup and of those above it, for a version 1 controller ("": version 2)."""
    for line in _text(root / _OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = mounted / path.lstrip("/")
            return [group for group in (own, *own.parents) if group.is_relative_to(mounted)]
    return []


def _limit(limit_file: Path, used_file: Path, cached: str) -> Iterator[tuple[int, int]]:
    """A limit and the bytes that count to it, without inactive files in the page cache: these make room when asked."""
    limit, used = _number(limit_file), _number(used_file)
    if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
        return
    counts = dict(line.split(" ", 1) for line in _text(used_file.parent / "memory.stat").splitlines() if " " in line)
    yield limit, max(0, used - int(counts.get(cached, 0)))


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None when there is no file or it says "max"."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
