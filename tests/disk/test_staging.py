"""Is a staging slot used again only when its last user is done with it, and never more memory than the ring has?"""

import threading

import pytest
import torch

from headrace.errors import BudgetError, StateError
from headrace.memory.disk import DISK_ALIGNMENT_BYTES, StagingRing
from headrace.memory.ledger import Ledger, Tier
from tests.support.interrupts import interrupted_at

CPU = torch.device("cpu")
PAGE = DISK_ALIGNMENT_BYTES


class Passed:
    """Some event."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def test_slots_are_pages_of_the_ledger() -> None:
    ledger = Ledger()
    ring = StagingRing(PAGE + 1, 3, CPU, ledger)
    assert ring.slot_bytes == 2 * PAGE
    slots = [ring.acquire() for _ in range(3)]
    assert [slot.memory.nbytes for slot in slots] == [2 * PAGE] * 3
    assert all(slot.memory.data_ptr() % PAGE == 0 for slot in slots)
    assert ledger.by_purpose() == {(Tier.HOST, "staging"): 6 * PAGE}
    ring.close()
    assert ledger.by_purpose() == {(Tier.HOST, "staging"): 6 * PAGE}  # in use
    del slots
    assert ledger.by_purpose() == {}


def test_over_the_budget_it_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"staging need 12 KiB of host memory .* allows 8 KiB"):
        StagingRing(PAGE, 3, CPU, Ledger(host_budget_bytes=2 * PAGE))
    with pytest.raises(ValueError, match="a staging ring of 0 slots"):
        StagingRing(PAGE, 0, CPU, Ledger())


def test_the_next_user_waits_for_the_event_of_the_last() -> None:
    ring = StagingRing(PAGE, 2, CPU, Ledger())
    first, second = ring.acquire(), ring.acquire()
    assert first.free is None
    assert ring.free_slots == 0
    copied = Passed()
    ring.release(second, copied)
    again = ring.acquire()
    assert again.index == second.index
    assert again.free is copied
    with pytest.raises(StateError, match=f"staging slot {again.index} was released already"):
        [ring.release(again, None) for _ in range(2)]


def test_without_a_free_slot_the_caller_waits() -> None:
    ring = StagingRing(PAGE, 1, CPU, Ledger())
    slot, got = ring.acquire(), []
    thread = threading.Thread(target=lambda: got.append(ring.acquire()))
    thread.start()
    assert got == []
    ring.release(slot, None)
    thread.join(20)
    assert [slot.index for slot in got] == [0]


def test_closing_wakes_those_who_wait() -> None:
    ring = StagingRing(PAGE, 1, CPU, Ledger())
    ring.acquire()
    errors: list[str] = []

    def wait() -> None:
        try:
            ring.acquire()
        except StateError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    ring.close()
    thread.join(20)
    assert errors == ["the staging ring is closed: its model was let go of"]


def test_slots_are_pinned_for_an_accelerator(compute_device: torch.device) -> None:
    torch.empty(1).pin_memory()
    slot = StagingRing(PAGE, 1, compute_device, Ledger()).acquire()
    assert slot.memory.is_pinned() == (compute_device.type != "cpu")


def test_ctrl_c_leaves_the_ring_unlocked() -> None:
    """Another thread can still take it, wherever the interrupt came."""
    struck = 0
    for moment in range(1, 200):
        ring = StagingRing(PAGE, 2, CPU, Ledger())
        came = interrupted_at(moment, lambda ring=ring: ring.release(ring.acquire(), None))
        reader = threading.Thread(target=lambda ring=ring: ring.free_slots, daemon=True)
        reader.start()
        reader.join(10)
        assert not reader.is_alive(), moment
        struck += came
        if not came:
            break
    assert struck > 10
