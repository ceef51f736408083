"""Do runs on the host work on macOS and Windows, as far as Linux can tell? With what stands in for missing calls?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.memory.disk import DirectFile
from headrace.runtime import system
from headrace.runtime.device import resolve_device

ROOT = Path(__file__).parents[2]


@pytest.mark.extended
@pytest.mark.timeout(600)  # most of it imports, on a machine that may be busy
@pytest.mark.parametrize("name", ["macos", "windows"])
def test_a_model_trains_is_saved_and_loaded_without_what_linux_alone_has(name: str, tmp_path: Path) -> None:
    """Memory tier, activations, optimizer, checkpoints, doctor; on macOS the disk tier too, with one note."""
    run = subprocess.run(
        [sys.executable, ROOT / "tests/units/other_system.py", name, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.endswith("as on Linux\n")


def test_on_a_mac_the_cpu_computes_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is moved to MPS frees nothing: it is the same memory."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert resolve_device(None) == torch.device("cpu")
    assert resolve_device("mps") == torch.device("mps", 0)


def test_what_stands_in_for_calls_at_an_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev", "pread", "pwrite", "posix_fallocate"):
        monkeypatch.delattr(os, name)
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | system.CLOSED_IN_CHILDREN)
    system.reserve(descriptor, 4, 8)
    assert os.fstat(descriptor).st_size == 12
    system.reserve(descriptor, 0, 4)
    assert os.fstat(descriptor).st_size == 12
    assert system.write_at(descriptor, [bytearray(b"abcd")], 6) == 4
    found = bytearray(6)
    assert system.read_at(descriptor, [found], 6) == 6
    assert found == b"abcd\0\0"
    assert system.read_some(descriptor, 3, 7) == b"bcd"
    assert system.read_at(descriptor, [found], 12) == 0  # the end
    os.close(descriptor)


def test_without_proc_a_file_goes_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def hidden(path: object, flags: int, mode: int = 0o777) -> int:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", hidden)
    file = DirectFile(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT), "a file", writable=True)
    assert not file.direct
    source, found = torch.arange(8192) % 251, torch.zeros(8192, dtype=torch.int64)
    file.write(source.data_ptr(), source.nbytes, 0, "numbers")
    file.read(found.data_ptr(), found.nbytes, 0, "numbers")
    assert torch.equal(found, source)
    file.close()


def test_a_directory_that_somebody_locks_is_not_locked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = system.lock_directory(tmp_path)
    assert first is not None
    with pytest.raises(BlockingIOError):
        system.lock_directory(tmp_path)
    os.close(first)
    monkeypatch.setattr(system, "fcntl", None)
    assert system.lock_directory(tmp_path) is None
