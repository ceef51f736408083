"""A process that finds as little of Linux as on another system: what is headrace able to do there?

    python -m tests.units.other_system macos|windows DIRECTORY

PyTorch and what it needs are imported first, because these are Linux's here. What is taken away then is what headrace
may look for: names in `os`, `mmap` and `signal`, modules, functions of libc, /proc, directories that can be opened.
"""

import builtins
import ctypes
import io
import mmap
import os
import pathlib
import shutil
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy  # noqa: F401
import psutil  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch
import tqdm  # noqa: F401
import xxhash  # noqa: F401
from torch import nn

from tests.support.compare import assert_same
from tests.support.loops import random_batches, steps
from tests.support.models import linears, seeded

PACKAGE = str(Path(__file__).parent.parent.parent / "headrace") + os.sep
LINUX_ONLY = {
    "os": [
        "sched_getaffinity",
        "sched_setaffinity",
        "posix_fallocate",
        "posix_fadvise",
        "O_DIRECT",
        "O_TMPFILE",
        "memfd_create",
    ],
    "mmap": ["MADV_HUGEPAGE", "MAP_POPULATE", "MADV_DONTFORK", "MADV_REMOVE"],
}
UNIX_ONLY = {
    "os": [
        *("fork", "register_at_fork", "pread", "pwrite", "preadv", "pwritev", "statvfs", "fstatvfs", "getuid"),
        *("O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "killpg"),
    ],
    "mmap": [name for name in dir(mmap) if name.startswith(("MAP_", "PROT_", "MADV_"))],
    "signal": ["SIGKILL", "SIGUSR1", "SIGHUP", "SIGALRM", "setitimer"],
}
LINUX_CALLS = {"sync_file_range", "renameat2", "numa_available"}


def take_away(system: str) -> None:
    usage = shutil.disk_usage("/")
    shutil.disk_usage = lambda path: usage  # type: ignore[assignment]
    modules = {"os": os, "mmap": mmap, "signal": signal}
    for taken in (LINUX_ONLY, UNIX_ONLY) if system == "windows" else (LINUX_ONLY,):
        for module, names in taken.items():
            for name in names:
                if hasattr(modules[module], name):
                    delattr(modules[module], name)
    if system == "windows":
        sys.modules["resource"] = sys.modules["fcntl"] = None  # type: ignore[assignment]
    sys.platform = {"macos": "darwin", "windows": "win32"}[system]
    _hide_libc(system)
    _hide_files(system)


def _hide_libc(system: str) -> None:
    library = ctypes.CDLL

    class Library(library):  # type: ignore[valid-type, misc]
        def __init__(self, name: Any, *args: Any, **kwargs: Any) -> None:
            if name is None and system == "windows":
                raise TypeError("bad argument type for built-in operation")
            super().__init__(name, *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            if name in LINUX_CALLS:
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Library  # type: ignore[misc]


def _hide_files(system: str) -> None:
    """/proc and /sys from headrace; on Windows no directory can be opened either."""
    opened, text_opened = os.open, builtins.open

    def hidden(path: Any) -> bool:
        caller = sys._getframe(2).f_code.co_filename
        return str(path).startswith(("/proc", "/sys")) and caller.startswith((PACKAGE, pathlib.__file__))

    def open_descriptor(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        if system == "windows" and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, mode, **kwargs)

    def open_file(path: Any, *args: Any, **kwargs: Any) -> Any:
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return text_opened(path, *args, **kwargs)

    os.open = open_descriptor
    builtins.open = io.open = open_file


def main(system: str, directory: Path) -> None:
    plain = seeded(linears, 6, 64, nn.GELU)
    batches = random_batches(3, 8, 64)
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), batches)
    take_away(system)
    warnings.simplefilter("error")

    import headrace
    from headrace.cli.main import main as command

    for activations in (False, {"min_bytes": 0, "all_leave": True}):
        trained = seeded(linears, 6, 64, nn.GELU)
        with headrace.offload(trained, device="cpu", device_memory="40KiB", activations=activations) as handle:
            optimizer = headrace.optim.AdamW(trained.parameters(), lr=1e-2)
            assert_same(steps(trained, optimizer, batches), expected)
            assert handle.stats().onload_bytes > 0
            assert_same(trained.parameters(), plain.parameters())
            headrace.save(directory / "step-3", trained, optimizer)
            handle.report()
    again = seeded(linears, 6, 64, nn.GELU)
    headrace.load(directory / "step-3", again, headrace.optim.AdamW(again.parameters(), lr=1e-2))
    assert_same(again.parameters(), plain.parameters())
    assert headrace.checkpoint.newest(directory) == directory / "step-3"
    assert command(["doctor", "--device", "cpu", "--disk", str(directory)]) in (0, 1)

    if system == "windows":
        with pytest.raises(headrace.DiskError, match="files cannot be read as memory on win32"):
            headrace.offload(
                seeded(linears, 6, 64, nn.GELU),
                device="cpu",
                device_memory="40KiB",
                host_memory="128KiB",
                disk=directory / "d",
            )
        return
    trained = seeded(linears, 6, 64, nn.GELU)
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        with headrace.offload(
            trained, device="cpu", device_memory="40KiB", host_memory="128KiB", disk=directory / "disk"
        ) as handle:
            optimizer = headrace.optim.AdamW(trained.parameters(), lr=1e-2)
            assert_same(steps(trained, optimizer, batches), expected)
            assert handle.stats().disk_bytes > 0
            assert handle.stats().fetch_bytes > 0
            assert_same(trained.parameters(), plain.parameters())
    (note,) = (str(each.message) for each in notes)
    assert "darwin has no direct I/O: reads and writes go through the page cache" in note


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("as on Linux")
