"""Does page-locked memory stay out of fork(), and does a child see what it may see?"""

import os
import re
import weakref
from pathlib import Path

import pytest
import torch

import headrace
from headrace.memory import fork_safe, locking
from tests.support.held import weight_bytes
from tests.support.loops import loss_of
from tests.support.models import Decoder
from tests.support.nursery import Nursery

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="systems without files in memory copy at fork")


def permissions(address: int) -> str:
    """Of the mapping with that address, as the kernel tells them: `rw-s` is shared, `rw-p` private."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end, found = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
        if int(begin, 16) <= address < int(end, 16):
            return found
    raise AssertionError("not mapped")


@pytest.mark.parametrize("where", ["host", "disk"])
def test_all_that_training_locks_is_shared(tmp_path: Path, emu_device, monkeypatch, where: str) -> None:
    locked = []

    def register(device, address, nbytes):
        locked.append((nbytes, permissions(address)))
        return register_host_memory(device, address, nbytes)

    register_host_memory = locking.register_host_memory
    monkeypatch.setattr(locking, "register_host_memory", register)
    model = Decoder(layers=6, width=64, vocabulary=128)
    rest = {"host_memory": "1MiB", "disk": tmp_path} if where == "disk" else {}
    handle = headrace.offload(model, device="emu", device_memory=weight_bytes(model) // 3, activations=True, **rest)
    optimizer = headrace.optim.AdamW(model.parameters())
    for _ in range(2):
        loss_of(model, torch.zeros(2, 8, dtype=torch.long)).backward()
        optimizer.step()
    assert sum(nbytes for nbytes, _ in locked) > (100_000 if where == "disk" else 2 * weight_bytes(model))
    assert {found for _, found in locked} == {"rw-s"}
    handle.remove()


@pytest.mark.parametrize("kind", ["rw-s", "rw-p"])
def test_memory_is_unlocked_before_it_is_unmapped(monkeypatch, kind: str) -> None:
    """Systems without files in memory give private memory."""
    if kind == "rw-p":
        monkeypatch.delattr(os, "memfd_create")
    owner, address = fork_safe.map_fork_safe(5 << 20)
    seen = []
    weakref.finalize(owner, lambda: seen.append(permissions(address))).atexit = False
    assert permissions(address) == kind
    assert not any(owner.raw)
    del owner
    assert seen == [kind]


COPIES = """
import ctypes, os, sys
from headrace.memory.fork_safe import map_fork_safe
from headrace.memory.pages import map_pages

NBYTES = 64 << 20

class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]

def pin(address):  # io_uring pins pages as drivers do, until its ring is closed
    call = ctypes.CDLL(None, use_errno=True).syscall
    ring = call(425, 8, (ctypes.c_char * 120)())
    if ring < 0 or call(427, ring, 0, ctypes.byref(Piece(address, NBYTES)), 1) < 0:
        print("cannot pin")
        os._exit(0)

owner, address = map_fork_safe(NBYTES)
if sys.argv[1] == "private":
    owner = map_pages(NBYTES, touched=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
pin(address)
begin, end = os.pipe()
if not os.fork():
    with open("/proc/self/smaps_rollup") as file:
        own = [int(line.split()[1]) << 10 for line in file if line.startswith("Private_Dirty:")]
    os.write(end, b"%d" % own[0])
    os._exit(0)
os.wait()
print(int(os.read(begin, 99)) // NBYTES)
"""


@pytest.mark.extended
def test_fork_copies_no_locked_page(nursery: Nursery) -> None:
    copies = {kind: nursery.start(COPIES, kind).read_rest().strip() for kind in ("private", "shared")}
    if "cannot pin" in copies.values():
        pytest.skip("io_uring, which pins pages here as a driver does, is not allowed")
    assert copies == {"private": "1", "shared": "0"}


SEES = """
import ctypes, os, resource, torch
from headrace.memory import fork_safe
from headrace.memory.fork_safe import map_fork_safe

def tensor(nbytes):
    return torch.frombuffer(map_fork_safe(nbytes)[0], dtype=torch.uint8)

def shared_bytes():
    with open("/proc/self/status") as file:
        return [int(line.split()[1]) << 10 for line in file if line.startswith("RssShmem:")][0]

torch.set_num_threads(1)
small, large = tensor(4096), tensor(9 << 20)
small.fill_(7)
large.fill_(7)
if not os.fork():
    assert bool((small == 7).all()) and bool((large == 7).all())
    small.fill_(8)
    large.fill_(8)
    own = tensor(4096).fill_(9)  # in a file of the child's own
    del small, large
    os._exit(0 if bool((own == 9).all()) else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert bool((small == 7).all()) and bool((large == 7).all())
more = tensor(4096)
assert not bool(more.any())  # no range is used twice
file = fork_safe._file._descriptor
assert shared_bytes() >= 9 << 20
descriptors = len(os.listdir("/proc/self/fd"))
begin, end = os.pipe()
child = os.fork()
if not child:
    os.read(begin, 1)
    os._exit(0 if bool((large == 7).all()) else 1)
del large  # the parent moves its weights
held = os.fstat(file).st_blocks * 512
assert held >= 9 << 20
os.write(end, b"x")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # the child still read them
del more
assert os.fstat(file).st_blocks * 512 < 1 << 20  # nobody is left who could
for _ in range(5):
    again = tensor(9 << 20)
    if not os.fork():
        os._exit(0)
    os.wait()
    del again
assert os.fstat(file).st_blocks * 512 < 1 << 20
assert len(os.listdir("/proc/self/fd")) <= descriptors + 3  # this pipe, and that of the last child
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 1024))
child = os.fork()  # without a descriptor for its pipe
if not child:
    os._exit(0 if bool((small == 7).all()) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("left")
"""


@pytest.mark.extended
def test_a_child_sees_what_was_written_and_keeps_its_writes(nursery: Nursery) -> None:
    child = nursery.start(SEES)
    assert (child.read_rest().strip(), child.wait()) == ("left", 0), child.errors
