"""What did a run move, and where did its time go? Counters, and ticks from which seconds are computed afterwards."""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from headrace.memory.disk import Access, DiskLog
from headrace.memory.ledger import Ledger
from headrace.planning import Phase
from headrace.runtime.lanes import CollectiveLane, Lane, Lanes, LateTransfer, Tick, Transfer
from headrace.runtime.link import LaneUse, LinkSpeed
from headrace.runtime.spans import Moved, Sample, Span, Waited, cut_by, spans_of


@dataclass
class VisitRecord:
    """One visit as it happened: its blocks, its phase, and the compute lane's ticks around the wait for its blocks."""

    blocks: tuple[int, ...]
    phase: Phase
    name: str
    asked: Tick  # when compute had finished what came before
    began: Tick  # when the blocks had arrived, too
    other_bytes_so_far: int = 0  # `LaneUse.unplanned_bytes` until then
    sample: Sample | None = None  # what was held when the host came to the visit


@dataclass(frozen=True)
class Timing:
    """Seconds of one visit."""

    stall_seconds: float
    compute_seconds: float


class _Cycle(NamedTuple):
    """A cycle for reports. The host began it `began_at`, and the next one `next_began_at` (`time.perf_counter`)."""

    site: str
    visits: list[VisitRecord]
    end: Tick
    began_at: float
    next_began: Tick | None = None
    next_began_at: float = math.inf


class Checkpointed(Protocol):
    """A checkpoint of the model that is being saved, or was."""

    @property
    def nbytes(self) -> int: ...

    @property
    def seconds(self) -> float:
        """The seconds that writing it took."""

    @property
    def waited_seconds(self) -> float:
        """The seconds that updates waited for it."""


@dataclass
class Counts:
    """What was moved and used since the last reset; `Stats` explains each count."""

    onloads: int = 0
    demand_onloads: int = 0
    onload_bytes: int = 0
    offload_bytes: int = 0
    fetch_bytes: int = 0
    spill_bytes: int = 0
    row_bytes: int = 0
    packed_bytes: int = 0
    unpacked_bytes: int = 0
    onload_packed_bytes: int = 0
    onload_unpacked_bytes: int = 0
    expert_bytes: int = 0
    expert_loads: int = 0
    expert_uses: int = 0
    expert_host_loads: int = 0
    expert_kept_bytes: int = 0
    cache_onload_bytes: int = 0
    cache_offload_bytes: int = 0
    micro_batches_together: int = 0
    micro_batches_in_turn: int = 0
    steps: int = 0
    skipped_steps: int = 0


