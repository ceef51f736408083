"""When did compute stand still within a stretch of work, and for which copy?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from millrace.report.record import Span

__all__ = ["Wait", "cut_by"]


class Wait(NamedTuple):
    """Compute waited for the copy of `what` on a lane."""

    begin_seconds: float
    seconds: float
    lane: str
    what: str


def cut_by(waits: Iterable[Wait], name: str, begin_seconds: float, end_seconds: float) -> list[Span]:
    """The stretch `name` of compute as spans, with a stall for each wait that begins in it. In the order of time."""
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
