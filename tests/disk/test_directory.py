"""Is the directory of a store one store's alone, private, and empty again however its process ends?"""

import os
import signal
from pathlib import Path

import pytest

from headrace.errors import DiskError, StateError
from headrace.memory.disk import DiskStore
from headrace.memory.disk.directory import StoreDirectory
from headrace.memory.ledger import Ledger
from tests.support.nursery import Child, Nursery

HOLD = """
import os, signal, sys, torch
from headrace.memory.disk import DiskStore
from headrace.memory.ledger import Ledger

store = DiskStore(sys.argv[1], Ledger())
extent = store.allocate("layers.0", 32 << 20, "weights")
source = torch.zeros(32 << 20, dtype=torch.uint8)
print("ready", flush=True)
{then}
"""
WRITE_FOREVER = "while True: store.write(extent, source).synchronize()"


def holder(nursery: Nursery, path: Path, then: str) -> Child:
    """Another process with a store in `path`, which has begun to do `then`."""
    child = nursery.start(HOLD.format(then=then), path)
    assert child.read_line() == "ready\n", child.errors
    return child


def test_it_is_made_for_its_owner_and_left_empty(tmp_path: Path, ledger: Ledger) -> None:
    path = tmp_path / "a" / "b"
    with DiskStore(path, ledger) as store:
        store.allocate("layers.0", 1 << 20, "weights")
        assert path.stat().st_mode & 0o777 == 0o700
        assert [file.stat().st_mode & 0o777 for file in path.iterdir()] == [0o600]
        descriptors = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        spill = [os.stat(d) for d in descriptors if os.path.exists(d) and os.readlink(d).startswith(str(path / "#"))]
        assert {status.st_mode & 0o777 for status in spill} == {0o600}
    assert list(path.iterdir()) == []


def test_two_stores_of_a_process_cannot_share_it(tmp_path: Path, ledger: Ledger) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with DiskStore(tmp_path / "real", ledger):
        with pytest.raises(StateError, match=r"another disk store of this process uses .*real; give each its own"):
            DiskStore(tmp_path / "link", ledger)
        DiskStore(tmp_path / "real" / "other", ledger).close()
    DiskStore(tmp_path / "link", ledger).close()


def test_stores_that_need_not_be_alone_share_it(tmp_path: Path, ledger: Ledger) -> None:
    with DiskStore(tmp_path, ledger) as one, DiskStore(tmp_path, ledger, alone=False) as other:
        other.allocate("layers.0", 1 << 20, "weights")
        assert [file.name for file in tmp_path.iterdir()] == [".headrace-lock"]
        other.close()
        with pytest.raises(StateError, match="another disk store of this process"):
            DiskStore(tmp_path, ledger)
        one.allocate("layers.0", 1 << 20, "weights")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_cannot_share_it(nursery: Nursery, tmp_path: Path, ledger: Ledger) -> None:
    process = holder(nursery, tmp_path, "signal.pause(); print('woken', flush=True)")
    with pytest.raises(StateError, match=f"process {process.pid} uses {tmp_path} as its disk tier; wait for its end"):
        DiskStore(tmp_path, ledger)
    process.send(signal.SIGKILL)
    assert process.read_rest() == ""  # it was there all the time
    assert process.wait() == -signal.SIGKILL


def test_a_forked_child_does_not_end_the_lock(nursery: Nursery, tmp_path: Path, ledger: Ledger) -> None:
    then = """
if os.fork() == 0:
    store._directory.close()
    os._exit(0)
os.wait()
print("forked", flush=True)
signal.pause()
"""
    process = holder(nursery, tmp_path, then)
    assert process.read_line() == "forked\n"
    with pytest.raises(StateError, match=f"process {process.pid} uses"):
        DiskStore(tmp_path, ledger)


@pytest.mark.parametrize("end", ["exit", "exception", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left_however_the_process_ends(end: str, nursery: Nursery, tmp_path: Path, ledger: Ledger) -> None:
    then = {"exit": "", "exception": "raise ValueError"}.get(end, WRITE_FOREVER)
    used = sum(file.stat().st_blocks for file in tmp_path.rglob("*"))
    process = holder(nursery, tmp_path, then)
    code = {"exit": 0, "exception": 1}.get(end)
    if code is None:
        number = getattr(signal, end)
        process.send(number)
        code = -number
    assert process.wait() == code, process.errors
    left = [file.name for file in tmp_path.iterdir()]
    assert left in ([], [".headrace-lock"])
    assert left == [] or end in ("SIGTERM", "SIGKILL")  # no Python runs then; the lock itself is gone
    assert sum(file.stat().st_blocks for file in tmp_path.rglob("*")) <= used + 8
    DiskStore(tmp_path, ledger).close()
    assert list(tmp_path.iterdir()) == []


def test_signal_handlers_stay_the_users(tmp_path: Path, ledger: Ledger) -> None:
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]
    with DiskStore(tmp_path, ledger):
        assert [signal.getsignal(number) for number in signals] == before


def test_files_of_dead_processes_are_removed_and_others_are_not(tmp_path: Path, ledger: Ledger) -> None:
    """A process was killed between making its file and unlinking it, where a filesystem knows no unnamed files."""
    (tmp_path / ".headrace-file-0123").write_bytes(b"stale")
    (tmp_path / ".headrace-lock").write_text("1\n")
    (tmp_path / "mine.txt").write_text("keep")
    with DiskStore(tmp_path, ledger):
        assert sorted(file.name for file in tmp_path.iterdir()) == [".headrace-lock", "mine.txt"]
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_filesystems_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def without(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return opened(path, flags, mode)

    directory = StoreDirectory(tmp_path)
    monkeypatch.setattr(os, "open", without)
    descriptor = directory.create_file()
    assert os.fstat(descriptor).st_nlink == 0
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    os.close(descriptor)
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path, ledger: Ledger) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / ".headrace-lock").symlink_to(tmp_path / "target")
    with pytest.raises(DiskError, match=r"cannot be used as disk tier: Too many levels of symbolic links"):
        DiskStore(tmp_path, ledger)
    assert (tmp_path / "target").read_text() == "precious"


def test_what_is_no_directory(tmp_path: Path, ledger: Ledger) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"disk='.*file' is a file; give a directory"):
        DiskStore(tmp_path / "file", ledger)
    with pytest.raises(DiskError, match=r"file/below cannot be used as disk tier: Not a directory"):
        DiskStore(tmp_path / "file" / "below", ledger)
