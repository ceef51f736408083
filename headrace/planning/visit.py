"""What is one visit of the trace?"""

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The pass of the model that a visit belongs to. The planner ignores it; texts and traces show it."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One use of blocks on the device: all of `blocks` must be present while it computes for `compute_seconds`.

    `other_load_seconds`: how long other copies that are issued during the visit (activations, single experts, rows
    of tables) take the onload lane. They come behind the visit's own loads.
    """

    blocks: tuple[int, ...]
    phase: Phase = Phase.FORWARD
    compute_seconds: float
    other_load_seconds: float = 0.0
