"""What is kept of a run for its report? The last step's spans and samples, the counters, what was planned; as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.report.stats import Stats

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

    def busy_seconds(self, lane: str) -> float:
        """How long something was under way on the lane; a drive takes several requests at a time."""
        return _covered([span for span in self.of_lane(lane) if span.name != "stall"])

    def moved_bytes(self, lane: str) -> int:
        return sum(span.nbytes for span in self.of_lane(lane))

    def achieved_rate(self, lane: str) -> float:
        """Bytes per second while the lane was busy; 0 when it moved nothing."""
        seconds = self.busy_seconds(lane)
        return self.moved_bytes(lane) / seconds if seconds else 0.0

    def stalls(self) -> list[Stall]:
        """Who waited for whom, the longest first.

        A visit waits for its blocks' copies to the device. Where the block was still being read from disk for most of
        the wait, that is what held it up.
        """
        copies, reads = self.of_lane("onload"), self.of_lane("fetch")
        found = []
        for span in self.spans:
            if span.lane == "compute" and span.name == "stall":
                end = span.begin_seconds + span.seconds
                slack = max(1e-6, 0.02 * span.seconds)
                ended = [c for c in copies if c.begin_seconds + c.seconds <= end + slack]
                last = max(ended, key=lambda copy: copy.begin_seconds + copy.seconds, default=None)
                if last is not None and last.begin_seconds + last.seconds < span.begin_seconds:
                    last = None  # it was over before the wait began
                read = [fetch for fetch in reads if last is not None and fetch.what == last.what]
                if _covered(read, span.begin_seconds, end) > span.seconds / 2:
                    last = read[-1]
                found.append(Stall(span.what, span.seconds, last.lane if last else "host", last.what if last else ""))
        return sorted(found, key=lambda stall: -stall.seconds)

    def stall_seconds(self, lane: str) -> float:
        """How long compute waited for the lane."""
        return sum(stall.seconds for stall in self.stalls() if stall.lane == lane)

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
            Stats(**fields["stats"])
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


def _covered(spans: Sequence[Span], first: float = 0.0, last: float = math.inf) -> float:
    """Seconds between `first` and `last` in which at least one of the spans was under way."""
    covered, reached = 0.0, first
    for span in sorted(spans, key=lambda span: span.begin_seconds):
        end = min(last, span.begin_seconds + span.seconds)
        covered += max(0.0, end - max(reached, span.begin_seconds))
        reached = max(reached, end)
    return covered
