"""Which values of checkpoints are kept from now on? Chosen from two forwards in which all were computed again.

In the first, values are measured. It may be slow itself, as memory is made and kernels are loaded: so the second, for
which there is a plan, tells the time behind which copies hide.

Bytes and seconds grow together with the inputs, and so does the link's time. `device_memory` does not: when longer
inputs do not fit into it, the choice is made anew, as if it were smaller.
"""

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from headrace.config import ActivationConfig
from headrace.memory.ledger import Ledger, Tier
from headrace.planning import ActivationPlan, ActivationProblem, Fate, Recomputed, choose_kept
from headrace.runtime.lanes import Lanes, Tick

_MOST_TIMED = 16  # values of a kind
_LONGER = 1.1  # times the bytes for which the choice was made
_ROOM = 0.9  # of the host memory that is left: a pool takes up to that much more than what is in it

# The module that computes a value, with its numbers left out; the operation; and its place among those of the
# checkpoint that compute the same way.
ValueKind = tuple[str, Any, int]


@dataclass(kw_only=True)
class Measured:
    """What was computed again of one kind, for one forward."""

    shape: str
    count: int = 0
    nbytes: int = 0
    spans: list[tuple[Tick, Tick]] = field(default_factory=list)
    changes: bool = False  # something may write to them without a trace
    changed: list[torch.Tensor] = field(default_factory=list)  # whether something did: truth values, on the device

    @property
    def is_timed(self) -> bool:
        """Whether enough of them have been timed."""
        return len(self.spans) >= _MOST_TIMED


@dataclass(frozen=True)
class Choice:
    """How many values of each kind are kept, of how many in a forward."""

    kept: dict[ValueKind, tuple[int, int]]

    def keeps(self, kind: ValueKind, index: int) -> bool:
        """Whether the value at this index, among those of its kind in a forward, is kept: they are spread evenly, so
        that copies and compute take turns."""
        kept, count = self.kept.get(kind, (0, 1))
        return (index + 1) * kept // count > index * kept // count


class Choices:
    """The choice for one model. `now`: None as long as everything is computed again; `fates`: what was chosen, for
    texts; `number`: of the choices so far."""

    def __init__(self, config: ActivationConfig, lanes: Lanes, ledger: Ledger, purpose: str) -> None:
        self.now: Choice | None = None
        self.fates: list[Fate] = []
        self.number = 0
        self._measured: dict[ValueKind, Recomputed] = {}
        self._measured_bytes = 0  # that the forward saved beside them
        self._problem: ActivationProblem | None = None  # of the forward from which the choice was made
        self._times = 1.0  # how much longer the inputs are for which the choice was made
        self._config = config
        self._lanes = lanes
        self._ledger = ledger
        self._purpose = purpose

    @property
    def measures(self) -> bool:
        """Whether values are to be measured."""
        return not self._measured

    def learn(self, measured: dict[ValueKind, Measured], plan: ActivationPlan) -> None:
        """Chooses, when there is a plan after that of the forward that was measured, or when a plan, made with the
        choice, has more than fits. Waits for measurements."""
        if self.measures:
            self._measured = {kind: self._recomputed(kind, each) for kind, each in measured.items()}
            self._measured_bytes = plan.problem.nbytes
        elif self._problem is None:
            self._problem = plan.problem
            ratio = plan.problem.nbytes / self._measured_bytes
            for kind, each in self._measured.items():
                self._measured[kind] = replace(each, nbytes=int(each.nbytes * ratio), seconds=each.seconds * ratio)
            self._choose(self._problem)
        elif plan.beyond_bytes:
            kept_bytes = sum(fate.kept * fate.kind.nbytes // fate.kind.count for fate in self.fates)
            times = plan.problem.nbytes / (self._problem.nbytes + kept_bytes)
            if times > _LONGER * self._times:
                self._times = times
                self._choose(self._problem)

    def _choose(self, problem: ActivationProblem) -> None:
        budget_bytes = None if problem.budget_bytes is None else int(problem.budget_bytes / self._times)
        self.fates = choose_kept(
            list(self._measured.values()),
            replace(problem, budget_bytes=budget_bytes),
            most_leaving=self._most_leaving / self._times,
            fraction=self._config.fraction,
        )
        kept = zip(self._measured, self.fates, strict=True)
        self.now = Choice({kind: (fate.kept, fate.kind.count) for kind, fate in kept if fate.kept})
        self.number += 1

    def _recomputed(self, kind: ValueKind, measured: Measured) -> Recomputed:
        seconds = median(self._lanes.seconds(begun, done) for begun, done in measured.spans)
        name, operation, _ = kind
        return Recomputed(
            name=name,
            operation=operation.overloadpacket.__name__,
            shape=measured.shape,
            count=measured.count,
            nbytes=measured.nbytes,
            seconds=seconds * measured.count,
            changes=measured.changes or any(map(bool, measured.changed)),
        )

    @property
    def _most_leaving(self) -> float:
        """The most bytes that may leave at once."""
        if self._config.tier == "disk":
            return float("inf")
        left = self._ledger.host_left_bytes + self._ledger.held_bytes(Tier.HOST, self._purpose)
        given = self._config.host_memory_bytes
        return _ROOM * (left if given is None else min(left, given))
