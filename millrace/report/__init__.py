"""What did a run do? Measured numbers, the text that shows them, and the timeline."""

from millrace.report.activations import ActivationStats
from millrace.report.record import Planned, RunRecord
from millrace.report.report import Report
from millrace.report.rows import Row
from millrace.report.stats import Stats
from millrace.report.timeline import write_trace
from millrace.runtime.spans import Sample, Span

__all__ = ["ActivationStats", "Planned", "Report", "Row", "RunRecord", "Sample", "Span", "Stats", "write_trace"]
