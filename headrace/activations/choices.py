"""Which values of checkpoints are kept from now on? Chosen once, from a forward in which all were computed again."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from headrace.config import ActivationConfig
from headrace.memory.ledger import Ledger, Tier
from headrace.planning import ActivationProblem, Fate, Recomputed, choose_kept
from headrace.runtime.lanes import Lanes, Tick

_MOST_TIMED = 16  # values of a kind
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
    changed: list[torch.Tensor] = field(default_factory=list)  # of truth values, on the device

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
    """The choice for one model. `now`: None as long as values are measured; `fates`: what was chosen, for texts."""

    def __init__(self, config: ActivationConfig, lanes: Lanes, ledger: Ledger, purpose: str) -> None:
        self.now: Choice | None = None
        self.fates: list[Fate] = []
        self._config = config
        self._lanes = lanes
        self._ledger = ledger
        self._purpose = purpose

    def learn(self, measured: dict[ValueKind, Measured], problem: ActivationProblem) -> None:
        """Chooses, if there is anything to choose from and nothing has been chosen yet. Waits for the measurements."""
        if self.now is not None or not measured:
            return
        kinds = [self._recomputed(kind, each) for kind, each in measured.items()]
        self.fates = choose_kept(kinds, problem, most_leaving=self._most_leaving, share=self._config.fraction)
        self.now = Choice(
            {kind: (fate.kept, fate.kind.count) for kind, fate in zip(measured, self.fates, strict=True) if fate.kept}
        )

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
            changes=any(map(bool, measured.changed)),
        )

    @property
    def _most_leaving(self) -> float:
        """The most bytes that may leave at once."""
        if self._config.tier == "disk":
            return float("inf")
        left = self._ledger.host_left_bytes + self._ledger.held_bytes(Tier.HOST, self._purpose)
        given = self._config.host_memory_bytes
        return _ROOM * (left if given is None else min(left, given))
