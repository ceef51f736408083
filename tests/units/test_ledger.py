"""Are bytes counted right: by tier and purpose, with their peaks, from many threads?"""

import gc
import threading
from functools import partial

import pytest

from headrace.config import parse_bytes
from headrace.errors import BudgetError
from headrace.memory.ledger import Ledger, Tier
from tests.support.interrupts import interrupted_at


def test_bytes_are_counted_by_tier_and_purpose() -> None:
    ledger = Ledger()
    ledger.add(Tier.HOST, "weights", 100)
    ledger.add(Tier.HOST, "gradients", 10)
    ledger.add(Tier.DEVICE, "weights", 1)
    ledger.add(Tier.HOST, "gradients", -10)
    assert ledger.held_bytes(Tier.HOST) == ledger.held_bytes(Tier.HOST, "weights") == 100
    assert ledger.held_bytes(Tier.HOST, "gradients") == ledger.held_bytes(Tier.DISK) == 0
    assert ledger.by_purpose() == {(Tier.HOST, "weights"): 100, (Tier.DEVICE, "weights"): 1}


def test_peaks_are_of_what_was_held_at_once() -> None:
    ledger = Ledger()
    ledger.add(Tier.HOST, "weights", 100)
    ledger.add(Tier.HOST, "weights", -60)
    ledger.add(Tier.HOST, "gradients", 50)
    assert ledger.peak_bytes(Tier.HOST, "weights") == 100
    assert ledger.peak_bytes(Tier.HOST, "gradients") == 50
    assert ledger.peak_bytes(Tier.HOST) == 100  # never 150: not at once
    ledger.reset_peaks()
    assert ledger.peak_bytes(Tier.HOST) == 90
    assert ledger.peak_bytes(Tier.HOST, "weights") == 40


def test_the_device_budget_holds_the_sum_of_its_purposes_alone() -> None:
    ledger = Ledger(frozenset({"weights", "buffers"}))
    ledger.add(Tier.DEVICE, "weights", 100)
    ledger.add(Tier.DEVICE, "gradients", 1000)
    ledger.add(Tier.HOST, "weights", 1000)
    ledger.add(Tier.DEVICE, "buffers", 20)
    ledger.add(Tier.DEVICE, "weights", -50)
    assert ledger.budgeted_peak_bytes == 120
    ledger.reset_peaks()
    assert ledger.budgeted_peak_bytes == 70


def test_the_host_budget_is_asked_before_and_the_advice_is_enough() -> None:
    ledger = Ledger(host_budget_bytes=10_000)
    ledger.check_host(10_000, "weights")
    ledger.add(Tier.HOST, "weights", 7_000)
    ledger.check_host(3_000, "gradients")
    with pytest.raises(BudgetError, match=r"gradients need 4.88 KiB .* beside 6.84 KiB .* allows 9.77 KiB") as error:
        ledger.check_host(5_000, "gradients")
    advised = str(error.value).split("at least ")[1].split(",")[0]
    Ledger(host_budget_bytes=parse_bytes(advised)).check_host(12_000, "all")
    with pytest.raises(
        BudgetError, match=r"host_memory=39.1 KiB of the node allows each of its 4 ranks 9.77 KiB; .* 46.9"
    ):
        Ledger(host_budget_bytes=10_000, ranks=4).check_host(12_000, "all")
    assert ledger.held_bytes(Tier.HOST) == 7_000  # asking books nothing
    Ledger().check_host(1 << 60, "weights")  # no budget, no limit


class Owner:
    """Somebody who holds bytes."""


def test_what_is_booked_for_an_owner_goes_with_it() -> None:
    ledger = Ledger()
    owner = Owner()
    ledger.book(owner, Tier.HOST, "weights", 100, locked=True)
    ledger.book(owner, Tier.HOST, "gradients", 10, locked=False)
    assert ledger.held_bytes(Tier.HOST) == 110
    assert ledger.locked() == {"host_locked_bytes": 100, "host_refused_bytes": 10}
    del owner
    assert ledger.by_purpose() == {}
    assert ledger.locked() == {"host_locked_bytes": 0, "host_refused_bytes": 0}
    assert ledger.peak_bytes(Tier.HOST) == 110


def test_ctrl_c_at_any_moment_leaves_the_sums_right() -> None:
    """Of owners that are there, whenever it came: also as one of them ends."""
    moments = 0
    while True:
        ledger = Ledger(frozenset({"weights"}))
        owners = [Owner()]
        ledger.book(owners[0], Tier.DEVICE, "weights", 100)

        def change(ledger: Ledger, owners: list[Owner]) -> None:
            owners.append(Owner())
            ledger.book(owners[-1], Tier.DEVICE, "weights", 10)
            del owners[0]
            assert ledger.held_bytes(Tier.DEVICE) == 10

        came = interrupted_at(moments + 1, partial(change, ledger, owners))
        assert ledger.held_bytes(Tier.DEVICE, "weights") in (100, 110, 10)
        owners.clear()
        gc.collect()
        assert ledger.held_bytes(Tier.DEVICE) == ledger.held_bytes(Tier.DEVICE, "weights") == 0
        ledger.reset_peaks()
        assert ledger.budgeted_peak_bytes == 0
        if not came:
            break
        moments += 1
    assert moments > 20


def test_an_owner_may_end_while_another_one_is_counted() -> None:
    """Objects are collected at any time, on the thread that counts, too."""
    ledger = Ledger()
    cycles = []
    for _ in range(2000):
        owner, other = Owner(), Owner()
        owner.other, other.other = other, owner  # type: ignore[attr-defined]
        ledger.book(owner, Tier.HOST, "weights", 1)
        cycles.append(owner)
        if len(cycles) == 10:
            cycles.clear()
    del owner, other
    gc.collect()
    assert ledger.by_purpose() == {}


def test_threads_lose_nothing() -> None:
    """Eight threads book 2000 times each; without the lock some of these additions are lost."""
    ledger = Ledger(frozenset({"weights"}))
    begin = threading.Barrier(8)

    def book(purpose: str) -> None:
        begin.wait()
        for _ in range(1000):
            ledger.add(Tier.DEVICE, purpose, 3)
            ledger.add(Tier.DEVICE, purpose, -2)

    threads = [threading.Thread(target=book, args=(purpose,)) for purpose in ("weights", "gradients") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.by_purpose() == {(Tier.DEVICE, "weights"): 4000, (Tier.DEVICE, "gradients"): 4000}
    assert ledger.held_bytes(Tier.DEVICE) == 8000
    assert 4000 < ledger.budgeted_peak_bytes == ledger.peak_bytes(Tier.DEVICE, "weights") <= 4000 + 4 * 3
    assert 8000 < ledger.peak_bytes(Tier.DEVICE) <= 8000 + 8 * 3
