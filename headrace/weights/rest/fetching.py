"""How do blocks that rest on disk come to the device? In chunks, through a ring of pinned host memory, ahead of use.
Where the CPU is the device, they are read to where they belong, as soon as that is known.

Two threads take one fetch after the other: the first submits reads of files into chunks of the ring; the second gets a
fetch when its block's onload was asked for, waits for its reads and submits the copies to the device. A chunk is used
again when the copy that reads it has passed. Fetches that nobody asked for yet are guesses of the plan: what is read of
all of them together fits into the ring (of the last one maybe a part; the rest follows when it is asked for), and they
are withdrawn when another block is wanted before them, so no fetch waits for a chunk that only a later one would free.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch

from headrace.memory.disk import Slot, StagingRing
from headrace.memory.packed import unpack_in_place, unpacking_speed
from headrace.planning.cost.packing import TIMES_AS_FAST
from headrace.runtime.device import is_accelerator
from headrace.runtime.lanes import Copy, Event, Lane, Tick, Transfer
from headrace.runtime.pace import Pace
from headrace.runtime.threads import Gate, Job, OneThread
from headrace.weights.meter import Meter
from headrace.weights.rest.reads import DiskRead, ReadEvent

__all__ = ["Fetch", "Fetchable", "Fetching", "Target"]

_AT_ONCE = 6  # requests, before a guess is read for a drive that has four threads: it may be asked for meanwhile
_ENOUGH_BLOCKS = 3  # one that computes, one that comes, and the next


@dataclass(frozen=True)
class Target:
    """Where a fetched block goes."""

    buffer: torch.Tensor
    after: Event  # the buffer may be written from then on
    more: Sequence[Copy]  # what homes hold that is not in the files; copied last


@dataclass
class Fetch:
    """One block on its way from disk.

    Ctrl-C may strike whoever asks for it at any instruction. So both threads know for themselves how far they are:
    what was broken off is asked for again, by whoever waits for the fetch or withdraws it.
    """

    pieces: Sequence[DiskRead]
    nbytes: int  # of the block
    generation: int  # of what its homes held when the fetch was submitted
    before: Callable[[], None]  # to be done ahead of the first read
    by: "Fetching"
    arrived: "Job[Transfer]" = field(default_factory=Job)
    ahead: int = 0  # pieces whose reads were submitted before it was asked for
    _asked: "dict[str, list[Target | None]]" = field(default_factory=dict)  # whoever is first sets it, at one stroke
    _handed_over: bool = False  # both threads know that it was asked for
    _has_read: Gate = field(default_factory=Gate)
    # the threads' own
    _reads: "SimpleQueue[_Reading | BaseException | None]" = field(default_factory=SimpleQueue)
    _submitted: int = 0  # pieces whose reads were submitted
    _all_submitted: bool = False  # or given up
    _sending: bool = False

    @property
    def is_guess(self) -> bool:
        """Whether nobody has asked for it yet."""
        return not self._asked

    @property
    def withdrawn(self) -> bool:
        """Whether nobody wants it any more."""
        return bool(self._asked) and self._asked["target"][0] is None

    @property
    def ahead_bytes(self) -> int:
        """Bytes whose reads were submitted before it was asked for."""
        return sum(piece.nbytes for piece in self.pieces[: self.ahead])

    def read_ahead(self, pieces: int) -> None:
        """Submits the reads of so many pieces more, if nobody has asked for it yet."""
        if self.is_guess and pieces:
            self.ahead = min(self.ahead + pieces, len(self.pieces))
            self.by.submit_read(self, self.ahead)

    def ask(self, target: Target | None) -> bool:
        """Says where it goes; None: nowhere. False if that was said before."""
        mine = [target]
        first = self._asked.setdefault("target", mine) is mine
        if not self._handed_over:
            self.by.submit_read(self, len(self.pieces))
            self.by.submit_send(self)
            self._handed_over = True
        return first

    # It is an Event, for those who are about to write the homes.
    def synchronize(self) -> None:
        """The caller waits until homes and files are read no more, whatever came of it. A guess is withdrawn."""
        if not self._has_read.is_open:
            self.ask(None)
            self._has_read.wait()

    def query(self) -> bool:
        """Whether that is so."""
        return self._has_read.is_open

    # on the two threads of Fetching
    def read(self, ring: StagingRing, stop: int, at_once: "Turns | None") -> None:
        """Files into chunks, or with `at_once` into the target where it is known: the pieces up to `stop` that were
        not read yet.
        """
        if self._all_submitted:
            return
        try:
            if not self.withdrawn and self._submitted == 0:
                self.before()
            for piece in self.pieces[self._submitted : stop]:
                chunk = ring.acquire()
                try:
                    if chunk.free is not None:
                        chunk.free.synchronize()
                    reading = self._submit(piece, chunk, at_once)
                except BaseException:
                    ring.release(chunk, None)
                    raise
                if reading is None:
                    ring.release(chunk, None)
                    break
                self._submitted += 1
                self._reads.put(reading)
            if self._submitted == len(self.pieces) or self.withdrawn:
                self._all_submitted = True
                self._reads.put(None)
        except BaseException as error:
            self._all_submitted = True
            self._reads.put(error)

    def _submit(self, piece: DiskRead, chunk: Slot, at_once: "Turns | None") -> "_Reading | None":
        if at_once is not None and not self._asked:
            at_once.wait()
        target = self._asked["target"][0] if self._asked else None
        if self.withdrawn:
            return None
        reading = finish = None
        if at_once is not None and target is not None and target.after.query():
            reading, finish = piece.read_into(chunk.memory, target.buffer) or (None, None)
        reading = piece.read(chunk.memory) if reading is None else reading
        if at_once is not None:
            at_once.take(reading)
        return _Reading(piece, chunk, reading, finish)

    def send(self, ring: StagingRing, pace: Pace, meter: Meter) -> tuple[int, float]:
        """Chunks to the device. What fails reaches whoever waits for the block. Bytes read, and seconds if all were."""
        if self._sending:
            return 0, 0.0
        self._sending = True
        target = self._asked["target"][0]
        sent: list[tuple[Tick, Tick]] = []  # begin and end of the copies
        spans: list[tuple[float, float]] = []  # of the reads
        read_bytes = 0
        failed: BaseException | None = None
        landed = False
        while isinstance(item := self._reads.get(), _Reading):
            piece, chunk, reading = item.piece, item.chunk, item.event
            done: Event | None = None
            try:
                reading.synchronize()
                read_bytes += piece.nbytes
                spans.append((reading.began_at(), reading.reached_at()))
                if target is not None and failed is None and item.finish is not None:
                    if not sent:
                        sent.append(_copy((), target, pace))
                    item.finish()
                    landed = True
                elif target is not None and failed is None:
                    sent.append(_send(piece, chunk.memory, target, pace, meter))
                    done = sent[-1][1]
                    if piece.keep is not None:
                        sent[-1][1].synchronize()
                        done = piece.keep(chunk.memory)
            except BaseException as error:
                failed = failed or error
            ring.release(chunk, done)
        failed = failed or item
        try:
            if target is not None and failed is None and (target.more or landed or not sent):
                sent.append(_copy(target.more, target, pace))
                sent[-1][1].synchronize()  # it reads homes
        except BaseException as error:
            failed = error
        target = self._asked["target"][0] = None  # nothing but the block may keep the buffer alive
        if failed is not None:
            self.arrived.set_exception(failed)
        elif sent:
            self.arrived.set_result(Transfer(Lane.ONLOAD, (), self.nbytes, sent[0][0], sent[-1][1]))
        self._has_read.open()
        return read_bytes, _covered(spans) if len(spans) == len(self.pieces) else 0.0


def _send(piece: DiskRead, chunk: torch.Tensor, target: Target, pace: Pace, meter: Meter) -> tuple[Tick, Tick]:
    if not piece.plain_bytes:
        return _copy(piece.copies(chunk, target.buffer), target, pace)
    meter.packed_bytes += piece.nbytes
    meter.unpacked_bytes += piece.plain_bytes
    if target.buffer.device.type == "cpu" and not pace.is_limited and piece.has_whole_words:
        begun, _ = _copy((), target, pace)
        target.after.synchronize()
        piece.unpack(chunk, target.buffer)
        return begun, _copy((), target, pace)[1]
    unpack_in_place(chunk, len(chunk) - piece.nbytes)
    return _copy(piece.copies(chunk, target.buffer), target, pace)


@dataclass(frozen=True)
class _Reading:
    """One piece on its way."""

    piece: DiskRead
    chunk: Slot
    event: ReadEvent
    finish: Callable[[], None] | None  # of a read into the target; None: it goes to the chunk alone


class Turns:
    """How many reads a drive has at once, for one thread that submits them."""

    def __init__(self) -> None:
        self._under_way: deque[ReadEvent] = deque()

    def wait(self) -> None:
        """Until one more may be submitted."""
        while len(self._under_way) >= _AT_ONCE:
            self._under_way.popleft().settle()

    def take(self, reading: ReadEvent) -> None:
        """It was submitted."""
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        self._under_way.append(reading)


def _copy(copies: Sequence[Copy], target: Target, pace: Pace) -> tuple[Tick, Tick]:
    transfer = pace.copy(Lane.ONLOAD, copies, target.after)
    return transfer.begun, transfer.done


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans was under way."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


class Fetchable(Protocol):
    """A block that rests on disk, or a part of it; `nbytes`: what that takes on the device."""

    @property
    def nbytes(self) -> int: ...

    def look(self) -> int:
        """The generation of what its homes hold."""

    def fetch(self, by: "Fetching") -> Fetch:
        """What brings from disk what its homes hold now, in chunks of `by`."""


class Fetching:
    """The way from disk for the blocks of one model."""

    def __init__(self, ring: StagingRing, chunks: int, pace: Pace, meter: Meter) -> None:
        self._meter = meter
        self._ring = ring
        self.chunk_bytes = ring.slot_bytes
        self._chunks = chunks
        self._pace = pace
        self._turns = None if is_accelerator(pace.lanes.device) else Turns()
        self._reader = OneThread("headrace-fetch", pace.lanes.device)
        self._sender = OneThread("headrace-send", pace.lanes.device)
        self._ahead: dict[Fetchable, Fetch] = {}  # in the order of submission: not asked for yet
        self._promised: set[int] = set()  # the ids of those that another thread will ask for
        self._seconds_per_byte = float("inf")

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take from disk, at the best speed seen; 0.0 before the first fetch."""
        return 0.0 if self._seconds_per_byte == float("inf") else nbytes * self._seconds_per_byte

    def ahead(self, block: Fetchable, device_bytes: int) -> bool:
        """Submits the fetch of a block whose onload is asked for later, in the order of these calls.

        Blocks may take `device_bytes`: where the CPU is the device and has room for several, the drive is busy without
        guesses, and what is asked for is read to where it belongs.

        As much of it as the ring has room for, beside what comes before; more at the next call. False: that was not
        all of it.
        """
        if self._promised or (self._turns is not None and device_bytes >= _ENOUGH_BLOCKS * block.nbytes):
            return False
        fetch = self._ahead.get(block)
        if fetch is not None and not (fetch.is_guess and fetch.generation == block.look()):
            self._withdraw(block)
            fetch = None
        room = self._chunks - sum(fetch.ahead for fetch in self._ahead.values())
        if fetch is None:
            if room <= 0:
                return False
            self._ahead[block] = fetch = block.fetch(self)
        if fetch.ahead < len(fetch.pieces):
            fetch.read_ahead(room)
        return fetch.ahead == len(fetch.pieces)

    def onload(self, block: Fetchable, target: Target) -> Fetch:
        """The block goes to `target`: as it was fetched ahead, if its homes hold the same still; else it is now."""
        fetch = self._ahead.get(block)
        if fetch is not None and fetch.generation == block.look():
            # Those before it, which nobody came for, would keep it waiting; so would those behind it, where a rest of
            # it is still to be read: after Ctrl-C it may not be the last one.
            others, at = list(self._ahead), list(self._ahead).index(block)
            for other in others[:at] if fetch.ahead == len(fetch.pieces) else others[:at] + others[at + 1 :]:
                self._withdraw(other)
            if fetch.ask(target):
                del self._ahead[block]
                self._meter.ahead_bytes += fetch.ahead_bytes
                return fetch
        self.withdraw_all()
        fetch = block.fetch(self)
        fetch.ask(target)
        return fetch

    def promise(self, block: Fetchable) -> Fetch:
        """What another thread asks for later, and then gives to `kept`: until then nothing is fetched ahead, as guesses
        could take the chunks that it needs.
        """
        self.withdraw_all()
        fetch = block.fetch(self)
        self._promised.add(id(fetch))
        return fetch

    def kept(self, fetch: Fetch) -> None:
        """It has arrived, or is not wanted any more."""
        self._promised.discard(id(fetch))

    def withdraw_all(self) -> None:
        """What was fetched ahead is not wanted any more."""
        for block in list(self._ahead):
            self._withdraw(block)

    def close(self) -> None:
        """Ends the threads, when what was asked for has arrived."""
        self.withdraw_all()
        self._reader.shutdown(wait=True)
        self._sender.shutdown(wait=True)
        self._ring.close()

    def _withdraw(self, block: Fetchable) -> None:
        self._ahead[block].ask(None)
        del self._ahead[block]  # not before: Ctrl-C would leave its chunks to nobody

    def packing_pays(self) -> bool:
        """Whether reading less is worth unpacking: both go on side by side, the latter well ahead of the drive."""
        return 0 < self._seconds_per_byte < float("inf") and unpacking_speed() * self._seconds_per_byte > TIMES_AS_FAST

    def submit_read(self, fetch: Fetch, stop: int) -> None:
        """Has the first thread read the pieces up to `stop`. It may be told the same twice."""
        self._reader.submit(fetch.read, self._ring, stop, None if self._pace.is_limited else self._turns)

    def submit_send(self, fetch: Fetch) -> None:
        """Has the second thread send it. It may be told the same twice."""
        self._sender.submit(self._send, fetch)

    def _send(self, fetch: Fetch) -> None:
        nbytes, seconds = fetch.send(self._ring, self._pace, self._meter)
        self._meter.fetch_bytes += nbytes
        if seconds > 0:
            self._seconds_per_byte = min(self._seconds_per_byte, seconds / nbytes)
