"""How much RAM may this process use? What the machine and every cgroup above the process leave, whichever is less."""

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["available_host_bytes"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 2**60  # version 1 says "no limit" with a huge number


def available_host_bytes() -> int:
    """Bytes of RAM that can still be taken: the machine's available memory, capped by the cgroup's limit."""
    return min([int(psutil.virtual_memory().available), *_cgroup_remainders()])


def _cgroup_remainders() -> Iterator[int]:
    """Bytes left under each limit that applies: of this process's group and the groups above, version 2 and 1."""
    root = _CGROUP_ROOT / "memory"
    for group in _own_groups("", _CGROUP_ROOT):
        yield from _remainder(group / "memory.max", group / "memory.current", "inactive_file")
    for group in _own_groups("memory", root) or [root]:
        limit, used = group / "memory.limit_in_bytes", group / "memory.usage_in_bytes"
        yield from _remainder(limit, used, "total_inactive_file")


def _own_groups(controller: str, root: Path) -> list[Path]:
    """The directories of this process's group and of those above, for a version 1 controller; "" is version 2."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = root / path.lstrip("/")
            return [group for group in (own, *own.parents) if group.is_relative_to(root)]
    return []


def _remainder(limit_file: Path, used_file: Path, cached: str) -> Iterator[int]:
    """Limit less use, where there is a limit. Files in the page cache that nobody uses make room when asked."""
    limit, used = _number(limit_file), _number(used_file)
    if limit is None or used is None or limit >= _NO_LIMIT_BYTES:
        return
    counts = dict(line.split(" ", 1) for line in _text(used_file.parent / "memory.stat").splitlines() if " " in line)
    yield max(0, limit - max(0, used - int(counts.get(cached, 0))))


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None when there is no file or it says "max"."""
    text = _text(path)
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
