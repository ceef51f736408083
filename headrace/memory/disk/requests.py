"""In which order do reads and writes go to the disk? For the same bytes, as submitted; else when a thread is free.

Reads of the same bytes may run at once. A write waits for the reads and writes of its bytes that were submitted before
it, and a read for the writes. So nothing is read before its last write has landed, and nothing is overwritten while it
is read. Bytes whose write failed cannot be read until a later write has succeeded.

Ctrl-C may interrupt the submitting thread at any instruction. So that thread does only one thing, which either happens
or does not: it puts the request in a queue. (Ctrl-C can leave futures, conditions and executors of the standard library
locked.)
"""

import itertools
import os
import threading
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import copy
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue

import torch

from headrace.errors import StateError
from headrace.memory.disk.extent import Extent
from headrace.memory.ranges import Range
from headrace.runtime.lanes import Event
from headrace.runtime.threads import Gate, keeps_interrupts, mark_headrace_thread, wait_asleep

_Job = Callable[[], object]


class Access(Enum):
    """How a request uses its extent."""

    READ = "read"  # other reads of its bytes may run at the same time
    WRITE = "write"  # no other request for its bytes may run at the same time


class Kind(Enum):
    """What a request does with its bytes."""

    TRANSFER = "transfer"  # reads or writes them
    FLUSH = "flush"  # brings to the file what was written through a mapping
    TURN = "turn"  # nothing: it only waits for the requests before it


