"""How fast is the link to the device, and what was sent over it? Loads of weights and activations tell."""

from dataclasses import dataclass
from statistics import median
from typing import Any

_MOST_SECONDS = 1e9  # 30 years: sums of longer times might be infinite


@dataclass
class LaneUse:
    """Bytes that have ever been sent to the device for one model, by kind. All share the link: what the onload lane
    copies, and rows of tables, which the compute lane copies.

    `parts_bytes` is the part of `weights_bytes` that was loaded within visits: single experts, rows of tables, and
    gradients with which sums of micro-batches begin.
    """

    weights_bytes: int = 0
    parts_bytes: int = 0
    activations_bytes: int = 0

    @property
    def unplanned_bytes(self) -> int:
        """All bytes but those of blocks that were loaded whole."""
        return self.activations_bytes + self.parts_bytes


class LinkSpeed:
    """Seconds that a load of a given size takes, estimated from measured loads (bytes, seconds)."""

    def __init__(self, loads: list[tuple[int, float]]) -> None:
        by_size: dict[int, list[float]] = {}
        for nbytes, seconds in loads:
            by_size.setdefault(nbytes, []).append(seconds)
        self._of_size = {nbytes: median(measured) for nbytes, measured in by_size.items()}
        moved = sum(nbytes for nbytes, _ in loads)
        self._seconds_per_byte = sum(seconds for _, seconds in loads) / moved if moved else 0.0

    def known(self) -> list[list[float]]:
        """A load of each measured size: its bytes, and its seconds."""
        return [[nbytes, seconds] for nbytes, seconds in self._of_size.items()]

    def load_seconds(self, nbytes: int) -> float:
        """The median of the measured loads of that size; if there are none, by the mean speed."""
        measured = self._of_size.get(nbytes)
        return self.seconds(nbytes) if measured is None else measured

    def seconds(self, nbytes: int) -> float:
        """Seconds for that many bytes, by the mean speed of all measured loads."""
        return nbytes * self._seconds_per_byte


def is_size(value: Any) -> bool:
    """Whether a value from a file can be a number of bytes."""
    return isinstance(value, int) and 0 <= value < 1 << 63


def is_duration(value: Any) -> bool:
    """Whether a value from a file can be the seconds that something took."""
    return isinstance(value, float) and 0 <= value < _MOST_SECONDS


def known_loads(known: Any) -> list[tuple[int, float]]:
    """The loads that `LinkSpeed.known` gave, to make another one of. Raises ValueError or TypeError for others."""
    loads = [(nbytes, seconds) for nbytes, seconds in known]
    for nbytes, seconds in loads:
        if not (nbytes and is_size(nbytes) and is_duration(seconds)):
            raise ValueError(f"{nbytes!r} bytes in {seconds!r} s are no load")
    return loads
