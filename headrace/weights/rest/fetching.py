"""How do blocks that rest on disk come to the device? In chunks, through a ring of pinned host memory, ahead of use.
Where the CPU is the device, a read goes straight to the block's buffer once the buffer is known.

Two threads take one fetch after the other. The first submits reads of files into chunks of the ring. The second gets a
fetch when its block's onload is asked for, waits for its reads and submits the copies to the device. A chunk is used
again when the copy that reads it is done. Fetches that nobody has asked for yet are guesses of the plan. Their reads
fit into the ring together (the last guess may be read in part; the rest follows when it is asked for). Guesses are
withdrawn when another block is wanted before them, so no fetch waits for a chunk that only a later one would free.
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
from headrace.runtime.spans import covered
from headrace.runtime.threads import Gate, Job, OneThread, wait_asleep
from headrace.weights.meter import Meter
from headrace.weights.rest.reads import DiskRead, ReadEvent

_AT_ONCE = 6  # requests under way before a guess has to wait: a drive has four threads; it may be asked for meanwhile
_ENOUGH_BLOCKS = 3  # the one that computes, the one that arrives, and the next


@dataclass(frozen=True)
class Target:
    """Where a fetched block goes."""

    buffer: torch.Tensor
    after: Event  # the buffer may be written after this
    more: Sequence[Copy]  # copies of homes whose contents are not in the files; made last


@dataclass
class Fetch:
    """One block on its way from disk.

    Ctrl-C may interrupt the thread that asks for it at any instruction. So each of the two threads of `Fetching` keeps
    track of its own progress, and a request that was broken off is made again by whoever waits for or withdraws it.
    """

    pieces: Sequence[DiskRead]
    nbytes: int  # bytes of the block
    generation: int  # the generation of its homes' contents when the fetch was submitted
    before: Callable[[], None]  # called before the first read, on the first thread
    by: "Fetching"
    arrived: "Job[Transfer]" = field(default_factory=Job)
    ahead: int = 0  # pieces whose reads were submitted before it was asked for
    _asked: "dict[str, list[Target | None]]" = field(default_factory=dict)  # the first to ask sets it
    _handed_over: bool = False  # whether both threads were told that it was asked for
    _has_read: Gate = field(default_factory=Gate)
    # used by the two threads alone
    _reads: "SimpleQueue[_Reading | BaseException | None]" = field(default_factory=SimpleQueue)
    _submitted: int = 0  # pieces whose reads were submitted
    _all_submitted: bool = False  # whether all reads were submitted, or the rest given up
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

    def ask(self, target: Target | None) -> bool:
        """Asks for the block at `target`, or withdraws the fetch (None). Returns False if either was done before."""
        mine = [target]
        first = self._asked.setdefault("target", mine) is mine
        if not self._handed_over:
            self.by.submit_read(self, len(self.pieces))
            self.by.submit_send(self)
            self._handed_over = True
        return first

    # A fetch is an Event, for whoever is about to write the homes.
    def synchronize(self) -> None:
        """Blocks until homes and files are no longer read, even if the fetch failed. Withdraws a guess."""
        if not self._has_read.is_open:
            self.ask(None)
            self._has_read.wait()

    def query(self) -> bool:
        """Whether homes and files are no longer read."""
        return self._has_read.is_open

    # called on the two threads of Fetching
    def read(self, ring: StagingRing, stop: int, at_once: "Turns | None") -> None:
        """On the first thread: submits the reads of the pieces before `stop` that were not submitted yet. They go to
        chunks of the ring, or with `at_once` straight to the target if it is known.
        """
        if self._all_submitted:
            return
        try:
            if not self.withdrawn and self._submitted == 0:
                self.before()
            for piece in self.pieces[self._submitted : stop]:
                if self.withdrawn:  # the chunks may be those of later guesses, which are sent behind this one
                    break
                chunk = ring.acquire()
                try:
                    if chunk.free is not None:
                        wait_asleep(chunk.free)
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
        """On the second thread: copies chunks to the device; an error goes to whoever waits for the block.

        Returns the bytes that were read, and the seconds that took; 0.0 if not all pieces were read.
        """
        if self._sending:
            return 0, 0.0
        self._sending = True
        target = self._asked["target"][0]
        sent: list[tuple[Tick, Tick]] = []  # begin and end of the copies
        spans: list[tuple[float, float]] = []  # begin and end of the reads
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
                        wait_asleep(sent[-1][1])
                        done = piece.keep(chunk.memory)
            except BaseException as error:
                failed = failed or error
            ring.release(chunk, done)
        failed = failed or item
        try:
            if target is not None and failed is None and (target.more or landed or not sent):
                sent.append(_copy(target.more, target, pace))
                wait_asleep(sent[-1][1])  # the copy reads homes
        except BaseException as error:
            failed = error
        target = self._asked["target"][0] = None  # nothing but the block may keep the buffer alive
        meter.fetch_bytes += read_bytes  # before anybody learns that the block has arrived, and asks what was read
        if failed is not None:
            self.arrived.set_exception(failed)
        elif sent:
            self.arrived.set_result(Transfer(Lane.ONLOAD, (), self.nbytes, sent[0][0], sent[-1][1]))
        self._has_read.open()
        return read_bytes, covered(spans) if len(spans) == len(self.pieces) else 0.0


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
    """One piece whose read is under way."""

    piece: DiskRead
    chunk: Slot
    event: ReadEvent
    finish: Callable[[], None] | None  # completes a read into the target; None: the read goes to the chunk alone


class Turns:
    """Limits how many reads are under way at once. Used by the one thread that submits them."""

    def __init__(self) -> None:
        self._under_way: deque[ReadEvent] = deque()

    def wait(self) -> None:
        """Blocks until one more read may be submitted."""
        while len(self._under_way) >= _AT_ONCE:
            self._under_way.popleft().settle()

    def take(self, reading: ReadEvent) -> None:
        """Counts a read that was submitted."""
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        self._under_way.append(reading)


def _copy(copies: Sequence[Copy], target: Target, pace: Pace) -> tuple[Tick, Tick]:
    transfer = pace.copy(Lane.ONLOAD, copies, target.after)
    return transfer.begun, transfer.done


class Fetchable(Protocol):
    """A block that rests on disk, or a part of one. `nbytes` is its size on the device."""

    @property
    def nbytes(self) -> int: ...

    def look(self) -> int:
        """The generation of its homes' contents now."""

    def fetch(self, by: "Fetching") -> Fetch:
        """A new fetch of its homes' present contents, in chunks of `by`."""


