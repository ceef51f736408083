"""Which values of checkpoints are kept for backward? Those that take the longest to compute again, for their bytes.

Each value that is kept is one operation less in backward. As many bytes are kept as fit on the device within the budget
of the activations, and as copies hide behind the forward; what leaves of these is for planning/activations.py to say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.planning.activations import ActivationProblem

_USED = 0.95  # of the seconds behind which copies hide: they begin with the first save and not with the forward


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """The values of one kind in one forward.

    - `name`, `operation`, `shape`: the module, what it computes, and the first value's dtype and shape, for texts.
    - `nbytes`, `seconds`: of all `count` values, and of computing all of them again.
    - `changes`: something writes to them after they were computed, or may do so, so they cannot be kept.
    """

    name: str
    operation: str
    shape: str
    count: int
    nbytes: int
    seconds: float
    changes: bool = False


@dataclass(frozen=True)
class Fate:
    """`kept` values of a kind are kept. `copy_seconds`: how long the slower of both copies of all its values takes."""

    kind: Recomputed
    kept: int
    copy_seconds: float


def choose_kept(
    kinds: Sequence[Recomputed], problem: ActivationProblem, *, most_leaving: float, fraction: float = 1.0
) -> list[Fate]:
    """The fate of each kind in a forward like that of `problem`, in which all of them were computed again.

    `most_leaving`: the most bytes that may leave. `fraction`: of what could leave behind compute, the part that may.
    """
    saved, nbytes = problem.saved, problem.nbytes
    out = math.fsum(each.offload_seconds for each in saved) / max(1, nbytes)  # seconds per byte
    back = math.fsum(each.onload_seconds for each in saved) / max(1, nbytes)
    out, back = out or back, back or out  # a direction in which nothing was copied yet is like the other
    # Beside what stays for good, the device holds what is being copied.
    in_flight = 2 * max((each.nbytes for each in saved), default=0)
    # Without a budget, nothing stays for good. Negative: so many of the bytes that are saved anyway have to leave.
    staying = max(0, (problem.budget_bytes or 0) - in_flight) - nbytes
    left = staying + min(most_leaving, fraction * _USED * math.fsum(problem.forward_seconds) / out if out else 0.0)
    backward = _USED * (math.fsum(problem.backward_seconds) - math.fsum(problem.other_seconds))
    back_left = staying + fraction * backward / back if back else 0.0
    fates: dict[int, Fate] = {}
    for index, kind in sorted(enumerate(kinds), key=lambda pair: -pair[1].seconds / max(1, pair[1].nbytes)):
        size = kind.nbytes / kind.count
        # Each value that is kept shortens the backward behind which the copies back hide.
        back_size = size + (fraction * _USED * kind.seconds / kind.count / back if back else 0.0)
        kept = 0
        if kind.seconds and not kind.changes:
            kept = max(0, min(kind.count, int(left / size), int(back_left / back_size)))
        left, back_left = left - kept * size, back_left - kept * back_size
        fates[index] = Fate(kind, kept, kind.nbytes * max(out, back))
    return [fates[index] for index in range(len(kinds))]
