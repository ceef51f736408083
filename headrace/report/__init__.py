"""What did a run do? Measured numbers, the text that shows them, and the timeline."""

from headrace.report.activations import ActivationStats, choice_rows, plan_rows
from headrace.report.record import RunRecord
from headrace.report.report import Report
from headrace.report.rows import Row
from headrace.report.stats import Stats
from headrace.report.timeline import write_trace
from headrace.runtime.spans import Sample, Span

__all__ = [
    "ActivationStats",
    "Report",
    "Row",
    "RunRecord",
    "Sample",
    "Span",
    "Stats",
    "choice_rows",
    "plan_rows",
    "write_trace",
]
