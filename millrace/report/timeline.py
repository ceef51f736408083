"""When did what happen? A run's spans as a Chrome trace, which Perfetto and chrome://tracing show."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["write_trace"]

_LANES = ("compute", "onload", "offload")


def write_trace(path: str | os.PathLike[str], spans: Iterable[tuple[str, str, float, float, int]]) -> None:
    """Writes spans (lane, name, begin in seconds, length in seconds, bytes) in the Chrome trace event format."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(_LANES)
    ]
    for lane, name, begin_seconds, seconds, nbytes in spans:
        event: dict[str, object] = {"ph": "X", "name": name, "pid": 0, "tid": _LANES.index(lane)}
        event |= {"ts": begin_seconds * 1e6, "dur": seconds * 1e6, "args": {"bytes": nbytes} if nbytes else {}}
        events.append(event)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
