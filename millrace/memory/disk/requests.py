"""In which order do reads and writes go to the disk? Per extent as submitted; otherwise as soon as a thread is free.

Reads of one extent may overlap; a write waits for the reads and writes submitted before it, a read for the write
before it. So nothing is read before its last write has landed, and nothing is overwritten while it is read.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum

from millrace.errors import StateError
from millrace.memory.disk.extent import Extent
from millrace.runtime.lanes import Event

__all__ = ["Access", "Request", "Requests"]


class Access(Enum):
    """How a request uses its extent."""

    READ = "read"  # beside other reads
    WRITE = "write"  # alone


class Request:
    """One read or write on its way: an Event that carries its exception, and the moments of begin and end."""

    def __init__(self, extent: Extent, access: Access, jobs: Sequence[Callable[[], None]], *, whole: bool) -> None:
        self.extent = extent
        self.access = access
        self.whole = whole  # it covers the extent, so a write of this kind makes a failed one good
        self.jobs = tuple(jobs)
        self.jobs_left = len(self.jobs)
        self.waits_for = 0  # requests and events that must be done before this one begins
        self.followers: list[Request] = []
        self.error: BaseException | None = None
        self._begun: Future[float] = Future()
        self._done: Future[float] = Future()

    def synchronize(self) -> None:
        """The caller waits for the end; raises what failed."""
        self._done.result()

    def settle(self) -> None:
        """The caller waits for the end, well or not."""
        self._done.exception()

    def query(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.done()

    def began_at(self) -> float:
        """When its first byte was asked for, in seconds of `time.perf_counter`; waits for that."""
        return self._begun.result()

    def reached_at(self) -> float:
        """When it ended, in seconds of `time.perf_counter`; waits for that and raises what failed."""
        return self._done.result()

    def begin(self) -> None:
        """Notes the moment of the begin."""
        self._begun.set_result(time.perf_counter())

    def end(self) -> None:
        """Notes the end, wakes those who wait, and lets go of the memory that was read into or written from."""
        self.jobs = ()
        if not self._begun.done():
            self.begin()
        if self.error is None:
            self._done.set_result(time.perf_counter())
        else:
            self._done.set_exception(self.error)


class Requests:
    """The requests of one store: some threads that do them, and who has to wait for whom.

    `threads` move bytes; one more thread for reads and one for writes wait for the events that requests begin after.
    """

    def __init__(self, threads: int) -> None:
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="millrace-disk")
        self._waiters = {a: ThreadPoolExecutor(1, thread_name_prefix=f"millrace-disk-{a.value}-after") for a in Access}
        self._unfinished: dict[Extent, list[Request]] = defaultdict(list)
        self._failed: dict[Extent, BaseException] = {}
        self._closed = False

    def submit(self, request: Request, after: Event | None) -> Request:
        """Lets `request` begin when its turn has come and `after` is reached. Never blocks."""
        with self._lock:
            if self._closed:
                raise StateError(f"{request.extent.name!r} cannot be reached: the disk store is closed")
            turn = self._unfinished[request.extent]
            for earlier in turn:
                if Access.WRITE in (request.access, earlier.access):
                    earlier.followers.append(request)
                    request.waits_for += 1
            request.waits_for += 1  # for `after`, or for the end of this method
            turn.append(request)
        if after is None:
            self._one_less(request)
        else:
            self._waiters[request.access].submit(self._wait, request, after)
        return request

    def synchronize(self, extent: Extent | None = None) -> None:
        """Waits for all that was submitted, of one extent or of all; raises the first failure."""
        with self._lock:
            waited = [r for e, turn in self._unfinished.items() if extent in (None, e) for r in turn]
            failed = [error for e, error in self._failed.items() if extent in (None, e)]
        for request in waited:
            request.synchronize()
        if failed:
            raise failed[0]

    def close(self) -> None:
        """Waits until all requests have ended, well or not, and ends the threads."""
        with self._lock:
            self._closed = True
            waited = [request for turn in self._unfinished.values() for request in turn]
        for request in waited:
            request.settle()
        for pool in (*self._waiters.values(), self._workers):
            pool.shutdown(wait=True)

    def _wait(self, request: Request, after: Event) -> None:
        try:
            after.synchronize()
        except BaseException as error:  # the request cannot begin: whoever waits for it must know
            request.error = error
        self._one_less(request)

    def _one_less(self, request: Request) -> None:
        """One thing less that `request` waits for; begins it when that was the last."""
        advanced = [request]
        while advanced:
            request = advanced.pop()
            with self._lock:
                request.waits_for -= 1
                if request.waits_for:
                    continue
                if not (request.access is Access.WRITE and request.whole):
                    request.error = request.error or self._failed.get(request.extent)
            if request.error is not None or not request.jobs:
                advanced.extend(self._finish(request))
            else:
                advanced.extend(self._begin(request))

    def _begin(self, request: Request) -> list[Request]:
        """Hands the jobs to the threads. Returns the followers if it ended here, because no thread takes them."""
        request.begin()
        for number, job in enumerate(request.jobs):
            try:
                self._workers.submit(self._work, request, job)
            except RuntimeError as error:  # the interpreter is going down
                request.error = error
                return self._finish(request) if self._jobs_done(request, len(request.jobs) - number) else []
        return []

    def _work(self, request: Request, job: Callable[[], None]) -> None:
        try:
            if request.error is None:
                job()
        except BaseException as error:
            request.error = error
        if self._jobs_done(request, 1):
            for follower in self._finish(request):
                self._one_less(follower)

    def _jobs_done(self, request: Request, count: int) -> bool:
        with self._lock:
            request.jobs_left -= count
            return request.jobs_left == 0

    def _finish(self, request: Request) -> list[Request]:
        """Ends `request`, well or not. Returns those that waited for it."""
        with self._lock:
            turn = self._unfinished[request.extent]
            turn.remove(request)
            if not turn:
                del self._unfinished[request.extent]
            if request.access is Access.WRITE:
                if request.error is not None:
                    self._failed[request.extent] = request.error
                elif request.whole:
                    self._failed.pop(request.extent, None)
            followers, request.followers = request.followers, []
        request.end()
        return followers
