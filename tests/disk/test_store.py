"""Does the disk store give back what it was given, in order, at any size and offset, directly and as memory?"""

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import StateError
from headrace.memory.buffers import references_beside
from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore
from headrace.memory.disk.extent import PIECE_BYTES, pieces
from headrace.memory.disk.file import DirectFile
from headrace.memory.disk.requests import Request
from headrace.memory.ledger import Ledger, Tier

PAGE = DISK_ALIGNMENT_BYTES
Memory = Callable[[int], torch.Tensor]


class Moment:
    """An event that the test lets pass, or fail."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: Exception | None = None

    def synchronize(self) -> None:
        assert self._passed.wait(60)
        if self._error is not None:
            raise self._error

    def query(self) -> bool:
        return self._passed.is_set()

    def let_pass(self, error: Exception | None = None) -> None:
        self._error = error
        self._passed.set()


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 17, PIECE_BYTES, 2 * PIECE_BYTES + 5 * PAGE + 1])
def test_what_is_written_is_read(store: DiskStore, memory: Memory, nbytes: int) -> None:
    source, destination = memory(nbytes), memory(nbytes)
    extent = store.allocate("layers.0", nbytes, "weights")
    written = store.write(extent, source)
    store.read(extent, destination).synchronize()
    assert written.query()
    assert torch.equal(destination, source)
    assert sum(moved.nbytes for moved in store._log.since(0.0)) == 2 * nbytes


@pytest.mark.parametrize("shift", [1, 64, 511, 512])
def test_memory_and_offsets_need_no_alignment(store: DiskStore, memory: Memory, shift: int) -> None:
    nbytes = PIECE_BYTES + 3 * PAGE
    source, destination = memory(nbytes), memory(nbytes)
    extent = store.allocate("layers.0", nbytes, "weights")
    store.write(extent, source[shift:], shift)
    store.write(extent, source[:shift])
    store.read(extent, destination[shift:], shift)
    store.read(extent, destination[:shift]).synchronize()
    store.synchronize()
    assert torch.equal(destination, source)
    part = torch.empty(PAGE, dtype=torch.uint8)
    store.read(extent, part, PIECE_BYTES - shift).synchronize()
    assert torch.equal(part, source[PIECE_BYTES - shift :][:PAGE])


def test_whole_pages_are_read_at_once(store: DiskStore, memory: Memory) -> None:
    """A destination may end in the padding of the extent; it may not go on into the next one."""
    extent = store.allocate("layers.0", PAGE + 1, "weights")
    source, whole = memory(PAGE + 1), memory(2 * PAGE)
    store.write(extent, source)
    store.read(extent, whole).synchronize()
    assert torch.equal(whole[: PAGE + 1], source)
    with pytest.raises(ValueError, match=r"'layers.0': 8193 bytes at offset 0 are not within its 4097 bytes"):
        store.read(extent, torch.empty(2 * PAGE + 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="not within"):
        store.read(extent, whole, -1)
    with pytest.raises(TypeError, match=r"'layers.0': .* not torch.float32 on cpu .* give tensor.view"):
        store.write(extent, torch.zeros(4))


def test_extents_are_packed_and_booked(store: DiskStore, ledger: Ledger) -> None:
    sizes = [1, PAGE, PAGE + 1, 10 * PAGE]
    extents = [store.allocate(f"layers.{n}", size, "weights") for n, size in enumerate(sizes)]
    assert [extent.offset for extent in extents] == [0, PAGE, 2 * PAGE, 4 * PAGE]
    store.allocate("moments", 5, "optimizer state")
    assert ledger.by_purpose() == {(Tier.DISK, "weights"): 14 * PAGE, (Tier.DISK, "optimizer state"): PAGE}
    store.close()
    assert ledger.by_purpose() == {}
    assert ledger.peak_bytes(Tier.DISK) == 15 * PAGE


def test_pieces_share_no_page() -> None:
    assert pieces(0, 0) == []
    assert pieces(PIECE_BYTES - 10, PIECE_BYTES + 20) == [
        (PIECE_BYTES - 10, PIECE_BYTES),
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (2 * PIECE_BYTES, 2 * PIECE_BYTES + 10),
    ]


def test_requests_of_an_extent_keep_their_order(store: DiskStore, memory: Memory) -> None:
    """The first write is held back: what was submitted after it must not overtake it. Another extent may."""
    extent, other = (store.allocate(name, 4 * PAGE, "weights") for name in ("first", "second"))
    values = [memory(4 * PAGE) for _ in range(4)]
    seen = [memory(4 * PAGE) for _ in range(4)]
    moment = Moment()
    requests = []
    for value, destination in zip(values, seen, strict=True):
        requests.append(store.write(extent, value, after=None if requests else moment))
        requests.append(store.read(extent, destination))
    store.write(other, values[0]).synchronize()
    assert not any(request.query() for request in requests)
    moment.let_pass()
    requests[-1].synchronize()
    for value, destination in zip(values, seen, strict=True):
        assert torch.equal(value, destination)
    begun, ended = [r.began_at() for r in requests], [r.reached_at() for r in requests]
    assert all(later >= earlier for later, earlier in zip(begun[1:], ended[:-1], strict=True))


def test_an_extent_is_handed_over_while_others_are_written(store: DiskStore, memory: Memory) -> None:
    """What is noted of those that were written changes meanwhile, at any instruction."""
    extents = [store.allocate(str(number), PAGE, "weights") for number in range(1000)]
    source = memory(PAGE)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        requests = [store.write(extent, source) for extent in extents]
        while not requests[-1].query():
            store.to_mapping(extents[0])
    finally:
        sys.setswitchinterval(interval)
    store.synchronize()


def test_a_write_waits_for_the_reads_before_it(store: DiskStore, memory: Memory) -> None:
    extent = store.allocate("layers.0", PAGE, "weights")
    old, new, seen = memory(PAGE), memory(PAGE), memory(PAGE)
    store.write(extent, old)
    moment = Moment()
    read = store.read(extent, seen, after=moment)
    beside = store.read(extent, memory(PAGE))
    written = store.write(extent, new)
    beside.synchronize()  # reads do not wait for each other
    assert not read.query()
    assert not written.query()
    moment.let_pass()
    written.synchronize()
    assert torch.equal(seen, old)
    store.read(extent, seen).synchronize()
    assert torch.equal(seen, new)


@pytest.mark.parametrize("mapped", [False, True])
def test_writes_of_other_bytes_of_an_extent_run_beside_each_other(
    store: DiskStore, memory: Memory, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    """Both are at the drive at once, or neither would pass. They are of one grain, of which nothing is known then."""
    at = PAGE
    extent = store.allocate("layers.0", at + PAGE, "gradients")
    if mapped:
        store.mapping(extent)
        store.to_direct(extent)
    meeting = threading.Barrier(2)
    write = DirectFile.write

    def meet(self: DirectFile, *arguments: Any) -> None:
        meeting.wait(30)
        write(self, *arguments)

    first, second, seen = memory(PAGE), memory(PAGE), memory(at + PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(DirectFile, "write", meet)
        requests = [store.write(extent, first), store.write(extent, second, at)]
        for request in requests:
            request.synchronize()
    store.read(extent, seen).synchronize()
    assert torch.equal(seen[:PAGE], first)
    assert torch.equal(seen[at:], second)


def test_a_write_that_never_began_spoils_its_extent(store: DiskStore, memory: Memory) -> None:
    """The copy from the device failed, so its bytes never came: what is on disk is not what the reader expects."""
    extent = store.allocate("layers.0", PAGE, "weights")
    good, seen = memory(PAGE), memory(PAGE)
    moment = Moment()
    written = store.write(extent, good, after=moment)
    read = store.read(extent, seen)
    moment.let_pass(ValueError("the copy failed"))
    for request in (written, read, store.read(extent, seen), store.write(extent, good[:1], 1)):
        with pytest.raises(ValueError, match="the copy failed"):
            request.synchronize()
    with pytest.raises(ValueError, match="the copy failed"):
        store.synchronize()
    store.write(extent, good)  # all of it: good again
    store.read(extent, seen).synchronize()
    store.synchronize()
    assert torch.equal(seen, good)


def test_many_failed_requests_end_one_after_the_other(store: DiskStore, memory: Memory) -> None:
    extent = store.allocate("layers.0", PAGE, "weights")
    moment = Moment()
    source = memory(PAGE)
    requests = [store.write(extent, source[:1], after=moment)]
    requests += [store.read(extent, source[:1]) for _ in range(2000)]
    moment.let_pass(ValueError("no"))
    for request in requests:
        with pytest.raises(ValueError, match="no"):
            request.synchronize()


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_refers_to_the_memory_of_a_request_that_has_ended(
    store: DiskStore, memory: Memory, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Neither the threads, however long they take to go on, nor what failed."""
    nbytes = 3 * PIECE_BYTES
    extent = store.allocate("layers.0", nbytes, "weights")
    store.write(extent, memory(nbytes)).synchronize()
    if fails:

        def read(file: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
            raise OSError("no")

        monkeypatch.setattr(DirectFile, "read", read)
    seen, end = memory(nbytes), Request.end
    at_the_end: list[int] = []

    def noted(request: Request) -> None:
        at_the_end.append(references_beside(seen))
        end(request)

    monkeypatch.setattr(Request, "end", noted)
    request = store.read(extent, seen)
    if fails:
        with pytest.raises(OSError, match="no"):
            request.synchronize()
    else:
        request.synchronize()
    assert at_the_end == [0]
    assert references_beside(seen) == 0


def resident_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a mapping that count as memory of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith(f"{tensor.data_ptr():08x}-"))
    return next(int(line.split()[1]) << 10 for line in lines[begin:] if line.startswith("Rss:"))


