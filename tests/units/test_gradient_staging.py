"""When does the host wait for staging memory? When a gradient would lie where additions under way still read."""

import mmap
from concurrent.futures import Future
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from headrace.memory.ledger import Ledger, Tier
from headrace.weights.movement.staging import Additions, Staging

BLOCK_BYTES, PARTS = 4096, 4


class Watched(Additions):
    """Additions that read these bytes until somebody waits for them."""

    def __init__(self, first: int, last: int) -> None:
        job: Future[list[Any]] = Future()
        job.set_result([])
        super().__init__(job)
        self.first, self.last, self.is_over = first, last, False

    def synchronize(self) -> None:
        super().synchronize()
        self.is_over = True


@pytest.fixture
def staging() -> Staging:
    ring = Staging(torch.device("cpu"), Ledger(), None)
    ring.grow(BLOCK_BYTES)
    return ring


def sent(staging: Staging, nbytes: int, page: int | None = None) -> Watched:
    """One gradient is carved, and its transfer submitted."""
    assert staging.fits(nbytes, page)
    memory = staging.carve(torch.empty(nbytes, dtype=torch.uint8), page)
    additions = Watched(memory.data_ptr(), memory.data_ptr() + nbytes)
    staging.sent(additions)
    return additions


def test_gradients_of_two_blocks_are_under_way_at_once(staging: Staging) -> None:
    """In as many transfers as there are parameters."""
    transfers = [sent(staging, BLOCK_BYTES // PARTS) for _ in range(2 * PARTS)]
    assert not any(one.is_over for one in transfers)
    sent(staging, BLOCK_BYTES // PARTS)
    assert [one.is_over for one in transfers] == [True] + [False] * (2 * PARTS - 1)
    staging.wait()
    assert all(one.is_over for one in transfers)


def test_a_transfer_is_not_cut_at_the_end_of_the_ring(staging: Staging) -> None:
    """It begins at the start where the rest is too short for it."""
    first = sent(staging, BLOCK_BYTES)
    second = sent(staging, BLOCK_BYTES // PARTS)
    staging.coming_bytes = BLOCK_BYTES
    for _ in range(PARTS):
        assert staging.fits(BLOCK_BYTES // PARTS, None)
        staging.carve(torch.empty(BLOCK_BYTES // PARTS, dtype=torch.uint8), None)
    assert first.is_over
    assert not second.is_over


def test_memory_is_that_of_two_blocks() -> None:
    ledger = Ledger()
    staging = Staging(torch.device("cpu"), ledger, None)
    staging.grow(BLOCK_BYTES)
    missing_bytes = staging.missing_bytes
    sent(staging, BLOCK_BYTES)
    assert ledger.held_bytes(Tier.HOST) == 2 * BLOCK_BYTES <= missing_bytes
    assert not staging.missing_bytes


def test_a_ring_that_could_not_be_made_is_made_the_next_time(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("headrace.weights.movement.staging.Arena", no_memory)
        with pytest.raises(MemoryError):
            sent(staging, BLOCK_BYTES)
    assert not sent(staging, BLOCK_BYTES).is_over


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 2 * BLOCK_BYTES), st.none() | st.integers(0, 20_000)), min_size=1),
            st.integers(0, 3 * BLOCK_BYTES),
        ),
        max_size=12,
    )
)
def test_nothing_lies_where_additions_still_read(transfers: list[tuple[list[tuple[int, int | None]], int]]) -> None:
    staging = Staging(torch.device("cpu"), Ledger(), None)
    staging.grow(BLOCK_BYTES)
    under_way: list[Watched] = []
    carved: list[tuple[int, int]] = []

    def send() -> None:
        under_way.append(Watched(carved[0][0], carved[-1][1]))
        staging.sent(under_way[-1])
        carved.clear()

    for pieces, coming_bytes in transfers:
        staging.coming_bytes = coming_bytes
        for nbytes, page in pieces:
            if not staging.fits(nbytes, page):
                send()
            memory = staging.carve(torch.empty(nbytes, dtype=torch.uint8), page)
            first, last = memory.data_ptr(), memory.data_ptr() + nbytes
            assert page is None or first % mmap.PAGESIZE == page % mmap.PAGESIZE
            assert all(last <= begin or end <= first for begin, end in carved)
            assert all(one.is_over or last <= one.first or one.last <= first for one in under_way)
            memory.fill_(1)
            carved.append((first, last))
        send()
