"""How do blocks that rest on disk come to the device? In chunks, through a ring of pinned host memory, ahead of use.

Two threads take one fetch after the other: the first submits reads of files into chunks of the ring; the second gets a
fetch when its block's onload was asked for, waits for its reads and submits the copies to the device. A chunk is used
again when the copy that reads it has passed. Fetches that nobody asked for yet are guesses of the plan: what is read of
all of them together fits into the ring (of the last one maybe a part; the rest follows when it is asked for), and they
are withdrawn when another block is wanted before them, so no fetch waits for a chunk that only a later one would free.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch

from millrace.engine.meter import Meter
from millrace.errors import StateError
from millrace.memory.disk import Slot, StagingRing
from millrace.runtime.lanes import Copy, Event, Lane, Lanes, Tick, Transfer

__all__ = ["Fetch", "Fetching", "Piece", "Target"]


class ReadEvent(Event, Protocol):
    """The end of a read, and when it began and ended, in seconds of one clock."""

    def began_at(self) -> float: ...

    def reached_at(self) -> float: ...


@dataclass(frozen=True)
class Piece:
    """What one read brings, and where it belongs."""

    read: Callable[[torch.Tensor], ReadEvent]  # submits a read into a chunk, from its first byte on
    nbytes: int  # that are read
    parts: tuple[tuple[int, int, int], ...]  # (first byte in the chunk, bytes, first byte in the block)

    def copies(self, chunk: torch.Tensor, buffer: torch.Tensor) -> list[Copy]:
        """From the chunk to the block's buffer."""
        return [(buffer[to : to + nbytes], chunk[begin : begin + nbytes]) for begin, nbytes, to in self.parts]


@dataclass(frozen=True)
class Target:
    """Where a fetched block goes."""

    buffer: torch.Tensor
    after: Event  # the buffer may be written from then on
    more: Sequence[Copy]  # what homes hold that is not in the files; copied last


@dataclass
class Fetch:
    """One block on its way from disk."""

    pieces: Sequence[Piece]
    nbytes: int  # of the block
    contents: object  # of its homes when the fetch was submitted
    before: Callable[[], None]  # to be done ahead of the first read
    submit_read: "Callable[[Fetch, int, int], None]" = field(init=False)  # has `read` called with these pieces
    submit_send: "Callable[[Fetch], None]" = field(init=False)
    arrived: "Future[Transfer]" = field(default_factory=Future)
    withdrawn: bool = False  # nobody wants it any more
    ahead: int = 0  # pieces whose reads were submitted before it was asked for
    _target: Target | None = None
    _asked: bool = False
    _reads: "SimpleQueue[tuple[Piece, Slot, ReadEvent] | BaseException | None]" = field(default_factory=SimpleQueue)
    _all_submitted: bool = False  # or given up
    _has_read: threading.Event = field(default_factory=threading.Event)
    _asking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def ahead_bytes(self) -> int:
        """Bytes whose reads were submitted before it was asked for."""
        return sum(piece.nbytes for piece in self.pieces[: self.ahead])

    def read_ahead(self, pieces: int) -> None:
        """Submits the reads of so many pieces more, if nobody has asked for it yet."""
        with self._asking:  # who asks submits the rest: behind these
            if not self._asked and pieces:
                first, self.ahead = self.ahead, min(self.ahead + pieces, len(self.pieces))
                self.submit_read(self, first, self.ahead)

    def ask(self, target: Target | None) -> bool:
        """Says where it goes; None: nowhere. False if that was said before."""
        with self._asking:
            if self._asked:
                return False
            self._target, self.withdrawn = target, target is None
            self._asked = True
            if self.ahead < len(self.pieces) or not self.pieces:
                self.submit_read(self, self.ahead, len(self.pieces))
        self.submit_send(self)
        return True

    # It is an Event, for those who are about to write the homes.
    def synchronize(self) -> None:
        """The caller waits until homes and files are read no more, whatever came of it. A guess is withdrawn."""
        if not self._has_read.is_set():
            self.ask(None)
            self._has_read.wait()

    def query(self) -> bool:
        """Whether that is so."""
        return self._has_read.is_set()

    # on the two threads of Fetching
    def read(self, ring: StagingRing, first: int, stop: int) -> None:
        """Files into chunks: pieces `first` to `stop`."""
        if self._all_submitted:
            return
        try:
            if not self.withdrawn and first == 0:
                self.before()
            for piece in self.pieces[first:stop]:
                chunk = ring.acquire()
                try:
                    if chunk.free is not None:
                        chunk.free.synchronize()
                    reading = None if self.withdrawn else piece.read(chunk.memory)
                except BaseException:
                    ring.release(chunk, None)
                    raise
                if reading is None:
                    ring.release(chunk, None)
                    break
                self._reads.put((piece, chunk, reading))
            if stop == len(self.pieces) or self.withdrawn:
                self._all_submitted = True
                self._reads.put(None)
        except BaseException as error:
            self._all_submitted = True
            self._reads.put(error)

    def send(self, ring: StagingRing, lanes: Lanes) -> tuple[int, float]:
        """Chunks to the device. What fails reaches whoever waits for the block. Bytes read, and seconds if all were."""
        sent: list[tuple[Tick, Tick]] = []  # begin and end of the copies
        spans: list[tuple[float, float]] = []  # of the reads
        read_bytes = 0
        failed: BaseException | None = None
        while isinstance(item := self._reads.get(), tuple):
            piece, chunk, reading = item
            done: Event | None = None
            try:
                reading.synchronize()
                read_bytes += piece.nbytes
                spans.append((reading.began_at(), reading.reached_at()))
                if self._target is not None and failed is None:
                    sent.append(self._copy(piece.copies(chunk.memory, self._target.buffer), lanes))
                    done = sent[-1][1]
            except BaseException as error:
                failed = failed or error
            ring.release(chunk, done)
        failed = failed or item
        try:
            if self._target is not None and failed is None and (self._target.more or not sent):
                sent.append(self._copy(self._target.more, lanes))
                sent[-1][1].synchronize()  # it reads homes
        except BaseException as error:
            failed = error
        self._target = None  # nothing but the block may keep the buffer alive
        if failed is not None:
            self.arrived.set_exception(failed)
        elif sent:
            self.arrived.set_result(Transfer(Lane.ONLOAD, (), self.nbytes, sent[0][0], sent[-1][1]))
        self._has_read.set()
        return read_bytes, _covered(spans) if len(spans) == len(self.pieces) else 0.0

    def _copy(self, copies: Sequence[Copy], lanes: Lanes) -> tuple[Tick, Tick]:
        if self._target is None:
            raise StateError("a fetch that was withdrawn has nowhere to go")
        transfer = lanes.copy(Lane.ONLOAD, copies, self._target.after)
        return transfer.begun, transfer.done


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans was under way."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


