"""How does one thread give work to another, and wait for it, so that Ctrl-C does no harm?

Ctrl-C may strike the main thread at any instruction of Python. Events and conditions of the standard library can be
left locked by that, and then whoever is to wake it waits itself; and an executor whose thread was just being started
starts another one for the next job.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from headrace.runtime.device import is_accelerator

__all__ = ["Gate", "Job", "OneThread", "on_own_thread", "this_is_own_thread"]

T = TypeVar("T")


class Gate:
    """Closed at first, then open for good: any number of threads wait for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self.is_open = False

    def open(self) -> None:
        """Lets all pass. To be called once."""
        self.is_open = True
        self._lock.release()

    def wait(self) -> None:
        """The caller waits until it is open."""
        with self._lock:
            pass


class _Condition(threading.Condition):
    """Its lock is taken by C code alone: in the standard one Ctrl-C may strike between that and the `with` block."""

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class Job(Future[T]):
    """A Future that may be waited for on the main thread. Also the event of its end (runtime/lanes.py)."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()

    def cancel(self) -> bool:
        """No: what was handed over is done."""
        return False

    def synchronize(self) -> None:
        """The caller waits for it; raises what it raised."""
        self.result()

    def query(self) -> bool:
        """Whether it is done."""
        return self.done()

    def reached_at(self) -> T:
        """When it was done, for one that gives that; waits for it."""
        return self.result()


class OneThread(ThreadPoolExecutor):
    """Runs jobs in the order of their submission, on one thread, which runs already: no job can start a second one.

    `device`: what the jobs' streams and events are of, if they have any. It is the thread's current one, which is the
    first otherwise: on CUDA whoever touches an event of another device then makes a context of half a gigabyte on the
    first.

    A destructor ends it by `shutdown(wait=False)`: the garbage collector may come while another thread begins or ends,
    which holds a lock of `threading` that waiting for a thread takes too. At exit it is waited for in any case.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        super().__init__(1, thread_name_prefix=name, initializer=this_is_own_thread, initargs=(device,))
        super().submit(_nothing)

    def submit(self, job: Callable[..., T], /, *args: Any, **kwargs: Any) -> Job[T]:
        """Calls `job` on the thread. Never blocks. The result is what it returns or raises."""
        told: Job[T] = Job()
        super().submit(_perform, told, [(job, args, kwargs)])
        return told

    def _adjust_thread_count(self) -> None:
        """Called by `submit`. Past the first time it would take a semaphore, which Ctrl-C can leave locked."""
        if not self._threads:
            super()._adjust_thread_count()


_threads = threading.local()


def this_is_own_thread(device: torch.device | None = None) -> None:
    """From now on the calling thread is one of headrace's, for which others wait; `device` is its current one."""
    _threads.is_own = True
    if device is not None and is_accelerator(device):
        torch.accelerator.set_device_index(device.index)


def on_own_thread() -> bool:
    """Whether the calling thread is such a one: a destructor that the garbage collector runs there waits for nobody."""
    return getattr(_threads, "is_own", False)


def _perform(told: Job[T], work: list[tuple[Callable[..., T], tuple[Any, ...], dict[str, Any]]]) -> None:
    """`work` has one job, and lets go of it before anyone is told: who waited finds memory free that it was given."""
    job, args, kwargs = work.pop()
    try:
        result = job(*args, **kwargs)
    except BaseException as error:
        told.set_exception(error)
        del told  # which holds the error, and that this frame
    else:
        del job, args, kwargs
        told.set_result(result)


def _nothing() -> None:
    pass
