"""Does every fault of a disk reach the thread that waits, with file, tensor, offset and next action? Real faults."""

import errno
import os
import re
import shutil
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import DiskError
from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore
from headrace.memory.disk.directory import StoreDirectory
from headrace.memory.disk.extent import PIECE_BYTES
from headrace.memory.disk.file import DirectFile
from headrace.memory.disk.mapping import Mapping
from headrace.memory.ledger import Ledger, Tier

PAGE = DISK_ALIGNMENT_BYTES
Memory = Callable[[int], torch.Tensor]
Mount = Callable[[str, int], Path]

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")


def spill_file(directory: Path) -> str:
    """A path of the file that has no name."""
    paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return next(p for p in paths if os.path.lexists(p) and os.readlink(p).startswith(f"{directory}/#"))


def fill_up(file: Any) -> None:
    """Writes until nothing more fits, and then once more."""
    while file.write(bytes(1 << 16)) == 1 << 16:
        pass
    file.write(bytes(1 << 16))


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_a_full_disk_is_told_before_the_first_byte(kind: str, mount: Mount, ledger: Ledger, memory: Memory) -> None:
    path = mount(kind, 16 << 20)
    with DiskStore(path, ledger) as store:
        first = store.allocate("layers.0", 2 << 20, "weights")
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        with pytest.raises(DiskError, match=r"the disk tier needs 1 GiB of disk, but .* has .* free; free some") as e:
            store.check_free(1 << 30)
        assert e.value.errno == errno.ENOSPC
        with pytest.raises(DiskError, match=r"'layers.1' needs 64 MiB of disk, but .* has .* MiB free; free some"):
            store.allocate("layers.1", 64 << 20, "weights")
        assert os.statvfs(path).f_bavail * os.statvfs(path).f_frsize == free
        assert ledger.held_bytes(Tier.DISK) == store.nbytes == 2 << 20
        source, seen = memory(2 << 20), memory(2 << 20)  # what was there works on
        store.write(first, source)
        store.read(first, seen).synchronize()
        assert torch.equal(seen, source)


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_another_program_takes_the_room_first(
    kind: str, mount: Mount, ledger: Ledger, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the taking; and after the taking, which keeps the room."""
    path = mount(kind, 16 << 20)
    with DiskStore(path, ledger) as store:
        first = store.allocate("layers.0", 2 << 20, "weights")
        with monkeypatch.context() as patch:
            patch.setattr(StoreDirectory, "check_free", lambda *_: None)  # it was free a moment ago
            with pytest.raises(DiskError, match=r"'layers.1': 67108864 bytes could not be taken .* No space left") as e:
                store.allocate("layers.1", 64 << 20, "weights")
        assert e.value.errno == errno.ENOSPC
        assert os.stat(spill_file(path)).st_size == store.nbytes == ledger.held_bytes(Tier.DISK) == 2 << 20
        fill = path / "other"
        with fill.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            fill_up(file)
        source, seen = memory(2 << 20), memory(2 << 20)
        store.write(first, source).synchronize()
        store.read(first, seen).synchronize()
        assert torch.equal(seen, source)


def test_a_byte_that_changed_on_disk(tmp_path: Path, ledger: Ledger, memory: Memory) -> None:
    nbytes = PIECE_BYTES + 3 * PAGE + 5
    with DiskStore(tmp_path, ledger) as store:
        store.allocate("layers.0", 1, "weights")
        extent = store.allocate("layers.1", nbytes, "weights")
        source, seen = memory(nbytes), memory(nbytes)
        store.write(extent, source).synchronize()
        with open(spill_file(tmp_path), "r+b") as file:
            file.seek(extent.offset + PIECE_BYTES + 100)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        request = store.read(extent, seen)
        where = re.escape(
            f"'layers.1': {3 * PAGE + 5} bytes at offset {PAGE + PIECE_BYTES} of the spill file in {tmp_path}"
        )
        with pytest.raises(
            DiskError, match=where + r" are not those that were written .* from the last checkpoint"
        ) as e:
            request.synchronize()
        assert e.value.errno == errno.EBADMSG
        store.read(extent, seen[:PIECE_BYTES]).synchronize()  # the other piece is sound
        assert torch.equal(seen[:PIECE_BYTES], source[:PIECE_BYTES])
        store.write(extent, source)
        store.read(extent, seen).synchronize()
        assert torch.equal(seen, source)


@pytest.mark.parametrize("grain_bytes", [PAGE, 3 * PAGE, PIECE_BYTES - PAGE, PIECE_BYTES + PAGE])
def test_grains_of_any_size_are_checked(grain_bytes: int, tmp_path: Path, ledger: Ledger, memory: Memory) -> None:
    nbytes = 2 * PIECE_BYTES + 5
    with DiskStore(tmp_path, ledger) as store:
        extent = store.allocate("layers.0", nbytes, "weights", grain_bytes)
        store.write(extent, memory(nbytes)).synchronize()
        with open(spill_file(tmp_path), "r+b") as file:
            byte = os.pread(file.fileno(), 1, PIECE_BYTES - 1)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), PIECE_BYTES - 1)
        with pytest.raises(DiskError, match="are not those that were written"):
            store.read(extent, memory(nbytes)).synchronize()


@pytest.mark.parametrize(("begin", "end", "noticed"), [(0, PAGE, True), (10, 20, False), (PAGE, 3 * PAGE, False)])
def test_parts_that_are_written_anew_are_no_damage(
    begin: int, end: int, noticed: bool, tmp_path: Path, ledger: Ledger, memory: Memory
) -> None:
    """A write of a part ends what was known of the whole; a write of all of it begins anew."""
    with DiskStore(tmp_path, ledger) as store:
        extent = store.allocate("layers.0", PAGE, "weights")
        source, seen = memory(PAGE), memory(PAGE)
        store.write(extent, source)
        end = min(end, PAGE)
        part = memory(max(0, end - begin))
        if begin < end:
            store.write(extent, part, begin)
            source[begin:end] = part
        store.read(extent, seen).synchronize()
        assert torch.equal(seen, source)
        with open(spill_file(tmp_path), "r+b") as file:
            file.write(bytes([int(source[0]) ^ 1]))
        request = store.read(extent, seen)
        if noticed or begin >= PAGE:
            with pytest.raises(DiskError, match="are not those that were written"):
                request.synchronize()
        else:
            request.synchronize()


def test_a_file_that_was_cut_off(tmp_path: Path, ledger: Ledger, memory: Memory) -> None:
    with DiskStore(tmp_path, ledger) as store:
        extent = store.allocate("layers.0", 4 * PAGE, "weights")
        store.write(extent, memory(4 * PAGE)).synchronize()
        os.truncate(spill_file(tmp_path), PAGE)
        request = store.read(extent, memory(4 * PAGE))
        where = rf"'layers.0': the spill file in .* ends at byte {PAGE}, but {3 * PAGE} bytes at offset {PAGE}"
        with pytest.raises(DiskError, match=where + r" were to be read: the file was truncated") as e:
            request.synchronize()
        assert e.value.errno == errno.EIO


def test_a_drive_that_fails(mount: Mount, ledger: Ledger, memory: Memory) -> None:
    """The image below the filesystem loses its end: the kernel answers with EIO, for reads and for writes."""
    path = mount("ext4", 64 << 20)
    nbytes = 32 << 20
    store = DiskStore(path, ledger)
    extent, other = (store.allocate(name, nbytes // 2, "weights") for name in ("layers.0", "layers.1"))
    source, seen = memory(nbytes // 2), memory(nbytes // 2)
    store.write(extent, source)
    store.write(other, source)
    store.synchronize()
    subprocess.run(["sync", "-f", str(path)], check=True, timeout=30)
    os.truncate(path.with_suffix(".img"), 1 << 20)
    reads = [store.read(extent, seen), store.read(other, seen)]
    for request, name in zip(reads, ("layers.0", "layers.1"), strict=True):
        with pytest.raises(DiskError, match=rf"'{name}': \d+ bytes at offset \d+ of .* Input/output error.*dmesg") as e:
            request.synchronize()
        assert e.value.errno == errno.EIO
    store.close()


def test_a_close_that_fails_keeps_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux, the descriptor is closed all the same."""
    close, before = os.close, set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("headrace.memory.disk.file._open_direct", lambda descriptor, _writable: os.dup(descriptor))
    file = DirectFile(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT), "a file", writable=True)
    with monkeypatch.context() as patch:

        def fails(descriptor: int) -> None:
            close(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "close", fails)
        with pytest.raises(OSError, match="Input/output error"):
            file.close()
    assert set(os.listdir("/proc/self/fd")) == before
    file.close()


