"""When did what happen? A run's spans as a Chrome trace, which Perfetto and chrome://tracing show."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import path_of
from headrace.runtime.spans import Sample, Span

_LANES = ("compute", "onload", "offload")  # named also where nothing happened there
_PROCESS = 1_000_000  # a process id that a profiler's trace does not have


def write_trace(
    path: str | os.PathLike[str],
    spans: Sequence[Span],
    samples: Sequence[Sample] = (),
    *,
    begin_nanoseconds: int = 0,
    profiler_trace: str | os.PathLike[str] | None = None,
) -> None:
    """Writes spans and memory samples in the Chrome trace event format.

    `profiler_trace`: a file that torch.profiler's `export_chrome_trace` wrote; its events are kept and the run's lanes
    put beside them. `begin_nanoseconds` places them: when the host began the step, since 1970. An accelerator works
    later than the host asks, so they may lie a little early.
    """
    merged: dict[str, Any] = {"traceEvents": [], "displayTimeUnit": "ms"}
    offset = 0.0
    if profiler_trace is not None:
        merged = json.loads(Path(profiler_trace).read_text())
        offset = (begin_nanoseconds - int(merged.get("baseTimeNanoseconds", 0))) / 1e3
    merged["traceEvents"] = [*merged["traceEvents"], *_events(spans, samples, offset)]
    path_of(path, "path").write_text(json.dumps(merged))


def _events(spans: Sequence[Span], samples: Sequence[Sample], offset: float) -> list[dict[str, Any]]:
    lanes = list(dict.fromkeys([*_LANES, *(span.lane for span in spans)]))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": _PROCESS, "args": {"name": "headrace"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": row, "args": {"name": lane}}
            for row, lane in enumerate(lanes)
        ),
    ]
    for span in spans:
        details: dict[str, Any] = {"bytes": span.nbytes} if span.nbytes else {}
        if span.what:
            details["of"] = span.what
        event: dict[str, Any] = {"ph": "X", "name": span.name, "pid": _PROCESS, "tid": lanes.index(span.lane)}
        event |= {"ts": offset + span.begin_seconds * 1e6, "dur": span.seconds * 1e6, "args": details}
        events.append(event)
    for sample in samples:
        held = {"device": sample.device_bytes, "host": sample.host_bytes, "disk": sample.disk_bytes}
        moment = offset + sample.seconds * 1e6
        events.append({"ph": "C", "name": "bytes held", "pid": _PROCESS, "ts": moment, "args": held})
    return events
