"""What happened when, and on which lane? Copies and waits by their ticks, and the spans of time made from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from headrace.runtime.lanes import CollectiveLane, Lane, Lanes, Tick


class Span(NamedTuple):
    """Something that took `seconds` on a lane. `what` was copied; for a stall, `what` is the stretch that waited.

    `waited_lane`, `waited_for`: the copy that a stall waited for; if empty, the copy can be found by when it ended.
    """

    lane: str
    name: str
    begin_seconds: float
    seconds: float
    nbytes: int = 0
    what: str = ""
    waited_lane: str = ""
    waited_for: str = ""

    @property
    def end_seconds(self) -> float:
        return self.begin_seconds + self.seconds


class Sample(NamedTuple):
    """Bytes held in each tier at one moment of a step, and those of gradients among them.

    `unix_nanoseconds`: when the host reached it.
    """

    seconds: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    unix_nanoseconds: int = 0
    device_gradient_bytes: int = 0
    host_gradient_bytes: int = 0


class Wait(NamedTuple):
    """Compute waited for the copy of `what` on a lane: times in seconds."""

    begin_seconds: float
    seconds: float
    lane: str
    what: str


class Moved(NamedTuple):
    """Copies that were submitted together: times as ticks."""

    lane: Lane | CollectiveLane
    what: str
    nbytes: int
    begun: Tick
    done: Tick


class Waited(NamedTuple):
    """Compute waited for the copy of `what` on a lane: from tick `asked` to tick `began`."""

    lane: Lane
    what: str
    asked: Tick
    began: Tick

    def since(self, first: Tick, lanes: Lanes) -> Wait:
        """This wait in seconds, counted from the tick `first`. Blocks until the ticks are reached."""
        return Wait(lanes.seconds(first, self.asked), lanes.seconds(self.asked, self.began), self.lane.value, self.what)


def covered(times: Iterable[tuple[float, float]], first: float = 0.0, last: float = math.inf) -> float:
    """Seconds between `first` and `last` that are within at least one of the times from a begin to an end."""
    seconds, reached = 0.0, first
    for begin, end in sorted(times):
        seconds += max(0.0, min(last, end) - max(reached, begin))
        reached = max(reached, min(last, end))
    return seconds


def spans_of(copies: Iterable[Moved], first: Tick, lanes: Lanes) -> list[Span]:
    """The spans of those copies that began after the tick `first`, counted from it. Blocks until they are over."""
    begins = [(lanes.seconds(first, copy.begun), copy) for copy in copies]
    return [
        Span(lane.value, lane.value, begin, lanes.seconds(begun, done), nbytes, what)
        for begin, (lane, what, nbytes, begun, done) in begins
        if begin >= 0
    ]


def cut_by(waits: Iterable[Wait], name: str, begin_seconds: float, end_seconds: float) -> list[Span]:
    """The spans of the stretch `name` of compute, cut by a stall for each wait that begins in it; in order of time."""
    spans = []
    reached = begin_seconds
    for wait in sorted(waits):
        if wait.seconds > 0 and begin_seconds <= wait.begin_seconds < end_seconds:
            if wait.begin_seconds > reached:
                spans.append(Span("compute", name, reached, wait.begin_seconds - reached))
            until = min(wait.begin_seconds + wait.seconds, end_seconds)
            spans.append(Span("compute", "stall", wait.begin_seconds, until - wait.begin_seconds, 0, name, *wait[2:]))
            reached = until
    if end_seconds > reached or not spans:
        spans.append(Span("compute", name, reached, max(0.0, end_seconds - reached)))
    return spans
