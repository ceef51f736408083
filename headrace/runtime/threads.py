"""How does one thread give work to another, and wait for it, so that Ctrl-C does no harm?

Ctrl-C may interrupt the main thread at any instruction of Python. That can leave events and conditions of the standard
library locked, so that the thread that should wake the main thread blocks, too. It can also interrupt an executor that
is just starting its thread; the executor then starts another one for the next job.
"""

import _thread
import functools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from headrace.runtime.device import is_accelerator

T = TypeVar("T")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS, _PAUSE_GROWTH = 20e-6, 500e-6, 1.25


class Gate:
    """Closed at first, then open for good. Any number of threads can wait until it is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_open = False

    def open(self) -> None:
        """Opens it, so that all waiting threads go on. To be called once."""
        self.is_open = True
        self._lock.release()

    def wait(self) -> None:
        """Blocks until it is open."""
        with self._lock:
            pass


def beside(job: Callable[[T], object], argument: T) -> Gate:
    """Has `job`, which raises nothing, called on a thread of its own; on this one if the system starts no other. The
    gate opens at the job's end. Ctrl-C at any moment lets the job end, and a process exits without waiting for it.
    """
    gate = Gate()

    def perform() -> None:
        mark_headrace_thread()
        job(argument)
        gate.open()

    try:
        _thread.start_new_thread(perform, ())
    except RuntimeError:  # too many threads, or the interpreter ends
        job(argument)
        gate.open()
    return gate


class Condition(threading.Condition):
    """A condition that takes its lock in C. The standard one lets Ctrl-C in between that and the `with` body."""

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class Job(Future[T]):
    """A Future that the main thread may wait for. It is also the Event of its end (runtime/lanes.py)."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()

    def cancel(self) -> bool:
        """False: a job that was submitted is always done."""
        return False

    def synchronize(self) -> None:
        """Blocks until the job is done; raises what it raised."""
        self.result()

    def query(self) -> bool:
        """Whether the job is done."""
        return self.done()

    def reached_at(self) -> T:
        """The job's result, which for a copy is the time of its end. Blocks until it is done."""
        return self.result()


class OneThread(ThreadPoolExecutor):
    """Runs jobs in the order of their submission on one thread, which is started at once: no job can start a second.

    `device`: the device of the jobs' streams and events, if any. It becomes the thread's current device. Otherwise its
    current device would be the first one, and on CUDA a thread that touches an event of another device makes a context
    of half a gigabyte on its current one.

    A destructor ends it by `shutdown(wait=False)`: the garbage collector may run while another thread begins or ends
    and holds a lock of `threading` that waiting for a thread takes, too. At exit, the thread is waited for in any case.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        super().__init__(1, thread_name_prefix=name, initializer=mark_headrace_thread, initargs=(device,))
        super().submit(_nothing)

    def submit(self, job: Callable[..., T], /, *args: Any, **kwargs: Any) -> Job[T]:
        """Has `job` called on the thread. Never blocks. The returned Job gets what it returns or raises."""
        told: Job[T] = Job()
        super().submit(_perform, told, [(job, args, kwargs)])
        return told

    def _adjust_thread_count(self) -> None:
        """Called by `submit`. After the first call, it would take a semaphore, which Ctrl-C can leave locked."""
        if not self._threads:
            super()._adjust_thread_count()


_threads = threading.local()


def mark_headrace_thread(device: torch.device | None = None) -> None:
    """Marks the calling thread as one of headrace's, which others wait for. `device` becomes its current device."""
    _threads.is_own = True
    if device is not None and is_accelerator(device):
        torch.accelerator.set_device_index(device.index)


def on_headrace_thread() -> bool:
    """Whether the calling thread is headrace's own: a destructor that runs there must not wait for other threads."""
    return getattr(_threads, "is_own", False)


def wait_asleep(event: Any) -> None:
    """Blocks until `event` is reached, as its `synchronize` does; a thread of headrace's sleeps meanwhile.

    PyTorch's waits for events of a stream spin, as `blocking=True` has no effect on `torch.Event`: each thread would
    take a core from the updates. A user's thread waits as PyTorch does: Ctrl-C takes effect only at the end.
    """
    pause = _FIRST_PAUSE_SECONDS
    while isinstance(event, torch.Event) and on_headrace_thread() and not event.query():
        time.sleep(pause)
        pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE_SECONDS)
    event.synchronize()


def keeps_interrupts(finalizer: Callable[..., None]) -> Callable[..., None]:
    """Decorates a function that is called when an object is let go of. Python prints and drops whatever is raised in
    it. So if Ctrl-C interrupts it, a thread sends the Ctrl-C again once it is over. A Ctrl-C that came before, while no
    Python code ran, takes effect as the call begins, and is lost. So is one that comes in a callback of `gc.callbacks`.
    """

    def call(*args: Any, **kwargs: Any) -> None:
        try:
            finalizer(*args, **kwargs)
        except KeyboardInterrupt:
            _thread.start_new_thread(_interrupt_main_thread, ())

    _finalizers.add(call.__code__)
    return functools.wraps(finalizer)(call)


_finalizers = {weakref.finalize.__call__.__code__}


def _interrupt_main_thread() -> None:
    """Does what Ctrl-C does, also to a main thread that waits in a call of the system.

    Objects that are let go of together have their finalizers called in a row: this waits until the last one is over.
    """
    while _is_in_finalizer(threading.main_thread().ident or 0):
        time.sleep(_LONGEST_PAUSE_SECONDS)
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:  # Windows
        _thread.interrupt_main()


def _is_in_finalizer(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code not in _finalizers:
        frame = frame.f_back
    return frame is not None


def _perform(told: Job[T], work: list[tuple[Callable[..., T], tuple[Any, ...], dict[str, Any]]]) -> None:
    """Performs the one job in `work`, and lets go of it before `told` is set, so that its memory is free by then."""
    job, args, kwargs = work.pop()
    try:
        result = job(*args, **kwargs)
    except BaseException as error:
        told.set_exception(error)
        del told  # it holds the error, whose traceback holds this frame
    else:
        del job, args, kwargs
        told.set_result(result)


def _nothing() -> None:
    pass
