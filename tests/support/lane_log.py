"""What moves on which lane, and what waits for what? A record that is the same in every run, to be compared as text.

Copies are done at once, in the order in which they are submitted, and clocks tick by what is asked of them: plans are
made of these seconds, so that they do not depend on the machine.
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace.api
from headrace.runtime.lanes import CollectiveLane, Copy, Event, Lane, Lanes, Tick, Transfer

_COMPUTE_TICKS = 1000  # of one layer, in each direction
_BYTES_PER_TICK = 8  # of a copy


class LaneLog:
    """The lines so far. Each begins with what computes; what was submitted or waited for meanwhile follows it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.clock = 0

    def begin(self, what: str) -> None:
        """Another line."""
        self.lines.append(what)

    def note(self, what: str) -> None:
        """More on this line, from whatever thread."""
        self.lines[-1] += f"; {what}"

    def computes(self, what: str) -> None:
        """A layer computes."""
        self.clock += _COMPUTE_TICKS
        self.begin(what)

    def text(self) -> str:
        """All of it."""
        return "".join(f"{line}\n" for line in self.lines)


class _Moment:
    """A moment on some lane: `name` says which."""

    def __init__(self, log: LaneLog, name: str, tick: int) -> None:
        self.log, self.name, self.tick = log, name, tick

    def synchronize(self) -> None:
        if not threading.current_thread().name.startswith("headrace"):  # when those wait depends on the machine
            self.log.note(f"host waits for {self.name}")

    def query(self) -> bool:
        return True


class RecordingLanes(Lanes):
    """Lanes that are one: what is submitted has been done when that returns."""

    def __init__(self, device: torch.device, log: LaneLog) -> None:
        super().__init__(device)
        self._log = log
        self._ends = dict.fromkeys([*Lane, *CollectiveLane], 0)
        self._counts = dict.fromkeys([*Lane, *CollectiveLane], 0)

    def mark(self) -> Event:
        return _Moment(self._log, f"compute {len(self._log.lines)}", self._log.clock)

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Event) -> Transfer:
        nbytes = sum(source.nbytes for _, source in copies)
        for destination, source in copies:
            destination.copy_(source)
        return self._transfer(lane, tuple(copies), nbytes, after, f"{nbytes} bytes in {len(copies)}")

    def together(self, lane: CollectiveLane, job: Callable[[], None], nbytes: int, after: Event) -> Transfer:
        job()
        return self._transfer(lane, (), nbytes, after, f"{nbytes} bytes together")

    def _transfer(
        self, lane: Lane | CollectiveLane, copies: tuple[Copy, ...], nbytes: int, after: Any, what: str
    ) -> Transfer:
        self._counts[lane] += 1
        name = f"{lane.value} {self._counts[lane]}"
        self._log.note(f"{name}: {what} after {after.name}")
        begun = max(self._ends[lane], after.tick)
        self._ends[lane] = begun + nbytes // _BYTES_PER_TICK
        moments = (_Moment(self._log, name, tick) for tick in (begun, self._ends[lane]))
        return Transfer(lane, copies, nbytes, *moments)

    def beside(self, job: Callable[[], None], after: Sequence[Event]) -> Tick:
        job()
        return self.mark()

    def wait(self, event: Any) -> None:
        self._log.note(f"wait for {event.name}")
        self._log.clock = max(self._log.clock, event.tick)

    def compute_stream(self) -> Any:
        return None

    def computing_on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def tick(self) -> Tick:
        return _Moment(self._log, "", self._log.clock)

    def intervals(self, ticks: Sequence[Tick]) -> list[float]:
        return [float(end.tick - begin.tick) * 1e-6 for begin, end in itertools.pairwise(ticks)]

    def seconds_to_host(self, begin: Tick, moment: float) -> float:
        return 0.0


class _Noted(torch.autograd.Function):
    """The identity, of which the log has forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: LaneLog, name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.computes(f"forward {name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.log.computes(f"backward {ctx.name}")
        return gradient, None, None


class Told(nn.Module):
    """A module whose forward and backward the log has: `log` is set when a record begins."""

    log: LaneLog

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.inner, self.name = inner, name

    def forward(self, x: Tensor, *others: Any) -> Any:
        return self.inner(_Noted.apply(x, Told.log, self.name), *others)


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaneLog]:
    """Models that are offloaded inside have recording lanes, and their own log."""
    log = Told.log = LaneLog()
    with monkeypatch.context() as patched:
        patched.setattr(headrace.api, "open_lanes", lambda device: RecordingLanes(device, log))
        yield log
