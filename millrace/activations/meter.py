"""What did activations move, and how long did compute wait for them?"""

from collections import Counter, deque

from millrace.activations.decisions import Basis
from millrace.engine.meter import LaneUse, LinkSpeed, Moved
from millrace.runtime.lanes import Lane, Lanes, LateTransfer, Tick, Transfer

__all__ = ["ActivationMeter"]

_REMEMBERED_COPIES = 512  # of each direction: from these the link's speed is taken
_UNREAD_WAITS = 256


class ActivationMeter:
    """Counts what moves. Seconds are read from ticks when many have come together, or when somebody asks."""

    def __init__(self, lanes: Lanes, lane_use: LaneUse) -> None:
        self._lanes = lanes
        self.lane_use = lane_use
        self._waits: deque[tuple[Tick, Tick]] = deque()
        self._copies: dict[Lane, deque[Moved]] = {lane: deque(maxlen=_REMEMBERED_COPIES) for lane in Lane}
        self.spill_seconds_per_byte = self.fetch_seconds_per_byte = 0.0  # the best that was seen; 0: no disk
        self.reset()

    def reset(self) -> None:
        """Counters start anew."""
        self.offload_bytes = self.onload_bytes = 0
        self.offloads = self.onloads = self.demand_onloads = self.hits = 0
        self.spill_bytes = self.fetch_bytes = 0
        self.forwards: Counter[Basis] = Counter()
        self._stall_seconds = 0.0
        self._waits.clear()

    def offloaded(self, transfer: Transfer, name: str) -> None:
        """A copy to the host was submitted."""
        self.offloads += 1
        self.offload_bytes += transfer.nbytes
        self._keep(transfer, name)

    def onloaded(self, nbytes: int) -> None:
        """A copy to the device was submitted, or will be as soon as its bytes have come from disk."""
        self.onloads += 1
        self.onload_bytes += nbytes
        self.lane_use.activations_bytes += nbytes

    def arrived(self, transfer: Transfer | LateTransfer, name: str) -> None:
        """Compute was told to wait for a copy to the device."""
        self._keep(transfer, name)

    def spilled(self, nbytes: int, seconds: float) -> None:
        """Bytes went to disk."""
        self.spill_bytes += nbytes
        self.spill_seconds_per_byte = min(self.spill_seconds_per_byte or seconds / nbytes, seconds / nbytes)

    def fetched(self, nbytes: int, seconds: float) -> None:
        """Bytes came from disk."""
        self.fetch_bytes += nbytes
        self.fetch_seconds_per_byte = min(self.fetch_seconds_per_byte or seconds / nbytes, seconds / nbytes)

    def waited(self, asked: Tick, began: Tick) -> None:
        """Compute was told to wait between these moments."""
        self._waits.append((asked, began))
        while len(self._waits) > _UNREAD_WAITS:
            self._read()

    def stall_seconds(self) -> float:
        """Seconds in which compute waited since the last reset; waits until they are known."""
        while self._waits:
            self._read()
        return self._stall_seconds

    def speeds(self) -> tuple[LinkSpeed, LinkSpeed]:
        """How long the last copies to the host, and to the device, took; waits until they are done."""
        offload, onload = (
            LinkSpeed([(nbytes, self._lanes.seconds(begun, done)) for _, _, nbytes, begun, done in self._copies[lane]])
            for lane in (Lane.OFFLOAD, Lane.ONLOAD)
        )
        return offload, onload

    def moved(self) -> list[Moved]:
        """The last copies each way."""
        return [copy for copies in self._copies.values() for copy in copies]

    def _keep(self, transfer: Transfer | LateTransfer, name: str) -> None:
        what = f"activation of {name}" if name else "activation"
        self._copies[transfer.lane].append(Moved(transfer.lane, what, transfer.nbytes, transfer.begun, transfer.done))

    def _read(self) -> None:
        self._stall_seconds += self._lanes.seconds(*self._waits.popleft())
