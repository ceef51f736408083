"""What time is it for a job of an executor? Its worker has a clock of its own, and futures carry its time to who waits.

Without this, a worker that waits for an event would move everybody's clock at whatever moment the machine lets it run,
and the same program would take another virtual time each time.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ._native import native

_SECONDS = "_emu_seconds"  # attribute of a future: when its result was set

_worker = threading.local()


def give_workers_clocks() -> None:
    """From now on a job of a `ThreadPoolExecutor` begins, in virtual time, when it was handed over and its worker is
    free; and `Future.result()` waits until the result was set."""
    submit, result, exception = ThreadPoolExecutor.submit, Future.result, Future.exception
    set_result, set_exception = Future.set_result, Future.set_exception

    def timed_submit(self: ThreadPoolExecutor, job: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        return submit(self, _on_own_clock, native.virtual_seconds(), job, args, kwargs)

    def timed_set_result(self: "Future[Any]", value: Any) -> None:
        setattr(self, _SECONDS, native.virtual_seconds())
        set_result(self, value)

    def timed_set_exception(self: "Future[Any]", error: BaseException | None) -> None:
        setattr(self, _SECONDS, native.virtual_seconds())
        set_exception(self, error)

    def timed_result(self: "Future[Any]", timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            _wait_for(self)

    def timed_exception(self: "Future[Any]", timeout: float | None = None) -> BaseException | None:
        try:
            return exception(self, timeout)
        finally:
            _wait_for(self)

    ThreadPoolExecutor.submit = timed_submit  # type: ignore[method-assign]
    Future.set_result = timed_set_result  # type: ignore[method-assign]
    Future.set_exception = timed_set_exception  # type: ignore[method-assign]
    Future.result = timed_result  # type: ignore[method-assign]
    Future.exception = timed_exception  # type: ignore[method-assign]


def _on_own_clock(handed_over: float, job: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if getattr(_worker, "has_clock", False):
        native.host_waits_until(handed_over)
    else:
        native.set_own_clock(handed_over)
        _worker.has_clock = True  # until the thread ends, so that the future's result is set by it
    return job(*args, **kwargs)


def _wait_for(future: "Future[Any]") -> None:
    if future.done():
        native.host_waits_until(getattr(future, _SECONDS, 0.0))
