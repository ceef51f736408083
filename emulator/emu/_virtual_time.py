"""What time is it on the modelled hardware, and what did it do when? Virtual clocks of the host, and traces."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ._native import native

HOST_ROW = -1
_DEFAULT_STREAM_NAMES = {HOST_ROW: "host", 0: "stream 0 (default)"}
_stream_names: dict[int, str] = {}


def virtual_seconds() -> float:
    """The virtual clock of the calling host thread: it moves at each enqueue and at each wait."""
    return float(native.virtual_seconds())


def event_seconds(event: torch.Event) -> float:
    """When the event passes, on the virtual clock; known from the moment that it is recorded. RuntimeError before."""
    return float(native.event_seconds(event.event_id or 0))


def host_works(seconds: float, what: str) -> None:
    """The calling thread spends virtual time, as on an optimizer step or a read from disk."""
    native.host_works(seconds, what)


def exchange_with_peers(tensor: torch.Tensor, seconds: float) -> None:
    """The current stream reads and writes a tensor for so long, as in a collective with other devices; it keeps no
    engine busy. The values stay."""
    native.exchange_with_peers(tensor, seconds)


def host_waits_until(seconds: float) -> None:
    """The calling thread has waited for something besides the device: another thread, which was ready at `seconds`."""
    native.host_waits_until(seconds)


@contextlib.contextmanager
def own_clock(start_seconds: float) -> Iterator[None]:
    """Gives the calling thread a virtual clock of its own, for a worker that runs beside the others.

    Threads share one clock otherwise, and a worker that waits would hold up everybody. `start_seconds` is the time at
    which the work was handed over; `host_waits_until()` brings the result's time back to whoever waits for it. Jobs of
    executors need none of this: see `_worker_time.py`.
    """
    before = native.set_own_clock(start_seconds)
    try:
        yield
    finally:
        native.set_own_clock(before)


def name_stream(stream: torch.Stream, name: str) -> None:
    """The name of the stream's row in a trace, until the next `reset()`."""
    _stream_names[stream.stream_id] = name


def forget_stream_names() -> None:
    _stream_names.clear()


def start_trace() -> None:
    """Records from now on what each stream and the host do, in virtual time."""
    native.start_trace()


def write_trace(path: str | Path) -> None:
    """Ends the recording and writes it as Chrome trace JSON (Perfetto, chrome://tracing): a row for each stream and
    each engine, and one for the host. Times are virtual microseconds."""
    entries = native.take_trace()
    streams = sorted({stream for _, _, stream, _, _, _ in entries})
    engines = sorted({engine for _, _, _, engine, _, _ in entries if engine})
    names = _DEFAULT_STREAM_NAMES | _stream_names
    events: list[dict[str, Any]] = [
        _metadata("process_name", 0, 0, "streams"),
        _metadata("process_name", 1, 0, "engines"),
    ]
    events += [_metadata("thread_name", 0, stream + 1, names.get(stream, f"stream {stream}")) for stream in streams]
    events += [_metadata("thread_name", 1, row, engine) for row, engine in enumerate(engines)]
    for name, tag, stream, engine, start, end in entries:
        span = {"name": name, "ph": "X", "ts": start * 1e6, "dur": (end - start) * 1e6, "args": {"tag": tag}}
        events.append(span | {"pid": 0, "tid": stream + 1})
        if engine:
            events.append(span | {"pid": 1, "tid": engines.index(engine)})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _metadata(kind: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
