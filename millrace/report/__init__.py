"""What did a run do? Measured numbers, the text that shows them, and the timeline."""

from millrace.report.stats import Stats
from millrace.report.timeline import write_trace

__all__ = ["Stats", "write_trace"]