@pytest.mark.parametrize("kind", ["disk", "ext4", "tmpfs"])
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")
def test_mapping_and_direct_access_agree(
    kind: str, tmp_path: Path, ledger: Ledger, memory: Memory, mount: Callable[[str, int], Path]
) -> None:
    nbytes = PIECE_BYTES + PAGE + 5
    path = tmp_path if kind == "disk" else mount(kind, 64 << 20)
    with DiskStore(path, ledger) as store:
        extent, neighbour = (store.allocate(name, nbytes, "weights") for name in "ab")
        source, seen = memory(nbytes), memory(nbytes)
        store.write(extent, source)
        store.to_mapping(extent).synchronize()
        mapping = store.mapping(extent)
        assert torch.equal(mapping, source)
        assert store.mapping(extent).data_ptr() == mapping.data_ptr()

        mapping.bitwise_not_()
        assert resident_bytes(mapping) >= nbytes
        store.to_direct(extent)
        store.read(extent, seen).synchronize()
        assert torch.equal(seen, ~source)
        assert resident_bytes(mapping) == 0

        for value in range(3):  # again: the mapping has pages of its own by now, and must not show old ones
            assert torch.equal(mapping, ~source if value == 0 else torch.full_like(source, value - 1))
            store.write(extent, seen.fill_(value))
            store.to_mapping(extent).synchronize()
            assert torch.equal(mapping, torch.full_like(source, value))
            mapping[-1] = 77
            store.to_direct(extent).synchronize()
            store.read(extent, seen).synchronize()
            assert seen[-1] == 77
            mapping[-1] = value
            store.to_direct(extent)
        store.write(neighbour, source)
        store.synchronize()
        assert torch.equal(store.mapping(neighbour), source)