class Fetching:
    """Fetches the blocks of one model from disk."""

    def __init__(self, ring: StagingRing, chunks: int, pace: Pace, meter: Meter) -> None:
        self._meter = meter
        self._ring = ring
        self.chunk_bytes = ring.slot_bytes
        self._chunks = chunks
        self._pace = pace
        self._turns = None if is_accelerator(pace.lanes.device) else Turns()
        self._reader = OneThread("headrace-fetch", pace.lanes.device)
        self._sender = OneThread("headrace-send", pace.lanes.device)
        self._ahead: dict[Fetchable, Fetch] = {}  # guesses, in the order of submission
        self._promised: set[int] = set()  # the ids of fetches that another thread will ask for
        self._seconds_per_byte = float("inf")

    def seconds(self, nbytes: int) -> float:
        """How long reading `nbytes` from disk takes at the best speed seen; 0.0 before the first fetch."""
        return 0.0 if self._seconds_per_byte == float("inf") else nbytes * self._seconds_per_byte

    def ahead(self, block: Fetchable, device_bytes: int) -> bool:
        """Submits the fetch of a block whose onload will be asked for later, in the order of these calls.

        It reads as much as the ring has room for beside the earlier guesses, and more at the next call. Returns whether
        all of the block is submitted.

        `device_bytes`: what blocks may take on the device. If that is the CPU and has room for several blocks, nothing
        is fetched ahead: the drive is busy without guesses, and blocks that are asked for are read into their buffers.
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
        if room and fetch.ahead < len(fetch.pieces):
            fetch.ahead = min(fetch.ahead + room, len(fetch.pieces))
            self.submit_read(fetch, fetch.ahead)
        return fetch.ahead == len(fetch.pieces)

    def onload(self, block: Fetchable, target: Target) -> Fetch:
        """Brings the block to `target`: by its guess if the homes have not changed since, else by a new fetch."""
        fetch = self._ahead.get(block)
        if fetch is not None and fetch.generation == block.look():
            # Earlier guesses, which nobody asked for, would keep it waiting. So would later ones if a part of it is
            # still to be read: after Ctrl-C it may not be the last guess.
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
        """A fetch that another thread will ask for, and then give to `kept`. Nothing is fetched ahead until then:
        guesses could take the chunks that this fetch needs.
        """
        self.withdraw_all()
        fetch = block.fetch(self)
        self._promised.add(id(fetch))
        return fetch

    def kept(self, fetch: Fetch) -> None:
        """Ends a promise: the fetch has arrived, or is no longer wanted. Called on the thread that asked for it."""
        self._promised.discard(id(fetch))

    def withdraw_all(self) -> None:
        """Withdraws all guesses."""
        for block in list(self._ahead):
            self._withdraw(block)

    def close(self) -> None:
        """Withdraws all guesses, and ends both threads once everything that was asked for has arrived."""
        self.withdraw_all()
        self._reader.shutdown(wait=True)
        self._sender.shutdown(wait=True)
        self._ring.close()

    def _withdraw(self, block: Fetchable) -> None:
        self._ahead[block].ask(None)
        del self._ahead[block]  # after that: else Ctrl-C between the two would leak its chunks

    def packing_pays(self) -> bool:
        """Whether reading packed bytes pays: unpacking, which goes on beside reading, is well faster than the drive."""
        return 0 < self._seconds_per_byte < float("inf") and unpacking_speed() * self._seconds_per_byte > TIMES_AS_FAST

    def submit_read(self, fetch: Fetch, stop: int) -> None:
        """Has the first thread read the pieces before `stop`. Asking twice for the same does no harm."""
        self._reader.submit(fetch.read, self._ring, stop, None if self._pace.is_limited else self._turns)

    def submit_send(self, fetch: Fetch) -> None:
        """Has the second thread send the fetch to the device. Asking twice for the same does no harm."""
        self._sender.submit(self._send, fetch)

    def _send(self, fetch: Fetch) -> None:
        nbytes, seconds = fetch.send(self._ring, self._pace, self._meter)
        if seconds > 0:
            self._seconds_per_byte = min(self._seconds_per_byte, seconds / nbytes)
