"""What is kept of a run for its report? The last step's spans and samples, the counters, and the plan, as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from headrace.config import counted, format_bytes
from headrace.planning.plan import Prediction
from headrace.planning.text import seconds_text
from headrace.report.rows import Row
from headrace.report.stats import Stats
from headrace.runtime.spans import Sample, Span, covered

VERSION = 3


class Stall(NamedTuple):
    """A visit that waited, and the copy that ended last before the visit went on ("" if there was none)."""

    visit: str
    seconds: float
    lane: str
    what: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. `stats` is None if only activations are offloaded, and `activations` is empty if they stay.

    `rates` has each lane's bytes per second when it was probed alone. `ranks` says how several ranks share the work.
    `model` and `made_at` are for people to read; `budgets` are bytes by tier.
    """

    device: str
    stats: Stats | None
    spans: tuple[Span, ...]
    samples: tuple[Sample, ...]
    planned: Prediction | None
    rates: dict[str, float]
    activations: tuple[Row, ...] = ()
    ranks: tuple[Row, ...] = ()
    model: str = ""
    made_at: str = ""
    budgets: dict[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The run's model, device, time and budgets."""
        limits = [f"{tier} {format_bytes(nbytes)}" for tier, nbytes in self.budgets.items()]
        parts = [f"{self.model or 'a model'} on {self.device}", self.made_at, ", ".join(limits)]
        return "; ".join(part for part in parts if part)

    @property
    def step_seconds(self) -> float:
        """From the first visit of the step to the end of the last."""
        return max((span.end_seconds for span in self.spans if span.lane == "compute"), default=0.0)

    @property
    def compute_seconds(self) -> float:
        return sum(span.seconds for span in self.spans if span.lane == "compute" and span.name != "stall")

    @property
    def lanes(self) -> list[str]:
        """All lanes: compute first, the others in the order in which they appear."""
        return list(dict.fromkeys(["compute", *(span.lane for span in self.spans)]))

    def of_lane(self, lane: str) -> list[Span]:
        return [span for span in self.spans if span.lane == lane]

    def busy_seconds(self, lane: str) -> float:
        """How long something was under way on the lane. (A drive takes several requests at a time.)"""
        return covered(_times(span for span in self.of_lane(lane) if span.name != "stall"))

    def moved_bytes(self, lane: str) -> int:
        return sum(span.nbytes for span in self.of_lane(lane))

    def achieved_rate(self, lane: str) -> float:
        """The lane's bytes per second while it was busy; 0 if it moved nothing."""
        seconds = self.busy_seconds(lane)
        return self.moved_bytes(lane) / seconds if seconds else 0.0

    def stalls(self) -> list[Stall]:
        """The stalls, the longest first.

        A visit waits for its blocks' copies to the device. If a block was still being read from disk for most of the
        wait, the read is what held the visit up.
        """
        return list(self._stalls)

    def shown_stalls(self) -> list[Stall]:
        """The waits for copies, the longest first; then all waits for the host itself as one, with their sum."""
        copies = [stall for stall in self._stalls if stall.what]
        own = [stall.seconds for stall in self._stalls if not stall.what]
        return copies + ([Stall(counted(len(own), "visit"), sum(own), "host", "")] if own else [])

    @cached_property
    def _stalls(self) -> tuple[Stall, ...]:
        loads = [*self.of_lane("onload"), *self.of_lane("gather")]
        copies = sorted(loads, key=lambda copy: copy.end_seconds, reverse=True)[::-1]
        ends = [copy.end_seconds for copy in copies]
        fetched: dict[str, list[Span]] = {}
        for span in self.of_lane("fetch"):
            fetched.setdefault(span.what, []).append(span)
        reads = {what: _Reads(own) for what, own in fetched.items()}
        found = []
        for span in self.spans:
            if span.waited_lane:
                found.append(Stall(span.what, span.seconds, span.waited_lane, span.waited_for))
            elif span.lane == "compute" and span.name == "stall":
                place = bisect_right(ends, span.end_seconds + max(1e-6, 0.02 * span.seconds)) - 1
                last = copies[place] if place >= 0 else None
                if last is not None and ends[place] < span.begin_seconds:
                    last = None  # this copy was over before the wait began
                if last is not None and last.what in reads:
                    read = reads[last.what].between(span.begin_seconds, span.end_seconds)
                    if covered(_times(read), span.begin_seconds, span.end_seconds) > span.seconds / 2:
                        last = read[-1]
                found.append(Stall(span.what, span.seconds, last.lane if last else "host", last.what if last else ""))
        return tuple(sorted(found, key=lambda stall: -stall.seconds))

    def stall_seconds(self, lane: str) -> float:
        """How long compute waited for the lane."""
        return sum(stall.seconds for stall in self.stalls() if stall.lane == lane)

    @property
    def bound_text(self) -> str:
        """What no schedule can beat, and the speeds for which that holds; "" without a plan."""
        if self.planned is None:
            return ""
        bound, compute = seconds_text(self.planned.lower_bound_seconds), seconds_text(self.planned.compute_seconds)
        return f"{bound} at the plan's speeds, where compute takes {compute}: no schedule is below that"

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        """What `to_json` wrote. Raises ValueError for anything else."""
        try:
            fields = json.loads(text)
            if fields.pop("version") != VERSION:
                raise KeyError("version")
            hints = get_type_hints(cls)
            return cls(**{name: _read(hints[name], value, name) for name, value in fields.items()})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"this is no run record of version {VERSION} ({error!r}); write one with handle.report().save(path)"
            ) from error


def _read(hint: Any, value: Any, within: str) -> Any:
    """`value`, read from JSON as this type. It is checked here, or else a report would break off half way."""
    kinds = get_args(hint)
    if hint in (int, float):
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{value!r} among the {within} is no number of seconds or bytes")
        return value
    if hint is str:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} among the {within} is no text")
        return value
    if NoneType in kinds:
        return None if value is None else _read(kinds[0], value, within)
    if get_origin(hint) is dict:
        return {name: _read(kinds[1], each, within) for name, each in value.items()}
    if get_origin(hint) is tuple:
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return tuple(_read(kind, each, within) for kind, each in zip(kinds, value, strict=True))
    hints = get_type_hints(hint)
    if hasattr(hint, "__dataclass_fields__"):
        return hint(**{name: _read(hints[name], each, within) for name, each in value.items()})
    kinds = tuple(hints.values())[: len(value)]  # of a NamedTuple, whose last fields have defaults
    return hint(*(_read(kind, each, within) for kind, each in zip(kinds, value, strict=True)))


def _times(spans: Iterable[Span]) -> list[tuple[float, float]]:
    return [(span.begin_seconds, span.end_seconds) for span in spans]


class _Reads:
    """The reads of one block, found by when they were under way. A drive may end them in another order."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.begin_seconds)
        self.begins = [span.begin_seconds for span in self.spans]
        self.reached = list(accumulate((span.end_seconds for span in self.spans), max))

    def between(self, first: float, last: float) -> list[Span]:
        """The reads that may have been under way between two moments."""
        return self.spans[bisect_right(self.reached, first) : bisect_left(self.begins, last)]
