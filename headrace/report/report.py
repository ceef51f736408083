"""How is a run shown? As text, as a picture, as a trace, and as one page for a browser."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from headrace.config import format_bytes, path_of
from headrace.planning.text import seconds_text
from headrace.report.picture import draw
from headrace.report.record import RunRecord
from headrace.report.rows import Row, rows_text
from headrace.report.timeline import write_trace

_SHOWN = 5  # at most this many stalls


@dataclass(frozen=True, repr=False)
class Report:
    """A run's record, and the ways to show it. `print` shows the text, and a notebook the page."""

    record: RunRecord

    def __repr__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Called by a notebook that shows the report."""
        return f'<iframe srcdoc="{escape(self._page())}" style="width: 100%; height: 900px; border: 0"></iframe>'

    def to_text(self) -> str:
        """The counters, each beside its limit, and the last step lane by lane: measured, planned, lower bound."""
        sections = [self.record.title] if self.record.model else []
        sections += [rows_text(rows)] if (rows := self.run_rows()) else []
        if self.record.spans:
            sections += ["", rows_text(self.step_rows())]
        return "\n".join(sections) + "\n"

    def run_rows(self) -> list[Row]:
        """The counters of the run: of weights, of ranks, and of activations."""
        record = self.record
        return [*([] if record.stats is None else record.stats.rows()), *record.ranks, *record.activations]

    def step_rows(self) -> list[Row]:
        """The last step: its lanes, the planned time, the lower bound, and the stalls."""
        record = self.record
        step = record.step_seconds
        compute = f"{seconds_text(step)}: {seconds_text(record.compute_seconds)} of compute"
        rows = [("last step", f"{compute}, efficiency {record.compute_seconds / step if step else 1.0:.1%}")]
        if record.planned is not None:
            planned = record.planned
            ratio = step / planned.cycle_seconds
            rows.append(("planned", f"{seconds_text(planned.cycle_seconds)}; this step took {ratio:.2f} times that"))
            rows.append(("at least", record.bound_text))
        for lane in record.lanes:
            busy, moved, waited = record.busy_seconds(lane), record.moved_bytes(lane), record.stall_seconds(lane)
            line = f"busy {seconds_text(busy)} ({busy / step if step else 0.0:.0%})"
            if moved:
                rate = record.achieved_rate(lane)
                line += f", {format_bytes(moved)} at {rate / 1e9:.2f} GB/s"
                probed = record.rates.get(lane)
                if probed and rate <= probed:
                    line += f" of {probed / 1e9:.2f} probed ({rate / probed:.0%})"
                elif probed:
                    line += f", more than the {probed / 1e9:.2f} that headrace probe reached"
            if waited:
                line += f"; compute waited {seconds_text(waited)} for it"
            rows.append((lane, line))
        stalls = record.shown_stalls()
        for stall in [*stalls[:_SHOWN], *(each for each in stalls[_SHOWN:] if not each.what)]:
            cause = f"{stall.lane} of {stall.what}" if stall.what else "the host, not a copy"
            rows.append(("stall", f"{stall.visit} waited {seconds_text(stall.seconds)} for {cause}"))
        return rows

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes one self-contained page: a time line to zoom and hover, memory by tier, and stalls. Works offline."""
        path_of(path, "path").write_text(self._page())

    def _page(self) -> str:
        template = files("headrace.report").joinpath("page.html").read_text()
        record = self.record
        shown = {
            "record": json.loads(self.record.to_json()),
            "title": record.title,
            "step_seconds": record.step_seconds,
            "compute_seconds": record.compute_seconds,
            "lanes": record.lanes,
            "stalls": [stall._asdict() for stall in record.shown_stalls()],
            "bound": record.bound_text,
            "text": self.to_text(),
        }
        data = json.dumps(shown).replace("<", "\\u003c")  # so that no text can end the script element
        return template.replace("/*DATA*/null", data)

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
        path_of(path, "path").write_text(self.record.to_json())
