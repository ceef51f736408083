"""Does memory have the pages that were asked for, and are they there?"""

import ctypes
import mmap
from pathlib import Path

import pytest

from millrace.memory import pages as pages_module
from millrace.memory.pages import Pages, map_pages

MIB = 1 << 20


def flags(pages: Pages) -> set[str]:
    """What the kernel knows of the mapping, as /proc/self/smaps abbreviates it."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        begin, dash, end = line.split(" ", 1)[0].partition("-")
        if dash and int(begin, 16) <= pages.address < int(end, 16):
            return set(next(line for line in lines if line.startswith("VmFlags:")).split()[1:])
    raise AssertionError("the kernel does not know the mapping")


def present_bytes(pages: Pages, nbytes: int) -> int:
    """Bytes of pages that are there."""
    states = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pages.address), ctypes.c_size_t(nbytes), states) == 0
    return sum(state & 1 for state in states) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, 4 * MIB - mmap.PAGESIZE, 4 * MIB, 9 * MIB])
def test_pages_are_there_or_not_and_large_from_4_mib_on(nbytes: int) -> None:
    for touched in (True, False):
        pages = map_pages(nbytes, touched=touched)
        assert present_bytes(pages, nbytes) == (nbytes if touched else 0)
        assert ("hg" in flags(pages)) == (nbytes >= 4 * MIB)
        assert "sh" not in flags(pages)
        assert not any(pages[:: mmap.PAGESIZE])


def test_pages_are_touched_where_the_kernel_is_too_old_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_POPULATE_WRITE", 9999)
    pages = map_pages(MIB, touched=True)
    assert present_bytes(pages, MIB) == MIB
