"""What did a run move, and where did its time go? Counters, and the ticks from which seconds are taken afterwards."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from headrace.memory.disk import Access, DiskLog
from headrace.memory.ledger import Ledger
from headrace.planning import Phase
from headrace.runtime.lanes import CollectiveLane, Lane, Lanes, LateTransfer, Tick, Transfer
from headrace.runtime.link import LaneUse, LinkSpeed
from headrace.runtime.spans import Moved, Sample, Span, Waited, cut_by, spans_of

__all__ = ["Checkpointed", "Meter", "Timing", "VisitRecord"]


@dataclass
class VisitRecord:
    """One visit as it happened: which blocks, in which phase, and the compute lane's ticks around the wait for them."""

    blocks: tuple[int, ...]
    phase: Phase
    name: str
    asked: Tick  # compute had done what came before
    began: Tick  # and the blocks had arrived
    other_bytes: int = 0  # what had been sent for besides blocks since the beginning
    sample: Sample | None = None  # what was held when the host was here


@dataclass(frozen=True)
class Timing:
    """Seconds of one visit."""

    stall_seconds: float
    compute_seconds: float


class Checkpointed(Protocol):
    """A checkpoint of the model."""

    @property
    def nbytes(self) -> int: ...

    @property
    def seconds(self) -> float:
        """That writing it took."""

    @property
    def waited_seconds(self) -> float:
        """That updates waited for it."""


@dataclass
class Counts:
    """What was moved and used since the last reset: `Stats` says what each is."""

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
    micro_batches_together: int = 0
    micro_batches_in_turn: int = 0
    steps: int = 0
    skipped_steps: int = 0


