"""How does one thread give work to another, and wait for it, so that Ctrl-C does no harm?

Ctrl-C may strike the main thread at any instruction of Python. Events and conditions of the standard library can be
left locked by that, and then whoever is to wake it waits itself; and an executor whose thread was just being started
starts another one for the next job.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Gate", "one_thread"]


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


def one_thread(name: str) -> ThreadPoolExecutor:
    """Runs jobs in the order of their submission, on one thread, which runs already: no job can start a second one."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    executor.submit(_nothing)
    return executor


def _nothing() -> None:
    pass
