"""Are device buffers booked right, reused on the CPU, and never handed out while somebody else can read them?"""

import ctypes
from typing import Any

import pytest
import torch

from headrace.memory.buffers import DeviceBuffers
from headrace.memory.ledger import Ledger, Tier
from tests.support.nursery import Nursery

CPU = torch.device("cpu")
BUDGET_BYTES = 8192


@pytest.fixture
def buffers(ledger: Ledger) -> DeviceBuffers:
    return DeviceBuffers(CPU, ledger, BUDGET_BYTES)


def test_a_buffer_is_booked_while_it_is_held(compute_device: torch.device, ledger: Ledger) -> None:
    buffers = DeviceBuffers(compute_device, ledger, BUDGET_BYTES)
    buffer = buffers.allocate(1000)
    assert (buffer.shape, buffer.dtype, buffer.device) == ((1000,), torch.uint8, compute_device)
    assert ledger.by_purpose() == {(Tier.DEVICE, "weights"): 1000}
    buffers.release(buffer)
    del buffer
    buffers.close()
    assert ledger.by_purpose() == {}
    assert ledger.budgeted_peak_bytes == 1000


def test_released_memory_is_used_again(buffers: DeviceBuffers, ledger: Ledger) -> None:
    addresses = set()
    for _ in range(10):
        buffer = buffers.allocate(4096)
        addresses.add(buffer.data_ptr())
        buffers.release(buffer)
        del buffer
    assert len(addresses) == 1
    assert ledger.peak_bytes(Tier.DEVICE, "weights") == 4096


def test_buffers_in_use_are_not_shared(buffers: DeviceBuffers, ledger: Ledger) -> None:
    first, second = buffers.allocate(4096), buffers.allocate(4096)
    assert first.data_ptr() != second.data_ptr()
    assert ledger.held_bytes(Tier.DEVICE) == 8192


STRAYS = {
    "view": lambda buffer: buffer[10:20],
    "typed view": lambda buffer: buffer.view(torch.float32),
    "transposed weight": lambda buffer: buffer.view(torch.float32).view(32, 32).t(),
    "storage": lambda buffer: buffer.untyped_storage(),
    "numpy": lambda buffer: buffer[:16].numpy(),
    "detached": lambda buffer: buffer.view(torch.float32).detach(),
}


@pytest.mark.parametrize("kind", STRAYS)
def test_what_somebody_still_refers_to_is_never_handed_out(buffers: DeviceBuffers, ledger: Ledger, kind: str) -> None:
    """A stray reference keeps its bytes, and shows in the ledger, until it is gone."""
    buffer = buffers.allocate(4096).fill_(7)
    stray: Any = STRAYS[kind](buffer)
    address = buffer.data_ptr()
    buffers.release(buffer)
    del buffer
    other = buffers.allocate(4096).fill_(1)
    assert other.data_ptr() != address
    assert ctypes.string_at(address, 16) == bytes([7] * 16)
    assert ledger.held_bytes(Tier.DEVICE) == 8192
    del stray
    assert ledger.held_bytes(Tier.DEVICE) == 4096


def test_what_is_kept_stays_within_the_budget(buffers: DeviceBuffers, ledger: Ledger) -> None:
    """Memory kept for other sizes goes before more is allocated than the budget holds: what was used last goes last."""
    for nbytes, held_bytes in ((1000, 1000), (3000, 4000), (4192, 8192), (1000, 8192), (1001, 6193), (8192, 8192)):
        buffers.release(buffers.allocate(nbytes))
        assert ledger.held_bytes(Tier.DEVICE) == held_bytes
    assert ledger.budgeted_peak_bytes == BUDGET_BYTES


def test_sizes_that_alternate_are_used_again(buffers: DeviceBuffers) -> None:
    addresses = set()
    for _ in range(5):
        for nbytes in (1000, 5000):
            buffer = buffers.allocate(nbytes)
            addresses.add(buffer.data_ptr())
            buffers.release(buffer)
            del buffer
    assert len(addresses) == 2


def test_close_lets_go_of_what_is_kept(buffers: DeviceBuffers, ledger: Ledger) -> None:
    buffers.release(buffers.allocate(4096))
    assert ledger.held_bytes(Tier.DEVICE) == 4096
    buffers.close()
    assert ledger.held_bytes(Tier.DEVICE) == 0


@pytest.mark.emu("lazy", allocator="exact")
def test_an_accelerators_memory_is_kept_until_it_is_needed(emu_device, ledger: Ledger) -> None:
    buffers = DeviceBuffers(torch.device("emu", 1), ledger, 1 << 20)
    before_bytes = emu_device.stats()["allocated_bytes"]
    for nbytes in (1 << 20, 1 << 20, 3 << 18):
        buffer = buffers.allocate(nbytes)
        assert emu_device.stats()["allocated_bytes"] == before_bytes + nbytes
        assert ledger.held_bytes(Tier.DEVICE) == nbytes
        buffers.release(buffer)
        del buffer
        assert ledger.held_bytes(Tier.DEVICE) == 0
    buffers.limit(1000)
    assert emu_device.stats()["allocated_bytes"] == before_bytes


FORKS = """
import os, torch
from headrace.memory.buffers import DeviceBuffers
from headrace.memory.ledger import Ledger
torch.set_num_threads(1)  # a forked process has no threads to compute with
buffer = DeviceBuffers(torch.device("cpu"), Ledger(), 1 << 23).allocate(5 << 20)
buffer.fill_(7)
begin, end = os.pipe()
child = os.fork()
if not child:
    os.read(begin, 1)  # the parent has written since
    os._exit(0 if bool((buffer == 7).all()) else 1)
buffer.fill_(8)
os.write(end, b"x")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bool((buffer == 8).all())
print("left")
"""


@pytest.mark.extended
def test_a_forked_process_keeps_what_was_there(nursery: Nursery) -> None:
    """A view of a weight that somebody kept does not change there, whatever visits the buffer later."""
    child = nursery.start(FORKS)
    assert (child.read_rest().strip(), child.wait()) == ("left", 0), child.errors