class Meter(Counts):
    """Counts what moves. Seconds are read from ticks cycles later, when reading them waits for nothing."""

    def __init__(self, lanes: Lanes, ledger: Ledger | None = None) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._unread: deque[tuple[list[VisitRecord], Tick]] = deque()
        self.last_cycle: tuple[list[VisitRecord], Tick] | None = None
        self.last_transfers: deque[Moved] = deque(maxlen=1024)
        self.lane_use = LaneUse()
        self.disk_log = DiskLog()
        self._cycle_began_at = self._last_cycle_began_at = 0.0  # seconds of `time.perf_counter`
        self.reset()

    def reset(self) -> None:
        """Counters start anew."""
        super().__init__()
        self.ahead_bytes = 0  # on their way from disk before an onload asked for them
        self._stall_seconds = self._compute_seconds = 0.0
        self._unread.clear()
        self._saved = (0, 0.0, 0.0)  # bytes, seconds, seconds waited, of checkpoints before
        self._saving: Checkpointed | None = None  # the last one

    def counts(self) -> dict[str, Any]:
        """What the stats say of what was counted, checkpoints too."""
        found = {field.name: getattr(self, field.name) for field in fields(Counts)}
        return found | dict(
            zip(("saved_bytes", "save_seconds", "save_wait_seconds"), self._saved_so_far(), strict=True)
        )

    def checkpoint_begun(self, saving: Checkpointed) -> None:
        """A checkpoint is being saved; those before it have ended."""
        self._saved, self._saving = self._saved_so_far(), saving

    def _saved_so_far(self) -> tuple[int, float, float]:
        nbytes, seconds, waited_seconds = self._saved
        if self._saving is None:
            return self._saved
        last = self._saving
        return nbytes + last.nbytes, seconds + last.seconds, waited_seconds + last.waited_seconds

    def onloaded(self, nbytes: int) -> None:
        """The onload of a block was submitted."""
        self.onloads += 1
        self.onload_bytes += nbytes
        self.lane_use.weights_bytes += nbytes

    def rows_onloaded(self, nbytes: int) -> None:
        """As `onloaded`, of rows of a table."""
        self.onloaded(nbytes)
        self.row_bytes += nbytes

    def expert_onloaded(self, nbytes: int) -> None:
        """As `onloaded`, of one expert."""
        self.onloaded(nbytes)
        self.lane_use.experts_bytes += nbytes
        self.expert_bytes += nbytes
        self.expert_loads += 1

    def arrived(self, transfer: Transfer | LateTransfer, what: str = "") -> None:
        """A transfer of `what` is kept for timelines: of a block's onload when compute is told to wait for it."""
        self.last_transfers.append(Moved(transfer.lane, what, transfer.nbytes, transfer.begun, transfer.done))

    def offloaded(self, transfer: Transfer, what: str = "") -> None:
        """Copies of the gradients `what` to the host were submitted."""
        self.offload_bytes += transfer.nbytes
        self.arrived(transfer, what)

    def spilled(self, nbytes: int) -> None:
        """Bytes were written to disk."""
        self.spill_bytes += nbytes

    def cycle_begins(self) -> None:
        """The host begins a cycle."""
        self._cycle_began_at = time.perf_counter()

    def cycle_ended(self, visits: list[VisitRecord], end: Tick) -> None:
        """A cycle is over: its ticks are read when the next but one is."""
        if visits:
            self._unread.append((visits, end))
            self.last_cycle = visits, end
            self._last_cycle_began_at = self._cycle_began_at
        while len(self._unread) > 2:
            self._read(*self._unread.popleft())

    def seconds(self) -> tuple[float, float]:
        """Stall and compute seconds since the last reset; waits for the cycles that are still under way."""
        while self._unread:
            self._read(*self._unread.popleft())
        return self._stall_seconds, self._compute_seconds

    def timings(self, visits: list[VisitRecord], end: Tick) -> list[Timing]:
        """The seconds of each visit of a cycle; waits until they are known."""
        ticks = [tick for visit in visits for tick in (visit.asked, visit.began)]
        seconds = self._lanes.intervals([*ticks, end])
        return [Timing(*pair) for pair in zip(seconds[::2], seconds[1::2], strict=True)]

    def sample(self) -> Sample | None:
        """What is held now, by the ledger."""
        if self._ledger is None:
            return None
        return Sample(0.0, *self._ledger.held_in_tiers(), time.time_ns())

    def spans(self, others: Sequence[Moved], waits: Sequence[Waited]) -> list[Span]:
        """The last cycle and the copies since its beginning, of `others` too, with their `waits`. Waits for them."""
        if self.last_cycle is None:
            return []
        visits, end = self.last_cycle
        first = visits[0].asked
        stood = [wait.since(first, self._lanes) for wait in waits]
        spans: list[Span] = []
        for visit, timing in zip(visits, self.timings(visits, end), strict=True):
            begin = self._lanes.seconds(first, visit.asked)
            name = f"{visit.name} {visit.phase.value}"
            if timing.stall_seconds > 0:
                spans.append(Span("compute", "stall", begin, timing.stall_seconds, what=name))
            begin += timing.stall_seconds
            spans += cut_by(stood, name, begin, begin + timing.compute_seconds)
        return [*spans, *spans_of((*self.last_transfers, *others), first, self._lanes), *self._disk_spans(first)]

    def _disk_spans(self, first: Tick) -> list[Span]:
        """What the drive did since the host began the last cycle, counted from the tick of its first visit."""
        began_at = self._last_cycle_began_at
        moves = self.disk_log.since(began_at)
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
        visits, _ = self.last_cycle
        first = visits[0].asked
        return [
            visit.sample._replace(seconds=self._lanes.seconds(first, visit.asked))
            for visit in visits
            if visit.sample is not None
        ]

    def _read(self, visits: list[VisitRecord], end: Tick) -> None:
        for timing in self.timings(visits, end):
            self._stall_seconds += timing.stall_seconds
            self._compute_seconds += timing.compute_seconds

    def link(self, lane: Lane | CollectiveLane = Lane.ONLOAD) -> "LinkSpeed":
        """How long the last onloads, or gathers, took on their lane; waits until they are done."""
        loads = [(size, begun, done) for on, _, size, begun, done in self.last_transfers if on is lane and size]
        return LinkSpeed([(size, self._lanes.seconds(begun, done)) for size, begun, done in loads])
