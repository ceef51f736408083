"""What did activations move, and how long did compute wait for them?"""

from collections import Counter, deque
from typing import NamedTuple

from headrace.activations.decisions import Basis
from headrace.runtime.lanes import CollectiveLane, Lane, Lanes, LateTransfer, Tick, Transfer
from headrace.runtime.link import LaneUse, LinkSpeed
from headrace.runtime.spans import Moved, Span, Waited, cut_by, spans_of

_REMEMBERED = 512  # copies in each direction, which give the link's speed; and waits
_UNREAD_WAITS = 256
_REMEMBERED_PASSES = 64
_BACKWARD = "backward"


class _Pass(NamedTuple):
    """A forward or a backward."""

    name: str
    begun: Tick
    done: Tick


class ActivationMeter:
    """Counts copies and waits. Seconds are read from ticks when many have accumulated, or when somebody asks."""

    def __init__(self, lanes: Lanes, lane_use: LaneUse) -> None:
        self._lanes = lanes
        self.lane_use = lane_use
        self._waits: deque[Waited] = deque(maxlen=_REMEMBERED)  # the waits whose seconds have been read
        self._unread_waits: deque[Waited] = deque()  # the waits after them
        # The passes from the last forward that followed a backward; and those before it, up to that backward.
        self._passes: deque[_Pass] = deque(maxlen=_REMEMBERED_PASSES)
        self._last_passes: tuple[_Pass, ...] = ()
        self._copies: dict[Lane | CollectiveLane, deque[Moved]] = {lane: deque(maxlen=_REMEMBERED) for lane in Lane}
        self.spill_seconds_per_byte = self.fetch_seconds_per_byte = 0.0  # the best seen so far; 0: no disk
        self.reset()

    def reset(self) -> None:
        """Sets the counters to zero."""
        self.offload_bytes = self.onload_bytes = 0
        self.offloads = self.onloads = self.demand_onloads = self.hits = 0
        self.spill_bytes = self.fetch_bytes = 0
        self.forwards: Counter[Basis] = Counter()
        self._stall_seconds = 0.0
        self._waits.extend(self._unread_waits)
        self._unread_waits.clear()

    def offloaded(self, transfer: Transfer, name: str) -> None:
        """Counts a copy to the host, when it has been submitted."""
        self.offloads += 1
        self.offload_bytes += transfer.nbytes
        self.arrived(transfer, name)

    def onloaded(self, nbytes: int) -> None:
        """Counts a copy to the device that was submitted, or will be as soon as its bytes have come from disk."""
        self.onloads += 1
        self.onload_bytes += nbytes
        self.lane_use.activations_bytes += nbytes

    def arrived(self, transfer: Transfer | LateTransfer, name: str) -> None:
        """Records a copy that compute waits for, now or later: for timelines, and to measure the link's speed."""
        copy = Moved(transfer.lane, _described(name), transfer.nbytes, transfer.begun, transfer.done)
        self._copies[transfer.lane].append(copy)

    def spilled(self, nbytes: int, seconds: float) -> None:
        """Counts bytes that went to disk."""
        self.spill_bytes += nbytes
        self.spill_seconds_per_byte = min(self.spill_seconds_per_byte or seconds / nbytes, seconds / nbytes)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """Counts bytes that came from disk."""
        self.fetch_bytes += nbytes
        self.fetch_seconds_per_byte = min(self.fetch_seconds_per_byte or seconds / nbytes, seconds / nbytes)

    def forward_ended(self, begun: Tick, basis: Basis) -> None:
        """Records a forward that began at `begun` and ends now."""
        self.forwards[basis] += 1
        if self._passes and self._passes[-1].name == _BACKWARD:
            self._last_passes = tuple(self._passes)
            self._passes.clear()
        self._passes.append(_Pass("forward", begun, self._lanes.tick()))

    def backward_ended(self, begun: Tick) -> None:
        """Records a backward whose first use was at `begun` and that ends now."""
        self._passes.append(_Pass(_BACKWARD, begun, self._lanes.tick()))

    def waited(self, asked: Tick, began: Tick, lane: Lane, name: str) -> None:
        """Records a wait of compute, between these two ticks, for the copy of an activation of the module `name`."""
        self._unread_waits.append(Waited(lane, _described(name), asked, began))
        while len(self._unread_waits) > _UNREAD_WAITS:
            self._read()

    def stall_seconds(self) -> float:
        """The seconds that compute has waited since the last reset. Blocks until they are known."""
        while self._unread_waits:
            self._read()
        return self._stall_seconds

    def speeds(self) -> tuple[LinkSpeed, LinkSpeed]:
        """The link's speeds to the host and to the device, measured by the last copies. Blocks until these are done."""
        offload, onload = (
            LinkSpeed([(nbytes, self._lanes.seconds(begun, done)) for _, _, nbytes, begun, done in self._copies[lane]])
            for lane in (Lane.OFFLOAD, Lane.ONLOAD)
        )
        return offload, onload

    def moved(self) -> list[Moved]:
        """The last copies in each direction."""
        return [copy for copies in self._copies.values() for copy in copies]

    def last_waits(self) -> list[Waited]:
        """The last waits, whether or not they took any time."""
        return [*self._waits, *self._unread_waits]

    def spans(self) -> list[Span]:
        """The last forwards and backwards, their stalls, and the copies since their beginning. Waits for these."""
        passes = self._passes if self._passes and self._passes[-1].name == _BACKWARD else self._last_passes
        if not passes:
            return []
        first = passes[0].begun
        waits = [wait.since(first, self._lanes) for wait in self.last_waits()]
        spans: list[Span] = []
        reached = 0.0
        for name, begun, done in passes:
            begin, end = (self._lanes.seconds(first, tick) for tick in (begun, done))
            if end > reached:  # not within the pass before it
                spans += cut_by(waits, name, max(begin, reached), end)
                reached = end
        return spans + spans_of(self.moved(), first, self._lanes)

    def _read(self) -> None:
        wait = self._unread_waits.popleft()
        self._stall_seconds += self._lanes.seconds(wait.asked, wait.began)
        self._waits.append(wait)


def _described(name: str) -> str:
    return f"activation of {name}" if name else "activation"
