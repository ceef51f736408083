"""What did activations move and hold, in numbers?"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.config import format_bytes
from headrace.report.rows import Row, rows_text


@dataclass(frozen=True, kw_only=True)
class ActivationStats:
    """What was measured since activations were offloaded or since `reset_stats()`, in bytes and seconds.

    `host_held_bytes` wait on the host now. `host_bytes` is the memory allocated for them, `host_peak_bytes` its peak,
    and `host_locked_bytes` its page-locked part. `device_peak_bytes` is the most that was on its way out or back at
    once. `offload_bytes` left in `offloads` copies, and `onload_bytes` came back in `onloads` copies. Of the uses in
    backward, `hits` found their tensor on the device or on its way there; `demand_onloads` did not. `spill_bytes` went
    to disk, and `fetch_bytes` came from there. `stall_seconds` is how long compute waited for copies. `skipped` counts
    tensors that cannot be offloaded (subclasses, sparse, quantised, parts of memory that others may write to).
    `pool_growths` is how often host memory was allocated. `planned_forwards` followed a plan, `recorded_forwards` were
    the first of their kind, and `similar_forwards` had sizes without a plan and kept to the ceiling of another one.
    """

    host_held_bytes: int
    host_bytes: int
    host_peak_bytes: int
    host_locked_bytes: int
    device_peak_bytes: int
    offload_bytes: int
    onload_bytes: int
    offloads: int
    onloads: int
    hits: int
    demand_onloads: int
    spill_bytes: int
    fetch_bytes: int
    stall_seconds: float
    skipped: int
    pool_growths: int
    planned_forwards: int
    similar_forwards: int
    recorded_forwards: int

    def rows(self) -> list[Row]:
        """Each number, with its name."""
        size = format_bytes
        by_limit = f"{self.similar_forwards} by the limit of another plan"
        on_disk = f"{size(self.spill_bytes)} written, {size(self.fetch_bytes)} read"
        return [
            ("activations on the host, peak", size(self.host_peak_bytes)),
            ("activations in flight, peak", size(self.device_peak_bytes)),
            ("activations offloaded", f"{size(self.offload_bytes)} in {_copies(self.offloads)}"),
            ("activations onloaded", f"{size(self.onload_bytes)} in {_copies(self.onloads)}"),
            *([("activations on disk", on_disk)] if self.spill_bytes or self.fetch_bytes else []),
            ("uses in backward", f"{self.hits} in time, {self.demand_onloads} on demand"),
            ("stall for activations", f"{self.stall_seconds:.3f} s"),
            ("forwards", f"{self.planned_forwards} as planned, {by_limit}, {self.recorded_forwards} recorded"),
        ]

    def to_text(self) -> str:
        """The numbers as a small table."""
        return rows_text(self.rows())

    @staticmethod
    def advice(beyond_bytes: int, names: Sequence[str]) -> str:
        """What to do about activations that do not fit and whose copies do not hide."""
        layers = ", ".join(name or "the model itself" for name in names)
        return (
            f"{format_bytes(beyond_bytes)} of activations neither fit in device_memory nor hide behind compute:"
            f" recompute them (gradient checkpointing) in {layers}"
        )


def _copies(number: int) -> str:
    return f"{number:,} {'copy' if number == 1 else 'copies'}"
