"""Does the pool hand out each byte once, merge what comes back, and shrink to what is needed?"""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import BudgetError
from headrace.memory import pool as pool_module
from headrace.memory.arena import Arena, aligned, whole_pages
from headrace.memory.ledger import Ledger, Tier
from headrace.memory.pool import HostPool, Slab


def make(budget_bytes: int | None = None) -> tuple[HostPool, Ledger]:
    ledger = Ledger(host_budget_bytes=budget_bytes)
    return HostPool(torch.device("cpu"), ledger, "activations"), ledger


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=60))
@settings(max_examples=60)
def test_no_byte_is_handed_out_twice(script: list[tuple[bool, int]]) -> None:
    pool, ledger = make()
    held: list[tuple[Slab, int]] = []
    for index, (takes, number) in enumerate(script):
        if takes or not held:
            room = [
                (arena, begin)
                for arena, ranges in enumerate(pool._free)
                for begin, end in ranges
                if end - begin >= aligned(number)
            ]
            slab = pool.take(number)
            assert slab.memory.nbytes == number
            assert (slab.arena, slab.offset) == (room[0] if room else (len(pool._free) - 1, 0))  # the first that fits
            slab.memory.fill_(index % 251)
            held.append((slab, index % 251))
        else:
            slab, value = held.pop(number % len(held))
            assert bool((slab.memory == value).all())
            pool.give_back(slab)
        assert pool.held_bytes == sum(aligned(slab.memory.nbytes) for slab, _ in held)
        assert ledger.held_bytes(Tier.HOST) == pool.arena_bytes
    for slab, value in held:
        assert bool((slab.memory == value).all())
        pool.give_back(slab)
    assert [len(ranges) for ranges in pool._free] == [1] * len(pool._free)  # merged


def test_one_arena_of_the_peak_takes_the_place_of_many() -> None:
    pool, _ = make()
    sizes = [5000, 70_000, 300, 12_000]
    grown = []
    for _ in range(3):
        slabs = [pool.take(size) for size in sizes]
        pool.consolidate()  # not while something is out
        assert pool.held_bytes > 0
        for slab in slabs:
            pool.give_back(slab)
        pool.consolidate()
        assert pool.arena_bytes == whole_pages(sum(aligned(size) for size in sizes))
        grown.append(pool.grown)
    assert len(set(grown)) == 1  # nothing is made after the first round


def test_steps_of_random_lengths_lock_hardly_more_than_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def noted(nbytes: int, *given: Any) -> Arena:
        made.append(whole_pages(nbytes))
        return Arena(nbytes, *given)

    monkeypatch.setattr(pool_module, "Arena", noted)
    lengths = random.Random(1)
    pool, _ = make()
    peak_bytes = 0
    for _ in range(200):
        length = lengths.randint(100, 2000)
        slabs = [pool.take(length * width) for _ in range(24) for width in (64, 64, 192)]
        peak_bytes = max(peak_bytes, pool.held_bytes)
        for slab in slabs:
            pool.give_back(slab)
        pool.consolidate()
    assert sum(made) < 2.5 * peak_bytes  # all arenas anew for each longest step: 5.8
    assert pool.arena_bytes < 1.1 * peak_bytes


@pytest.mark.parametrize("is_limited", [False, True])
def test_a_tight_budget_has_room_for_steps_of_other_pieces(is_limited: bool) -> None:
    """Neither larger arenas nor several ones may take what a step needs."""
    budget_bytes = 112 * 4096
    ledger = Ledger(host_budget_bytes=None if is_limited else budget_bytes)
    pool = HostPool(torch.device("cpu"), ledger, "activations", budget_bytes if is_limited else None)
    for pages in ([50, 50], [50, 50, 1], [50, 50, 10], [60, 50]):
        slabs = [pool.take(count * 4096) for count in pages]
        while slabs:
            pool.give_back(slabs.pop())
        pool.consolidate()
    assert pool.arena_bytes <= budget_bytes


def test_sizes_that_take_turns_do_not_make_memory_each_time() -> None:
    pool, _ = make()
    grown = []
    for turn in range(8):
        slabs = [pool.take(size) for size in ((5000, 70_000), (90_000, 100), (400, 60_000, 30_000))[turn % 3]]
        for slab in slabs:
            pool.give_back(slab)
        pool.consolidate()
        grown.append(pool.grown)
    assert len(set(grown[3:])) == 1


def test_memory_that_is_reserved_stays_as_it_is() -> None:
    ledger = Ledger()
    pool = HostPool(torch.device("cpu"), ledger, "activations", 100_000)
    pool.reserve()
    assert pool.arena_bytes == 98304
    pool.give_back(pool.take(50_000))
    pool.consolidate()
    assert pool.arena_bytes == 98304
    with pytest.raises(BudgetError, match=r"their host_memory allows 97.*; raise it to at least 216"):
        pool.take(120_000)


def test_the_budget_is_kept_to() -> None:
    pool, _ = make(8192)
    pool.take(4000)
    with pytest.raises(BudgetError, match="activations need"):
        pool.take(8000)
    pool.take(4000)


def test_what_is_not_kept_has_come_back() -> None:
    pool, _ = make()
    slabs = [pool.take(size) for size in (5000, 70_000, 300, 12_000, 256)]
    kept = slabs[1:4:2]
    pool.keep(kept)
    assert pool.held_bytes == sum(aligned(slab.memory.nbytes) for slab in kept)
    assert sum(end - begin for ranges in pool._free for begin, end in ranges) == pool.arena_bytes - pool.held_bytes
    for slab in kept:
        pool.give_back(slab)
    assert [len(ranges) for ranges in pool._free] == [1] * len(pool._free)