class Fetchable(Protocol):
    """A block that rests on disk."""

    nbytes: int

    @property
    def contents(self) -> object: ...

    def fetch(self, chunk_bytes: int) -> Fetch:
        """The way from disk for what its homes hold now."""


class Fetching:
    """The way from disk for the blocks of one model."""

    def __init__(self, ring: StagingRing, chunks: int, lanes: Lanes, meter: Meter) -> None:
        self._meter = meter
        self._ring = ring
        self._chunks = chunks
        self._lanes = lanes
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="millrace-fetch")
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="millrace-send")
        self._ahead: dict[Fetchable, Fetch] = {}  # in the order of submission: not asked for yet
        self._seconds_per_byte = float("inf")

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take from disk, at the best speed seen; 0.0 before the first fetch."""
        return 0.0 if self._seconds_per_byte == float("inf") else nbytes * self._seconds_per_byte

    def ahead(self, block: Fetchable) -> bool:
        """Submits the fetch of a block whose onload is asked for later, in the order of these calls.

        As much of it as the ring has room for, beside what comes before; more at the next call. False: that was not
        all of it.
        """
        fetch = self._ahead.get(block)
        if fetch is not None and (fetch.withdrawn or fetch.contents != block.contents):
            self._ahead.pop(block).ask(None)
            fetch = None
        room = self._chunks - sum(fetch.ahead for fetch in self._ahead.values())
        if fetch is None:
            if room <= 0:
                return False
            fetch = self._open(block)
            self._ahead[block] = fetch
        if fetch.ahead < len(fetch.pieces):
            fetch.read_ahead(room)
        return fetch.ahead == len(fetch.pieces)

    def onload(self, block: Fetchable, target: Target) -> Fetch:
        """The block goes to `target`: as it was fetched ahead, if it has the same contents still; else it is now."""
        fetch = self._ahead.get(block)
        if fetch is not None and fetch.contents == block.contents:
            for earlier in list(self._ahead):  # nobody came for those: they would keep this one waiting
                if earlier is block:
                    break
                self._ahead.pop(earlier).ask(None)
            del self._ahead[block]
            if fetch.ask(target):
                self._meter.fetched_ahead(fetch.ahead_bytes)
                return fetch
        self.withdraw_all()
        fetch = self._open(block)
        fetch.ask(target)
        return fetch

    def withdraw_all(self) -> None:
        """What was fetched ahead is not wanted any more."""
        ahead, self._ahead = self._ahead, {}
        for fetch in ahead.values():
            fetch.ask(None)

    def close(self) -> None:
        """Ends the threads, when what was asked for has arrived."""
        self.withdraw_all()
        self._reader.shutdown(wait=True)
        self._sender.shutdown(wait=True)
        self._ring.close()

    def _open(self, block: Fetchable) -> Fetch:
        """A guess keeps no thread waiting: the second one gets it when it was asked for, or withdrawn."""
        fetch = block.fetch(self._ring.slot_bytes)
        fetch.submit_read, fetch.submit_send = self._submit_read, self._submit_send
        return fetch

    def _submit_read(self, fetch: Fetch, first: int, stop: int) -> None:
        self._reader.submit(fetch.read, self._ring, first, stop)

    def _submit_send(self, fetch: Fetch) -> None:
        self._sender.submit(self._send, fetch)

    def _send(self, fetch: Fetch) -> None:
        nbytes, seconds = fetch.send(self._ring, self._lanes)
        self._meter.fetched(nbytes)
        if seconds > 0:
            self._seconds_per_byte = min(self._seconds_per_byte, seconds / nbytes)
