"""How much RAM may this process use? What the machine and every cgroup above the process leave, whichever is less."""

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["available_host_bytes"]

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Bytes of RAM that can still be taken: the machine's available memory, capped by the cgroup's limit."""
    return min([int(psutil.virtual_memory().available), *_cgroup_remainders()])


def _cgroup_remainders() -> Iterator[int]:
    """Bytes left under each limit that applies: version 2 (this group and its parents), then version 1."""
    for directory in _own_cgroups():
        limit, used = _read(directory / "memory.max"), _read(directory / "memory.current")
        if limit is not None and used is not None:
            yield max(0, limit - used)
    limit = _read(_CGROUP_ROOT / "memory/memory.limit_in_bytes")
    used = _read(_CGROUP_ROOT / "memory/memory.usage_in_bytes")
    if limit is not None and used is not None and limit < 2**60:  # version 1 says "no limit" with a huge number
        yield max(0, limit - used)


def _own_cgroups() -> Iterator[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            own = _CGROUP_ROOT / path.lstrip("/")
            yield from (group for group in (own, *own.parents) if group.is_relative_to(_CGROUP_ROOT))


def _read(path: Path) -> int | None:
    """The number in a cgroup file; None when there is no file or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