@pytest.mark.parametrize("how", ["removed", "unmounted"])
def test_a_directory_that_vanishes_takes_nothing_with_it(
    how: str, tmp_path: Path, mount: Mount, ledger: Ledger, memory: Memory
) -> None:
    """The file has no name that could be removed: it lives as long as the store."""
    path = tmp_path / "store" if how == "removed" else mount("ext4", 32 << 20)
    with DiskStore(path, ledger) as store:
        extent = store.allocate("layers.0", PAGE, "weights")
        source, seen = memory(PAGE), memory(PAGE)
        store.write(extent, source).synchronize()
        if how == "removed":
            shutil.rmtree(path)
        else:
            subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)
        store.read(extent, seen).synchronize()
        assert torch.equal(seen, source)
        store.write(extent, source.bitwise_not())
        store.read(extent, seen).synchronize()
        assert torch.equal(seen, ~source)
        store.allocate("layers.1", PAGE, "weights")


def _refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_failed_write_other_bytes_are_sound_and_the_same_range_mends_it(
    store: DiskStore, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = store.allocate("layers.0", 4 * PAGE, "weights")
    source, part, seen = memory(4 * PAGE), memory(PAGE), memory(4 * PAGE)
    store.write(extent, source).synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", _refuse)
        with pytest.raises(OSError, match="No space left"):
            store.write(extent, part, PAGE).synchronize()
    for use in (
        store.read(extent, seen),
        store.read(extent, seen[:100], PAGE + 5),
        store.write(extent, part[:100], PAGE),  # a part of what failed, which itself is missing from now on
        store.to_mapping(extent),
    ):
        with pytest.raises(OSError, match="No space left"):
            use.synchronize()
    with pytest.raises(OSError, match="No space left"):
        store.synchronize()
    store.read(extent, seen[: 2 * PAGE], 2 * PAGE).synchronize()
    assert torch.equal(seen[: 2 * PAGE], source[2 * PAGE :])
    store.write(extent, part, PAGE).synchronize()
    source[PAGE : 2 * PAGE] = part
    store.read(extent, seen).synchronize()
    assert torch.equal(seen, source)
    store.synchronize()


def test_a_failed_write_that_is_remembered_does_not_hold_what_its_callers_held(
    store: DiskStore, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent, source = store.allocate("layers.0", PAGE, "weights"), memory(PAGE)

    def wait() -> weakref.ref[torch.Tensor]:
        held = torch.ones(3)
        try:
            store.write(extent, source).synchronize()
        except OSError:
            return weakref.ref(held)
        raise AssertionError("no fault")

    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", _refuse)
        assert wait()() is None
    with pytest.raises(OSError, match="No space left"):
        store.synchronize()
    store.write(extent, source).synchronize()


def test_pages_that_did_not_reach_the_disk_are_brought_there_by_the_next_hand_over(
    store: DiskStore, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = store.allocate("layers.0", 3 * PAGE, "weights")
    source, seen = memory(3 * PAGE), memory(3 * PAGE)
    memory_of_it = store.mapping(extent)
    memory_of_it.copy_(source)
    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "flush", _refuse)
        handed = store.to_direct(extent)
        with pytest.raises(DiskError, match=r"'layers.0'.* through memory did not reach the disk: No space left"):
            store.read(extent, seen).synchronize()
        assert isinstance(handed.error, DiskError)
    store.to_direct(extent).synchronize()
    store.read(extent, seen).synchronize()
    assert torch.equal(seen, source)
    with monkeypatch.context() as patch:
        patch.setattr(Mapping, "flush", _refuse)
        store.to_mapping(extent)
        store.to_direct(extent).settle()
    memory_of_it[PAGE + 7] += 1  # as if the kernel had dropped the page
    with pytest.raises(DiskError, match=r"'layers.0'.* are not those that were written"):
        store.to_direct(extent).synchronize()


def test_a_byte_of_handed_over_memory_that_changed_on_disk(tmp_path: Path, ledger: Ledger, memory: Memory) -> None:
    with DiskStore(tmp_path, ledger) as store:
        extent = store.allocate("layers.0", PIECE_BYTES + PAGE, "weights")
        store.mapping(extent).copy_(memory(PIECE_BYTES + PAGE))
        store.to_direct(extent).synchronize()
        with open(spill_file(tmp_path), "r+b") as file:
            byte = os.pread(file.fileno(), 1, PIECE_BYTES + 99)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1]), PIECE_BYTES + 99)
        request = store.read(extent, memory(PIECE_BYTES + PAGE))
        with pytest.raises(
            DiskError, match=rf"'layers.0': {PAGE} bytes at offset {PIECE_BYTES} .* not those that were"
        ):
            request.synchronize()
        store.to_mapping(extent)
        store.to_direct(extent)  # user code may have written it
        store.read(extent, memory(PIECE_BYTES + PAGE)).synchronize()


def test_a_read_only_directory(mount: Mount, ledger: Ledger) -> None:
    path = mount("tmpfs", 1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True, timeout=30)
    with pytest.raises(DiskError, match=r"cannot be used as disk tier: Read-only file system. Give a directory") as e:
        DiskStore(path, ledger)
    assert e.value.errno == errno.EROFS
    with pytest.raises(DiskError, match="Read-only file system"):
        DiskStore(path / "below", ledger)


@pytest.mark.filterwarnings("default:the filesystem of disk=")
def test_files_in_ram_are_told_once(mount: Mount, ledger: Ledger) -> None:
    with pytest.warns(RuntimeWarning, match="keeps its files in RAM: what rests there still takes host memory") as told:
        store = DiskStore(mount("tmpfs", 1 << 20), ledger)
    assert len(told) == 1
    store.close()