def test_a_mapping_outlives_its_store(tmp_path: Path, ledger: Ledger, memory: Memory) -> None:
    source = memory(3 * PAGE)
    with DiskStore(tmp_path, ledger) as store:
        extent = store.allocate("layers.0", source.nbytes, "weights")
        store.write(extent, source)
        store.to_mapping(extent).synchronize()
        mapping = store.mapping(extent)
    assert torch.equal(mapping, source)
    assert torch.equal(mapping.clone().add_(1), mapping.add_(1))


def test_a_mapping_has_a_storage_of_its_own(store: DiskStore) -> None:
    first, second = (store.mapping(store.allocate(name, PAGE + 1, "weights")) for name in "ab")
    assert first.untyped_storage().nbytes() == PAGE + 1
    assert second.data_ptr() - first.data_ptr() != PAGE + 1


def test_thousands_of_mappings_need_no_descriptors(store: DiskStore) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mappings = [store.mapping(store.allocate(f"w{n}", 100, "weights")) for n in range(2000)]
    for number, mapping in enumerate(mappings):
        mapping.fill_(number % 251)
    assert len(os.listdir("/proc/self/fd")) <= before
    store.synchronize()
    assert all(mapping.eq(number % 251).all() for number, mapping in enumerate(mappings))


def test_a_closed_store_says_so(tmp_path: Path, ledger: Ledger, memory: Memory) -> None:
    store = DiskStore(tmp_path, ledger)
    extent = store.allocate("layers.0", PAGE, "weights")
    late, seen = store.write(extent, memory(PAGE)), memory(PAGE)
    store.close()
    store.close()
    assert late.query()  # what was submitted is done
    for call in (
        lambda: store.read(extent, seen),
        lambda: store.mapping(extent),
        lambda: store.allocate("layers.1", 1, "weights"),
    ):
        with pytest.raises(StateError, match=r"'layers.\d' cannot be reached: the disk store is closed"):
            call()


def test_the_threads_of_a_store_that_is_let_go_of_end(tmp_path: Path, ledger: Ledger) -> None:
    """Also where releasing an extent was the last thing that they were told."""
    before = set(threading.enumerate())
    store = DiskStore(tmp_path, ledger)
    threads = set(threading.enumerate()) - before
    extent = store.allocate("activations", PAGE, "activations")
    store.synchronize()
    store.release(extent)
    while store._requests._turns._inbox.qsize():  # until the thread of turns has taken it
        pass
    del store
    gc.collect()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
