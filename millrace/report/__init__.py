"""What a run did: measured numbers, and the text that shows them."""

from millrace.report.stats import Stats
from millrace.report.timeline import write_trace

__all__ = ["Stats", "write_trace"]
