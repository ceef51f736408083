"""What a run did: measured numbers, and the text that shows them."""

from millrace.report.stats import Stats

__all__ = ["Stats"]
