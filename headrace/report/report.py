"""How is a run shown? As text, as a picture, as a trace, and as one page for a browser."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from headrace.config import format_bytes
from headrace.report.picture import draw
from headrace.report.record import RunRecord
from headrace.report.rows import Row, rows_text
from headrace.report.timeline import write_trace

__all__ = ["Report"]

_SHOWN = 5  # at most so many stalls


@dataclass(frozen=True)
class Report:
    """A run's record, and the ways to show it. `print` shows the text."""

    record: RunRecord

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The counters, each beside its limit, and the last step lane by lane: measured, planned, lower bound."""
        sections = [self.record.stats.to_text()] if self.record.stats is not None else []
        for rows in (self.record.ranks, self.record.activations):
            if rows:
                sections.append(rows_text(rows))
        if self.record.spans:
            sections += ["", rows_text(self.step_rows())]
        return "\n".join(sections) + "\n"

    def step_rows(self) -> list[Row]:
        """The last step: its lanes, the planned time, the lower bound, and the stalls."""
        record = self.record
        step = record.step_seconds
        compute = f"{_seconds(step)}: {_seconds(record.compute_seconds)} of compute"
        rows = [("last step", f"{compute}, efficiency {record.compute_seconds / step if step else 1.0:.1%}")]
        if record.planned is not None:
            planned = record.planned
            measured = f"{_seconds(planned.cycle_seconds)} ({step / planned.cycle_seconds:.3f} of it measured)"
            rows.append(("planned", f"{measured}; no schedule is below {_seconds(planned.lower_bound_seconds)}"))
        for lane in record.lanes:
            busy, moved, waited = record.busy_seconds(lane), record.moved_bytes(lane), record.stall_seconds(lane)
            line = f"busy {_seconds(busy)} ({busy / step if step else 0.0:.0%})"
            if moved:
                rate = record.achieved_rate(lane)
                line += f", {format_bytes(moved)} at {rate / 1e9:.2f} GB/s"
                if record.rates.get(lane):
                    line += f" of {record.rates[lane] / 1e9:.2f} probed ({rate / record.rates[lane]:.0%})"
            if waited:
                line += f"; compute waited {_seconds(waited)} for it"
            rows.append((lane, line))
        for stall in record.stalls()[:_SHOWN]:
            cause = f"{stall.lane} of {stall.what}" if stall.what else "the host"
            rows.append(("stall", f"{stall.visit} waited {_seconds(stall.seconds)} for {cause}"))
        return rows

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page: a time line to zoom and hover, memory by tier, and stalls. Works offline."""
        template = files("headrace.report").joinpath("page.html").read_text()
        shown = {
            "record": json.loads(self.record.to_json()),
            "step_seconds": self.record.step_seconds,
            "compute_seconds": self.record.compute_seconds,
            "lanes": self.record.lanes,
            "stalls": [stall._asdict() for stall in self.record.stalls()],
            "text": self.to_text(),
        }
        data = json.dumps(shown).replace("<", "\\u003c")  # so that no text can end the script element
        Path(path).write_text(template.replace("/*DATA*/null", data))

    def to_png(self, path: str | os.PathLike[str]) -> None:
        """Writes time line and memory as a picture. Raises ModuleNotFoundError if matplotlib is not installed."""
        draw(self.record, path)

    def to_trace(self, path: str | os.PathLike[str], *, profiler_trace: str | os.PathLike[str] | None = None) -> None:
        """Writes a Chrome trace (Perfetto), merged with `profiler_trace` if that is given: one of torch.profiler's."""
        samples = self.record.samples
        write_trace(
            path,
            self.record.spans,
            samples,
            begin_nanoseconds=samples[0].unix_nanoseconds if samples else 0,
            profiler_trace=profiler_trace,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the record as JSON, for `headrace report`."""
        Path(path).write_text(self.record.to_json())


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"
