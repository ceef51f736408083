"""What can no schedule beat?"""

from __future__ import annotations

from millrace.planning.problem import Problem


def lower_bound(problem: Problem) -> float:
    """Seconds per steady cycle that no schedule of this problem can beat."""
    return problem.compute_seconds
