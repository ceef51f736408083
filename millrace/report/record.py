"""What is kept of a run for its report? The last step's spans and samples, the counters, what was planned; as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Planned", "RunRecord", "Sample", "Span", "Stall"]

VERSION = 2


class Span(NamedTuple):
    """Something that took `seconds` on a lane; `what` was copied, or waited."""

    lane: str
    name: str
    begin_seconds: float
    seconds: float
    nbytes: int = 0
    what: str = ""


class Sample(NamedTuple):
    """Bytes held by tier at one moment of the step; `unix_nanoseconds`: when the host was there."""

    seconds: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    unix_nanoseconds: int = 0


class Stall(NamedTuple):
    """A visit waited, and the copy that ended last before it went on ("" when no copy did)."""

    visit: str
    seconds: float
    lane: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What the plan of the visits predicts of a step; `lower_bound_seconds` no schedule can beat."""

    cycle_seconds: float
    compute_seconds: float
    stall_seconds: float
    lower_bound_seconds: float
    onload_bytes: int
    onloads: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. `stats`: the counters by name; `activations`: what offloaded activations come to, in words.

    `rates`: bytes per second of each lane when it was probed alone.
    """

    device: str
    stats: dict[str, Any]
    spans: tuple[Span, ...]
    samples: tuple[Sample, ...]
    planned: Planned | None
    rates: dict[str, float]
    activations: str = ""

    @property
    def step_seconds(self) -> float:
        """From the first visit of the step to the end of the last."""
        ends = [span.begin_seconds + span.seconds for span in self.spans if span.lane == "compute"]
        return max(ends, default=0.0)

    @property
    def compute_seconds(self) -> float:
        return sum(span.seconds for span in self.spans if span.lane == "compute" and span.name != "stall")

    @property
    def lanes(self) -> list[str]:
        """Compute first, the others as they come."""
        return list(dict.fromkeys(["compute", *(span.lane for span in self.spans)]))

    def of_lane(self, lane: str) -> list[Span]:
        return [span for span in self.spans if span.lane == lane]

    def achieved_rate(self, lane: str) -> float:
        """Bytes per second while the lane was busy; 0 when it moved nothing."""
        seconds = sum(span.seconds for span in self.of_lane(lane))
        return sum(span.nbytes for span in self.of_lane(lane)) / seconds if seconds else 0.0

    def stalls(self) -> list[Stall]:
        """Who waited for whom, the longest first."""
        copies = self.of_lane("onload")  # what a visit waits for: its blocks, whatever they waited for themselves
        found = []
        for span in self.spans:
            if span.lane == "compute" and span.name == "stall":
                end = span.begin_seconds + span.seconds
                slack = max(1e-6, 0.02 * span.seconds)
                ended = [c for c in copies if c.begin_seconds + c.seconds <= end + slack]
                last = max(ended, key=lambda copy: copy.begin_seconds + copy.seconds, default=None)
                if last is not None and last.begin_seconds + last.seconds < span.begin_seconds:
                    last = None  # it was over before the wait began
                found.append(Stall(span.what, span.seconds, last.lane if last else "host", last.what if last else ""))
        return sorted(found, key=lambda stall: -stall.seconds)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """What `to_json` wrote. Raises ValueError for anything else."""
        try:
            fields = json.loads(text)
            if fields.pop("version") != VERSION:
                raise KeyError("version")
            planned = fields["planned"]
            return cls(
                device=fields["device"],
                stats=fields["stats"],
                spans=tuple(Span(*span) for span in fields["spans"]),
                samples=tuple(Sample(*sample) for sample in fields["samples"]),
                planned=None if planned is None else Planned(**planned),
                rates=fields["rates"],
                activations=fields["activations"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"this is no run record of version {VERSION} ({error!r}); write one with handle.report().save(path)"
            ) from error
