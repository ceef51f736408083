"""On which lanes do bytes move, and how is order across lanes kept? By events alone; see docs/design/ordering.md.

The lanes of one device: compute (the stream that is current when headrace is called), onload (host to device), offload
(device to host), host (one worker thread for additions and casts in host memory), side (kernels beside compute, such
as unpacking), and two for collectives between devices. There are two implementations with one interface: streams and
events on an accelerator, and worker threads where the CPU itself computes.
"""

import itertools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeVar

import torch

from headrace.runtime.autograd import dispatch_modes, without_modes
from headrace.runtime.device import is_accelerator, new_stream
from headrace.runtime.threads import Job, OneThread, wait_asleep

_AT_ONCE_BYTES = 256 * 2**10  # a thread copies these about as quickly as it wakes another one
_LONG_SECONDS = 0.1  # waiting for a transfer to be submitted, which may depend on other ranks
_T = TypeVar("_T")
Copy = tuple[torch.Tensor, torch.Tensor]  # destination, source: the same shape and number of bytes
# A moment on a lane, to be timed: an event on an accelerator; on the CPU seconds, or what tells them (`reached_at`).
Tick = Any


class Lane(StrEnum):
    """A lane that copies. Copies on one lane run in the order they were submitted in."""

    ONLOAD = "onload"  # host to device; one lane, because one link has one bandwidth
    OFFLOAD = "offload"  # device to host; its own, because the link carries both directions at once


class CollectiveLane(StrEnum):
    """A lane on which the devices of several ranks send each other what they hold."""

    GATHER = "gather"  # each device sends its range, and gets all ranges
    REDUCE = "reduce"  # each device sends all ranges, and gets the sum of its own range


class Event(Protocol):
    """A moment that has been or will be reached on some lane."""

    def synchronize(self) -> None:
        """Blocks until it is reached; raises the error of the work before it."""

    def query(self) -> bool:
        """Whether it has been reached."""


@dataclass(frozen=True)
class Transfer:
    """Copies in flight. It keeps their memory alive until its owner lets go of it, and has the event of their end."""

    lane: Lane | CollectiveLane
    copies: tuple[Copy, ...]
    nbytes: int
    begun: Tick
    done: Any  # an Event; on an accelerator a timing event, so that it is a Tick too

    def done_while(self, doing: Callable[[], None]) -> Any:
        """`done`, at once: as `LateTransfer.done_while`, for copies that are submitted already."""
        return self.done


class LateTransfer:
    """Copies that another thread will submit, used like a Transfer. `begun` and `done` block until they are submitted,
    and raise what kept them from that. It is also an Event itself: the end of the copies."""

    copies: tuple[Copy, ...] = ()  # it keeps no memory alive itself

    def __init__(self, lane: Lane | CollectiveLane, nbytes: int, submitted: "Future[Transfer]") -> None:
        self.lane = lane
        self.nbytes = nbytes
        self._submitted = submitted

    @property
    def begun(self) -> Tick:
        return self._submitted.result().begun

    @property
    def done(self) -> Any:
        return self._submitted.result().done

    def synchronize(self) -> None:
        wait_asleep(self._submitted.result().done)

    def query(self) -> bool:
        return self._submitted.done() and bool(self._submitted.result().done.query())

    def done_while(self, doing: Callable[[], None]) -> Any:
        """As `done`; while that takes long, calls `doing` again and again."""
        while True:
            with suppress(TimeoutError):
                self._submitted.exception(_LONG_SECONDS)
            if self._submitted.done():
                return self.done
            doing()