class Request:
    """One read or write on its way. It is an Event, and has its exception and the moments of its begin and end."""

    def __init__(
        self,
        extent: Extent | None,
        access: Access,
        jobs: Sequence[_Job],
        kind: Kind,
        span: Range,
    ) -> None:
        self.extent = extent  # None: it concerns all extents
        self.access = access
        self.kind = kind
        self.span = span  # the bytes of the extent that it concerns
        self.jobs: list[_Job | None] = list(jobs)  # None: this job is done
        self.ended_jobs = itertools.count(1)  # its next() is atomic
        self.waits_for = 0  # requests and events that must be done before this one begins
        self.followers: list[Request] = []
        self.error: BaseException | None = None
        self._begun_at = self._ended_at = 0.0
        self._ended = False
        self._begin, self._end = Gate(), Gate()

    def synchronize(self) -> None:
        """Blocks until it has ended; raises its error."""
        self.settle()
        if self.error is not None:  # a copy: the store keeps the error, and a raised one keeps variables alive
            raise copy(self.error).with_traceback(self.error.__traceback__) from self.error.__cause__

    def settle(self) -> None:
        """Blocks until it has ended, with or without an error."""
        self._end.wait()

    def query(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._ended

    def began_at(self) -> float:
        """When its first byte was requested, in seconds of `time.perf_counter`. Blocks until then."""
        self._begin.wait()
        return self._begun_at

    def reached_at(self) -> float:
        """When it ended, in seconds of `time.perf_counter`. Blocks until then; raises its error."""
        self.synchronize()
        return self._ended_at

    def begin(self) -> None:
        """Notes the moment of the begin."""
        self._begun_at = time.perf_counter()
        self._begin.open()

    def end(self) -> None:
        """Notes the moment of the end, lets go of the memory, and wakes the threads that wait."""
        self.jobs.clear()
        self._ended_at = time.perf_counter()
        self._ended = True
        self._end.open()


class Ended:
    """The end of a request as an Event that never raises: for those who only wait for the memory that it uses."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def synchronize(self) -> None:
        self._request.settle()

    def query(self) -> bool:
        return self._request.query()


class Requests:
    """The requests of one store, with `threads` threads that move bytes, and one that decides which requests begin.

    Two more threads, one for reads and one for writes, wait for the events that requests begin after; the events are of
    `device`.
    """

    def __init__(self, threads: int, device: torch.device | None = None) -> None:
        self._turns = _Turns(threads, device)
        self._owner = os.getpid()
        self._closer = weakref.finalize(self, keeps_interrupts(self._turns.stop))

    def submit(self, request: Request, after: Event | None) -> Request:
        """Lets `request` begin when its turn has come and `after` is reached. Never blocks."""
        if not self._closer.alive:
            raise _closed(request)
        if os.getpid() != self._owner:
            raise StateError(f"the disk tier is process {self._owner}'s, which this one was forked from; use it there")
        self._turns.post(partial(self._turns.enter, request, after))
        return request

    def forgive(self, extent: Extent) -> None:
        """Forgets failed writes of the extent: nobody needs the bytes any more."""
        self._turns.post(lambda: self._turns.failed.pop(extent, None))

    def synchronize(self) -> None:
        """Blocks until all requests have ended; raises the first error of a write that no later write has replaced."""
        self.submit(Request(None, Access.WRITE, (), Kind.TURN, (0, 0)), None).synchronize()

    def close(self) -> None:
        """Blocks until all requests have ended, with or without an error, and ends the threads. May be called twice."""
        if self._closer.detach() is not None:  # not by a call of it, which would keep Ctrl-C from the caller
            self._turns.stop()


class _Turns:
    """Decides which request waits for which. One thread does all of that, taking one message after the other."""

    def __init__(self, threads: int, device: torch.device | None) -> None:
        self._inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._work: SimpleQueue[_Job | None] = SimpleQueue()
        self._waits: dict[Access, SimpleQueue[_Job | None]] = {access: SimpleQueue() for access in Access}
        self._unfinished: dict[Extent | None, list[Request]] = defaultdict(list)
        self.failed: dict[Extent, list[Request]] = {}  # failed writes whose bytes no later write has replaced
        self._stopped = False
        queues = [self._work] * threads + list(self._waits.values())
        self._workers = [_start(_work_off, queue, device) for queue in queues]
        self._thread = _start(self._run, queues, device)

    def post(self, message: _Job) -> None:
        """Has `message` called on the thread of turns; once that thread has ended, on this one, at once."""
        self._inbox.put(message)
        if self._stopped:
            self._take_rest()

    def stop(self) -> None:
        """Blocks until all requests have ended, and ends the threads."""
        self._inbox.put(None)
        # A store that was not closed may be collected with its last request, on one of these threads.
        if threading.current_thread() not in (self._thread, *self._workers):
            for thread in (self._thread, *self._workers):  # the process crashes if one frees a tensor at exit
                thread.join()

    def enter(self, request: Request, after: Event | None) -> None:
        """Queues `request` behind the earlier requests that it must not overlap with. On the thread of turns."""
        if self._stopped:
            request.error = _closed(request)
            request.begin()
            request.end()
            return
        turns = self._unfinished.values() if request.extent is None else [self._unfinished[request.extent]]
        for earlier in [one for turn in turns for one in turn if _exclude(request, one)]:
            earlier.followers.append(request)
            request.waits_for += 1
        self._unfinished[request.extent].append(request)
        request.waits_for += 1  # for `after`, or for the next line
        if after is None:
            self._advance(request)
        else:
            self._waits[request.access].put(partial(self._wait, request, after))

    def _run(self, queues: list["SimpleQueue[_Job | None]"]) -> None:
        stopping = False
        while not stopping or self._unfinished:
            message = self._inbox.get()
            if message is None:
                stopping = True
            else:
                message()
            del message  # it may refer to the Requests, whose end stops this thread
        for queue in queues:
            queue.put(None)
        self._stopped = True
        self._take_rest()

    def _take_rest(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if message is not None:
                message()

    def _wait(self, request: Request, after: Event) -> None:
        """Waits for the event that a request begins after, on one of the two threads that wait."""
        try:
            wait_asleep(after)
        except BaseException as error:  # the request cannot begin: whoever waits for it must know
            request.error = error
        self.post(partial(self._advance, request))

    def _advance(self, *requests: Request) -> None:
        """Called when one thing that each of `requests` waits for is done; begins those that wait for nothing more."""
        advanced = list(requests)
        while advanced:
            request = advanced.pop()
            request.waits_for -= 1
            if request.waits_for:
                continue
            if request.extent is None:
                request.error = next((old.error for failed in self.failed.values() for old in failed), None)
            else:
                failed = self.failed.get(request.extent, ())
                spoilt = [old.error for old in failed if _meet(request.span, old.span) and not _mends(request, old)]
                request.error = request.error or next(iter(spoilt), None)
            request.begin()
            if request.error is not None or not request.jobs:
                request.end()
                advanced.extend(self._leave(request))
            count = len(request.jobs)
            for number in range(count):
                self._work.put(partial(self._do, request, number, count))

    def _do(self, request: Request, number: int, count: int) -> None:
        """Does one job of a request, on a thread that moves bytes."""
        job, request.jobs[number] = request.jobs[number], None
        try:
            if request.error is None and job is not None:
                job()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # its frames' variables refer to the memory
            request.error = error
        del job  # before the request ends: this thread must hold no memory if it goes on a moment longer
        if next(request.ended_jobs) == count:
            self.post(lambda: self._advance(*self._leave(request)))
            request.end()

    def _leave(self, request: Request) -> list[Request]:
        """Called when `request` has ended, with or without an error. Returns the requests that waited for it."""
        turn = self._unfinished[request.extent]
        turn.remove(request)
        if not turn:
            del self._unfinished[request.extent]
        if request.access is Access.WRITE and request.extent is not None:
            landed = request.error is None
            still = [old for old in self.failed.pop(request.extent, ()) if not (landed and _mends(request, old))]
            if request.error is not None and request.kind is not Kind.TURN:
                still.append(request)
            if still:
                self.failed[request.extent] = still
        followers, request.followers = request.followers, []
        return followers


def _meet(one: Range, other: Range) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _exclude(one: Request, other: Request) -> bool:
    """Whether one of the two requests has to wait for the other. They concern one extent, or one concerns all."""
    if one.kind is Kind.TRANSFER is other.kind and not _meet(one.span, other.span):
        return False
    return Access.WRITE in (one.access, other.access)


def _mends(request: Request, failed: Request) -> bool:
    """Whether `request`, if it succeeds, writes all the bytes that `failed` was to write."""
    if request.access is Access.READ or request.kind is Kind.TURN:
        return False
    return request.span[0] <= failed.span[0] and failed.span[1] <= request.span[1]


def _start(target: Callable[..., None], argument: object, device: torch.device | None) -> threading.Thread:
    def run() -> None:
        mark_headrace_thread(device)
        target(argument)

    thread = threading.Thread(target=run, name="headrace-disk", daemon=True)
    thread.start()
    return thread


def _work_off(queue: "SimpleQueue[_Job | None]") -> None:
    while (job := queue.get()) is not None:
        job()
        del job  # so that its request is freed, too


def _closed(request: Request) -> StateError:
    what = "the disk tier" if request.extent is None else repr(request.extent.name)
    return StateError(f"{what} cannot be reached: the disk store is closed")
