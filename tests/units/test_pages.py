"""Does memory have the pages that were asked for, and are they there?"""

import _thread
import ctypes
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from unittest.mock import ANY

import pytest

from headrace.memory import pages as pages_module
from headrace.memory.pages import map_pages
from tests.support.interrupts import interrupted_at

MIB = 1 << 20


def address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def large_bytes(pages: mmap.mmap, nbytes: int) -> int:
    """Bytes of the mapping for which large pages were asked, as /proc/self/smaps has it. Whole ones, all of them."""
    found = begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, dash, last = line.split(" ", 1)[0].partition("-")
        if dash:
            begin, end = int(first, 16), int(last, 16)
        elif line.startswith("VmFlags:"):
            inside = min(end, address_of(pages) + nbytes) - max(begin, address_of(pages))
            if inside > 0 and "hg" in line.split():
                assert (begin % (2 * MIB), end % (2 * MIB)) == (0, 0)
                found += inside
            assert inside <= 0 or "sh" not in line.split()  # private memory
    return found


def present_bytes(pages: mmap.mmap, nbytes: int) -> int:
    """Bytes of pages that are there."""
    states = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address_of(pages)), ctypes.c_size_t(nbytes), states) == 0
    return sum(state & 1 for state in states) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 4 * MIB - mmap.PAGESIZE, 4 * MIB, 5 * MIB, 9 * MIB])
def test_pages_are_there_or_not_and_large_from_4_mib_on(nbytes: int) -> None:
    for touched in (True, False):
        pages = map_pages(nbytes, touched=touched)
        assert present_bytes(pages, nbytes) == (nbytes if touched else 0)
        large = large_bytes(pages, nbytes)
        assert large > nbytes - 4 * MIB if nbytes >= 4 * MIB else large == 0
        assert not any(pages[:: mmap.PAGESIZE])


def test_pages_are_touched_where_the_kernel_is_too_old_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_POPULATE_WRITE", 9999)
    pages = map_pages(MIB, touched=True)
    assert present_bytes(pages, MIB) == MIB


def test_several_threads_take_the_pages_of_large_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, tuple[int, int]] = {}  # bytes and thread by address
    advise = pages_module.advise

    def noted(address: int, nbytes: int, advice: int) -> int:
        if advice == pages_module._POPULATE_WRITE:
            asked[address] = nbytes, threading.get_ident()
        return advise(address, nbytes, advice)

    monkeypatch.setattr(pages_module, "advise", noted)
    monkeypatch.setattr(pages_module, "available_cores", lambda: 3)
    monkeypatch.setattr(pages_module, "_PART_BYTES", 2 * MIB)
    nbytes = 9 * MIB + mmap.PAGESIZE
    pages = map_pages(nbytes, touched=True)
    assert present_bytes(pages, nbytes) == nbytes
    begin = address_of(pages)
    assert sorted(asked.items()) == [
        (begin, (4 * MIB, ANY)),
        (begin + 4 * MIB, (4 * MIB, ANY)),
        (begin + 8 * MIB, (MIB + mmap.PAGESIZE, ANY)),
    ]
    assert [address for address, (_, thread) in asked.items() if thread == threading.get_ident()] == [begin]


def test_pages_are_zeroed_where_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "available_cores", lambda: 3)
    monkeypatch.setattr(pages_module, "_PART_BYTES", MIB)
    monkeypatch.setattr(pages_module, "_POPULATE_WRITE", 9999)
    pages = map_pages(4 * MIB, touched=True)
    assert present_bytes(pages, 4 * MIB) == 4 * MIB


@pytest.fixture
def in_four_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "available_cores", lambda: 4)
    monkeypatch.setattr(pages_module, "_PART_BYTES", MIB)


@pytest.mark.usefixtures("in_four_parts")
def test_ctrl_c_at_any_moment_leaves_no_thread_that_waits() -> None:
    """A process would wait for it at its exit."""
    before = len(os.listdir("/proc/self/task"))
    moment = 1
    while interrupted_at(moment, lambda: map_pages(8 * MIB, touched=True)):
        end = time.monotonic() + 20
        while len(os.listdir("/proc/self/task")) > before:
            assert time.monotonic() < end
            time.sleep(0.001)
        moment += 1
    assert moment > 20


@pytest.mark.usefixtures("in_four_parts")
@pytest.mark.parametrize("ends", [False, True])
def test_pages_are_taken_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """In a process with too many threads, or one that ends."""

    def start_new_thread(*_: object) -> int:
        assert not ends  # it would never run
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", start_new_thread)
    monkeypatch.setattr(threading, "_start_new_thread", start_new_thread)
    monkeypatch.setattr(sys, "is_finalizing", lambda: ends)
    pages = map_pages(8 * MIB, touched=True)
    assert present_bytes(pages, 8 * MIB) == 8 * MIB
