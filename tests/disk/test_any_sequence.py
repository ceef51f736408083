"""Does a store stay equal to a dict of bytes under any sequence of writes, reads, mapping, waiting and closing?"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import StateError
from headrace.memory.arena import Arena
from headrace.memory.disk import DISK_ALIGNMENT_BYTES, DiskStore, Extent, Request, store
from headrace.memory.ledger import Ledger, Tier

PAGE = DISK_ALIGNMENT_BYTES
PIECE_BYTES = 4 * PAGE  # of one request here: few bytes in many pieces
SIZES = st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([PIECE_BYTES, PIECE_BYTES + 1, 9 * PIECE_BYTES + 2 * PAGE]))


@dataclass
class Known:
    """What an extent must hold, and whether its mapping may be touched."""

    extent: Extent
    content: torch.Tensor
    mapping: torch.Tensor | None = None
    mapped: bool = False


class StoreAgainstDict(RuleBasedStateMachine):
    """Requests are left in flight: only the rules that say so wait for them."""

    @initialize()
    def begin(self) -> None:
        self.small_pieces = mock.patch.object(store, "PIECE_BYTES", PIECE_BYTES)
        self.small_pieces.start()
        self.directory = tempfile.TemporaryDirectory(prefix="headrace-test-")
        self.ledger = Ledger()
        self.store = DiskStore(self.directory.name, self.ledger)
        self.known: list[Known] = []
        self.reads: list[tuple[Request, torch.Tensor, torch.Tensor]] = []  # request, what came, what should come
        self.seed = 0

    def random(self, nbytes: int, *, aligned: bool) -> torch.Tensor:
        self.seed += 1
        room = Arena(nbytes + 1, torch.device("cpu"), self.ledger, "test").tensor(0, nbytes + 1)
        memory = room[:nbytes] if aligned else room[1:]
        return memory.random_(0, 256, generator=torch.Generator().manual_seed(self.seed))

    def chosen(self, number: int) -> Known:
        return self.known[number % len(self.known)]

    @rule(nbytes=SIZES)
    def allocate(self, nbytes: int) -> None:
        extent = self.store.allocate(f"w{len(self.known)}", nbytes, "weights", PIECE_BYTES)
        content = self.random(nbytes, aligned=True)
        self.store.write(extent, content.clone())
        self.known.append(Known(extent, content))

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0), at=st.floats(0, 1), part=st.floats(0, 1), aligned=st.booleans(), whole=st.booleans())
    def write(self, number: int, at: float, part: float, aligned: bool, whole: bool) -> None:
        known = self.chosen(number)
        if known.mapped:
            self.hand_to_direct(number)
        nbytes = known.extent.nbytes
        offset = 0 if whole else int(at * nbytes)
        source = self.random(nbytes if whole else int(part * (nbytes - offset)), aligned=aligned)
        known.content[offset : offset + source.nbytes] = source
        self.store.write(known.extent, source, offset)

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0), at=st.floats(0, 1), part=st.floats(0, 1), aligned=st.booleans())
    def read(self, number: int, at: float, part: float, aligned: bool) -> None:
        known = self.chosen(number)
        if known.mapped:
            self.hand_to_direct(number)
        offset = int(at * known.extent.nbytes)
        destination = self.random(int(part * (known.extent.nbytes - offset)), aligned=aligned)
        expected = known.content[offset : offset + destination.nbytes].clone()
        self.reads.append((self.store.read(known.extent, destination, offset), destination, expected))

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0), value=st.integers(0, 255))
    def write_through_the_mapping(self, number: int, value: int) -> None:
        known = self.chosen(number)
        self.store.to_mapping(known.extent).synchronize()
        known.mapping, known.mapped = self.store.mapping(known.extent), True
        assert torch.equal(known.mapping, known.content)
        known.mapping[::3] = value
        known.content[::3] = value

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0))
    def hand_to_direct(self, number: int) -> None:
        known = self.chosen(number)
        self.store.to_direct(known.extent)
        known.mapped = False

    @rule()
    def wait_for_reads(self) -> None:
        for request, destination, expected in self.reads:
            request.synchronize()
            assert torch.equal(destination, expected)
        self.reads.clear()

    @rule()
    def wait_for_all(self) -> None:
        self.store.synchronize()
        assert all(request.query() for request, _, _ in self.reads)

    @rule()
    def close(self) -> None:
        """All that was submitted is done; mappings stay; the directory is free for the next store."""
        self.store.close()
        assert all(request.query() for request, _, _ in self.reads)
        self.wait_for_reads()
        for known in self.known:
            if known.mapping is not None:
                assert torch.equal(known.mapping, known.content)
            with pytest.raises(StateError):
                self.store.read(known.extent, known.content)
        assert list(Path(self.directory.name).iterdir()) == []
        self.known.clear()
        self.store = DiskStore(self.directory.name, self.ledger)

    @invariant()
    def every_byte_is_booked(self) -> None:
        held = sum(known.extent.capacity_bytes for known in self.known)
        assert self.ledger.held_bytes(Tier.DISK) == self.store.nbytes == held

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.close()
            self.store.close()
            self.directory.cleanup()
            self.small_pieces.stop()


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(max_examples=25, stateful_step_count=25)