class Meter(Counts):
    """Counts what moves. Reads seconds from ticks a few cycles later, when that waits for nothing."""

    def __init__(self, lanes: Lanes, ledger: Ledger | None = None) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._unread: deque[tuple[list[VisitRecord], Tick, Callable[[list[Timing]], None] | None]] = deque()
        self.last_cycle: _Cycle | None = None  # of the module on whose calls most visits were, as reports show it
        self._visits: Counter[str] = Counter()  # by the module that was called
        self.last_transfers: deque[Moved] = deque(maxlen=1024)
        self.known_loads: list[tuple[int, float]] = []  # bytes and seconds of loads to the device in another process
        self.lane_use = LaneUse()
        self.disk_log = DiskLog()
        self._cycle_began_at = 0.0  # seconds of `time.perf_counter`
        self.reset()

    def reset(self) -> None:
        """Sets all counters to zero."""
        super().__init__()
        self.ahead_bytes = 0  # bytes whose reads from disk began before an onload asked for them
        self._stall_seconds = self._compute_seconds = 0.0
        self._unread.clear()
        self._saved = (0, 0.0, 0.0)  # bytes, seconds and seconds waited of earlier checkpoints
        self._saving: Checkpointed | None = None  # the last checkpoint

    def counts(self) -> dict[str, Any]:
        """All counts by their names in `Stats`, those of checkpoints too."""
        found = {field.name: getattr(self, field.name) for field in fields(Counts)}
        return found | dict(
            zip(("saved_bytes", "save_seconds", "save_wait_seconds"), self._saved_so_far(), strict=True)
        )

    def checkpoint_begun(self, saving: Checkpointed) -> None:
        """Called when the saving of a checkpoint begins; earlier ones have ended."""
        self._saved, self._saving = self._saved_so_far(), saving

    def _saved_so_far(self) -> tuple[int, float, float]:
        nbytes, seconds, waited_seconds = self._saved
        if self._saving is None:
            return self._saved
        last = self._saving
        return nbytes + last.nbytes, seconds + last.seconds, waited_seconds + last.waited_seconds

    def onloaded(self, nbytes: int) -> None:
        """Called when the onload of a block was submitted."""
        self.onloads += 1
        self.onload_bytes += nbytes
        self.lane_use.weights_bytes += nbytes

    def rows_onloaded(self, nbytes: int) -> None:
        """Called when the onload of rows of a table was submitted."""
        self.onloaded(nbytes)
        self.lane_use.parts_bytes += nbytes
        self.row_bytes += nbytes

    def expert_onloaded(self, nbytes: int) -> None:
        """Called when the onload of one expert was submitted."""
        self.onloaded(nbytes)
        self.lane_use.parts_bytes += nbytes
        self.expert_bytes += nbytes
        self.expert_loads += 1

    def cache_onloaded(self, nbytes: int) -> None:
        """Called when a layer of a cache was sent for."""
        self.cache_onload_bytes += nbytes
        self.lane_use.weights_bytes += nbytes
        self.lane_use.parts_bytes += nbytes

    def cache_offloaded(self, nbytes: int) -> None:
        """Called when copies of a layer of a cache to the host were submitted."""
        self.cache_offload_bytes += nbytes

    def gradient_onloaded(self, nbytes: int) -> None:
        """Called when a gradient was sent for, with which the sum of several micro-batches begins."""
        self.onload_bytes += nbytes
        self.lane_use.weights_bytes += nbytes
        self.lane_use.parts_bytes += nbytes

    def arrived(self, transfer: Transfer | LateTransfer, what: str = "") -> None:
        """Keeps a transfer of `what` for timelines and `link`. A block's onload comes when compute waits for it."""
        self.last_transfers.append(Moved(transfer.lane, what, transfer.nbytes, transfer.begun, transfer.done))

    def offloaded(self, transfer: Transfer, what: str = "") -> None:
        """Called when copies of the gradients of `what` to the host were submitted."""
        self.offload_bytes += transfer.nbytes
        self.arrived(transfer, what)

    def spilled(self, nbytes: int) -> None:
        """Called when bytes were written to disk."""
        self.spill_bytes += nbytes

    def cycle_begins(self) -> None:
        """Called when the host begins a cycle."""
        self._cycle_began_at = time.perf_counter()

    def cycle_ended(
        self, visits: list[VisitRecord], end: Tick, site: str, took: Callable[[list[Timing]], None] | None
    ) -> None:
        """Called when a cycle is over, which began with a call of the module `site`.

        Its ticks are read two cycles later, and `took` is called with its timings.
        """
        if visits:
            self._unread.append((visits, end, took))
            self._visits[site] += len(visits)
            last = self.last_cycle
            if last is None or self._visits[site] >= self._visits[last.site]:
                self.last_cycle = _Cycle(site, visits, end, self._cycle_began_at)
            elif last.next_began is None:
                self.last_cycle = last._replace(next_began=visits[0].asked, next_began_at=self._cycle_began_at)
        while len(self._unread) > 2:
            self._read(*self._unread.popleft())

    def seconds(self) -> tuple[float, float]:
        """Stall and compute seconds since the last reset. Waits until the ticks of ended cycles can be read."""
        while self._unread:
            self._read(*self._unread.popleft())
        return self._stall_seconds, self._compute_seconds

    def timings(self, visits: list[VisitRecord], end: Tick) -> list[Timing]:
        """The seconds of each visit of a cycle. Waits until they are known."""
        ticks = [tick for visit in visits for tick in (visit.asked, visit.began)]
        seconds = self._lanes.intervals([*ticks, end])
        return [Timing(*pair) for pair in zip(seconds[::2], seconds[1::2], strict=True)]

    def sample(self) -> Sample | None:
        """What is held now, as the ledger says; None: there is no ledger."""
        if self._ledger is None:
            return None
        held, gradients = self._ledger.held_in_tiers()
        return Sample(0.0, *held, time.time_ns(), *gradients)

    def spans(self, others: Sequence[Moved], waits: Sequence[Waited]) -> list[Span]:
        """Spans of the last cycle, and of copies until the next one, also `others`, cut by `waits`. Waits for them."""
        cycle = self.last_cycle
        if cycle is None:
            return []
        visits, end, first = cycle.visits, cycle.end, cycle.visits[0].asked
        stood = [wait.since(first, self._lanes) for wait in waits]
        spans: list[Span] = []
        for visit, timing in zip(visits, self.timings(visits, end), strict=True):
            begin = self._lanes.seconds(first, visit.asked)
            name = f"{visit.name} {visit.phase.value}"
            if timing.stall_seconds > 0:
                spans.append(Span("compute", "stall", begin, timing.stall_seconds, what=name))
            begin += timing.stall_seconds
            spans += cut_by(stood, name, begin, begin + timing.compute_seconds)
        copies = spans_of((*self.last_transfers, *others), first, self._lanes)
        if cycle.next_began is not None:
            until = self._lanes.seconds(first, cycle.next_began)
            copies = [copy for copy in copies if copy.begin_seconds < until]
        return [*spans, *copies, *self._disk_spans(cycle)]

    def _disk_spans(self, cycle: "_Cycle") -> list[Span]:
        """Spans of what the drive did since the host began the cycle, counted from the tick of its first visit."""
        first, began_at = cycle.visits[0].asked, cycle.began_at
        moves = [move for move in self.disk_log.since(began_at) if move.begun_at < cycle.next_began_at]
        offset = self._lanes.seconds_to_host(first, began_at) if moves else 0.0
        spans = []
        for move in sorted(moves, key=lambda move: move.begun_at):
            name = "fetch" if move.access is Access.READ else "spill"
            begin = max(0.0, offset + move.begun_at - began_at)
            spans.append(Span(name, name, begin, move.ended_at - move.begun_at, move.nbytes, move.what))
        return spans

    def samples(self) -> list[Sample]:
        """What was held at the visits of the last cycle."""
        if self.last_cycle is None:
            return []
        visits = self.last_cycle.visits
        first = visits[0].asked
        return [
            visit.sample._replace(seconds=self._lanes.seconds(first, visit.asked))
            for visit in visits
            if visit.sample is not None
        ]

    def _read(self, visits: list[VisitRecord], end: Tick, took: Callable[[list[Timing]], None] | None) -> None:
        timings = self.timings(visits, end)
        if took is not None:
            took(timings)
        for timing in timings:
            self._stall_seconds += timing.stall_seconds
            self._compute_seconds += timing.compute_seconds

    def link(self, lane: Lane | CollectiveLane = Lane.ONLOAD) -> "LinkSpeed":
        """The speed of the last onloads, or gathers, on their lane. Waits until they are done. Before the first, that
        of an earlier process, if it is known.
        """
        loads = [(size, begun, done) for on, _, size, begun, done in self.last_transfers if on is lane and size]
        measured = [(size, self._lanes.seconds(begun, done)) for size, begun, done in loads]
        return LinkSpeed(measured or (self.known_loads if lane is Lane.ONLOAD else []))