class Lanes(ABC):
    """The lanes of one compute device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host = OneThread("headrace-host", device)

    @abstractmethod
    def mark(self) -> Event:
        """The moment when the compute lane has done all that it has been given until now."""

    @abstractmethod
    def copy(self, lane: Lane, copies: Sequence[Copy], after: Event) -> Transfer:
        """Submits copies that start when `after` is reached and the lane is free. Never blocks. No dispatch mode sees
        them: a selective checkpoint counts operators, and copies may differ between forward and recomputation.
        """

    @abstractmethod
    def together(self, lane: CollectiveLane, job: Callable[[], None], nbytes: int, after: Event) -> Transfer:
        """Submits the collective over `nbytes` that `job` calls; it starts when `after` is reached.

        Called on a thread of headrace's, one for each lane, since it may block.
        """

    @abstractmethod
    def beside(self, job: Callable[[], None], after: Sequence[Event]) -> Tick:
        """Submits the kernels that `job` launches on the side lane: they run beside the compute lane's. They start when
        all of `after` are reached. Returns the tick of their end.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Makes all that the compute lane is given from now on start after `event`."""

    @abstractmethod
    def compute_stream(self) -> Any:
        """The stream that is the compute lane on this thread now; None on the CPU."""

    @abstractmethod
    def computing_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Within this context, the compute lane of this thread is `stream`, which `compute_stream()` gave."""

    @abstractmethod
    def tick(self) -> Tick:
        """The present moment of the compute lane, to be timed later."""

    @abstractmethod
    def intervals(self, ticks: Sequence[Tick]) -> list[float]:
        """Seconds from each tick to the next. Blocks until all are reached, so it is not for the hot path."""

    def seconds(self, begin: Tick, end: Tick) -> float:
        """Seconds between two ticks. Waits until both are reached."""
        return self.intervals((begin, end))[0]

    @abstractmethod
    def seconds_to_host(self, begin: Tick, moment: float) -> float:
        """Seconds from a tick to `moment`, a time of the host's `time.perf_counter`. Waits for the compute lane."""

    def run(self, job: Callable[[], _T], after: Event) -> "Future[_T]":
        """Submits `job` to the host lane's thread, which waits for `after` first."""

        def ordered() -> _T:
            wait_asleep(after)
            return job()

        return self._host.submit(ordered)

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads of the lanes when their work is done; `wait` blocks until then. See `OneThread`."""
        self._host.shutdown(wait=wait)


def open_lanes(device: torch.device) -> Lanes:
    """The lanes of `device`."""
    return StreamLanes(device) if is_accelerator(device) else ThreadLanes(device)


class StreamLanes(Lanes):
    """Lanes of an accelerator: one stream for each direction, made once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._streams: dict[str, torch.Stream] = {}
        for lane in Lane:
            self._streams[lane] = new_stream(device, self._streams.values())

    def mark(self) -> Event:
        return torch.accelerator.current_stream(self.device).record_event()

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Event) -> Transfer:
        if dispatch_modes():
            with without_modes():
                return self.copy(lane, copies, after)
        stream = self._streams[lane]
        stream.wait_event(after)  # type: ignore[arg-type]
        begun = self._tick_on(stream)
        nbytes = 0
        with entered(stream):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)
                nbytes += source.nbytes
        return Transfer(lane, tuple(copies), nbytes, begun, self._tick_on(stream))

    def together(self, lane: CollectiveLane, job: Callable[[], None], nbytes: int, after: Event) -> Transfer:
        return Transfer(lane, (), nbytes, *self._launch(lane, job, (after,)))

    def beside(self, job: Callable[[], None], after: Sequence[Event]) -> Tick:
        return self._launch("side", job, after)[1]

    def _launch(self, lane: str, job: Callable[[], None], after: Sequence[Event]) -> tuple[Tick, Tick]:
        """Calls `job` on the lane's stream, which is made at first use. Returns the begin and end of its kernels."""
        if lane not in self._streams:
            self._streams[lane] = new_stream(self.device, self._streams.values())
        stream = self._streams[lane]
        for event in after:
            stream.wait_event(event)  # type: ignore[arg-type]
        begun = self._tick_on(stream)
        with entered(stream):
            job()
        return begun, self._tick_on(stream)

    def wait(self, event: Event) -> None:
        torch.accelerator.current_stream(self.device).wait_event(event)  # type: ignore[arg-type]

    def compute_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def computing_on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream == self.compute_stream() else entered(stream)

    def tick(self) -> Tick:
        return self._tick_on(torch.accelerator.current_stream(self.device))

    def intervals(self, ticks: Sequence[Tick]) -> list[float]:
        for tick in ticks:
            if not tick.query():
                tick.synchronize()
        return [float(begin.elapsed_time(end)) / 1e3 for begin, end in itertools.pairwise(ticks)]

    def seconds_to_host(self, begin: Tick, moment: float) -> float:
        now = self.tick()
        now.synchronize()
        return self.seconds(begin, now) - (time.perf_counter() - moment)

    def _tick_on(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        stream.record_event(event)
        return event


def entered(stream: torch.Stream) -> AbstractContextManager[Any]:
    """A new Python object for the stream, for one `with` statement on any thread.

    A stream's Python object remembers which stream was current before. Two threads that entered the same object at the
    same time would go on with each other's stream and device.
    """
    fresh: Any = torch.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return fresh  # type: ignore[no-any-return]


class _Passed:
    """The event of a moment that has passed: if the CPU computes, the asking thread has done its work already."""

    def __init__(self, moment: float = 0.0) -> None:
        self._moment = moment

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def reached_at(self) -> float:
        """When it passed, in seconds of `time.perf_counter`."""
        return self._moment


_REACHED = _Passed()


class ThreadLanes(Lanes):
    """Lanes where the CPU computes: a worker thread for each direction. Copies release the interpreter lock.

    The submitting thread makes a small copy at once if the lane is idle, since waking another thread takes longer.
    """

    tick = staticmethod(time.perf_counter)

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._threads = {lane: OneThread(f"headrace-{lane.value}") for lane in Lane}
        self._copying = {lane: threading.Lock() for lane in Lane}
        # The last job of each thread, by a weak reference: a failed job keeps the memory that it should have copied.
        self._last: dict[Lane, weakref.ref[Future[float]]] = {}

    def mark(self) -> Event:
        return _REACHED

    def copy(self, lane: Lane, copies: Sequence[Copy], after: Event) -> Transfer:
        if dispatch_modes():
            with without_modes():
                return self.copy(lane, copies, after)
        nbytes = 0
        for _, source in copies:
            nbytes += source.nbytes
        last = self._last[lane]() if lane in self._last else None
        if nbytes <= _AT_ONCE_BYTES and after is _REACHED and (last is None or last.done()):
            begun_at = time.perf_counter()
            with self._copying[lane], torch.inference_mode():
                for destination, source in copies:
                    destination.copy_(source)
            return Transfer(lane, tuple(copies), nbytes, begun_at, _Passed(time.perf_counter()))
        begun: Job[float] = Job()
        pending = list(copies)

        def job() -> float:
            try:
                after.synchronize()
            finally:
                begun.set_result(time.perf_counter())
            with self._copying[lane], torch.inference_mode():  # no autograd bookkeeping on this thread
                for _ in range(len(pending)):
                    pending[0][0].copy_(pending[0][1])
                    del pending[0]  # so that this thread holds no memory when it outlives the job by a moment
            return time.perf_counter()

        submitted = self._threads[lane].submit(job)
        self._last[lane] = weakref.ref(submitted)
        return Transfer(lane, tuple(copies), nbytes, begun, submitted)

    def together(self, lane: CollectiveLane, job: Callable[[], None], nbytes: int, after: Event) -> Transfer:
        after.synchronize()
        begun_at = time.perf_counter()
        job()
        return Transfer(lane, (), nbytes, begun_at, _Passed(time.perf_counter()))

    def beside(self, job: Callable[[], None], after: Sequence[Event]) -> Tick:
        for event in after:
            event.synchronize()
        job()
        return self.tick()

    def wait(self, event: Event) -> None:
        if not isinstance(event, _Passed):
            event.synchronize()

    def compute_stream(self) -> Any:
        return None

    def computing_on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def intervals(self, ticks: Sequence[Tick]) -> list[float]:
        moments = [tick if type(tick) is float else tick.reached_at() for tick in ticks]
        return [end - begin for begin, end in itertools.pairwise(moments)]

    def seconds_to_host(self, begin: Tick, moment: float) -> float:
        return self.seconds(begin, moment)

    def close(self, *, wait: bool = True) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=wait)
        super().close(wait=wait)
