"""How do threads learn from each other what has been waited for? By Python's locks and queues, which are watched.

What one thread has waited for holds for another only when the two have synchronised since: by a future, an executor, a
lock, a condition, an event, a queue, the start or the join of a thread, or a backward. A plain variable is no such
means: what it says may be right, but nothing makes it so.
"""

import _queue
import _thread
import threading

import torch

from ._native import native

# By the system's numbers of the threads that were started; also of those that have ended since the last reset.
thread_names: dict[int, str] = {}


def watch_handovers() -> None:
    """From now on, in the whole process."""
    native.watch_handovers(
        _thread.LockType, _thread.RLock, _queue.SimpleQueue, _thread, type(torch.autograd.Variable._execution_engine)
    )
    join = threading.Thread.join

    def watched_join(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        if self.ident is not None and not self.is_alive():
            native.joins_thread(self.ident)

    threading.Thread.join = watched_join  # type: ignore[method-assign]
    start = threading.Thread.start

    def watched_start(self: threading.Thread) -> None:
        start(self)
        if self.native_id is not None:
            thread_names[self.native_id] = self.name

    threading.Thread.start = watched_start  # type: ignore[method-assign]


def forget_ended_threads() -> None:
    """Forgets the names of threads that have ended: the system gives their numbers to others, and those that
    `threading` did not start have no name here.
    """
    known = set(thread_names)
    present = {thread.native_id for thread in threading.enumerate()}
    for native_id in known - present:
        del thread_names[native_id]
