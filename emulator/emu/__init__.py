"""The device `emu`: importing this module registers it with PyTorch, building it first when needed.

From then on `torch.device("emu")`, `torch.accelerator`, `torch.Stream`, `torch.Event`, `pin_memory()` and
`non_blocking=True` work as on a GPU. The functions below are for tests: settings, counters, and what went wrong.
"""

import atexit
import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ._autograd_exit import wait_for_autograd
from ._device_module import register
from ._handovers import forget_ended_threads, thread_names, watch_handovers
from ._host_watch import host_access, host_access_at, watch_host
from ._native import native
from ._virtual_time import (
    event_seconds,
    exchange_with_peers,
    forget_stream_names,
    host_waits_until,
    host_works,
    name_stream,
    own_clock,
    start_trace,
    virtual_seconds,
    write_trace,
)
from ._worker_time import give_workers_clocks

__all__ = [
    "capture",
    "configure",
    "configured",
    "contexts",
    "event_seconds",
    "exchange_with_peers",
    "host_access",
    "host_access_at",
    "host_waits_until",
    "host_works",
    "name_stream",
    "own_clock",
    "reset",
    "reset_stats",
    "set_tag",
    "settings",
    "spins",
    "start_trace",
    "stats",
    "take_reports",
    "virtual_seconds",
    "watch_host",
    "write_trace",
]

_DEFAULTS = native.settings()


def configure(**settings: Any) -> None:
    """Waits for the device, then changes the named settings and seeds the random scheduler anew.

    Raises KeyError for a name that does not exist, ValueError for a choice that does not.
    """
    native.configure(**settings)


def settings() -> dict[str, Any]:
    """All settings and their values."""
    return dict(native.settings())


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """`configure()` for the length of a with block."""
    before = native.settings()
    native.configure(**settings)
    try:
        yield
    finally:
        native.configure(**before)


def stats() -> dict[str, Any]:
    """Counters since the last `reset_stats()`; bytes and seconds as the names say."""
    return dict(native.stats())


def reset_stats() -> None:
    native.reset_stats()


def take_reports() -> list[str]:
    """The races and misuses found since the last call, at most 200."""
    return list(native.take_reports())


def contexts() -> dict[int, str]:
    """Which devices have had a context since the last `reset()`, each with the thread that made it, and the call.

    On CUDA a context takes half a gigabyte. A thread that never chose a device makes one on the first device when it
    comes back from an event or a stream of another one.
    """
    return {device: f"{_name_of(thread)}: {call}" for device, thread, call in native.contexts()}


def spins() -> dict[str, float]:
    """Which threads have waited for an event or a stream since the last `reset_stats()`, and for how many virtual
    seconds. "autograd": all threads of autograd's.

    On CUDA such a thread takes a core for as long. One that asks `query()` and sleeps until it is true is not here.
    """
    seconds: dict[str, float] = {}
    for thread, is_autograd, spun in native.spins():
        name = "autograd" if is_autograd else _name_of(thread)
        seconds[name] = seconds.get(name, 0) + spun
    return seconds


def _name_of(native_id: int) -> str:
    present = {thread.native_id: thread.name for thread in threading.enumerate()}
    return present.get(native_id) or thread_names.get(native_id, "a thread that Python does not know")


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """The current stream captures, as into a CUDA graph: within the with block its work is taken down and not run.

    Meanwhile nothing may wait for the device or ask it, on any thread: RuntimeError, also at the end of the block.
    """
    native.begin_capture()
    try:
        yield
    finally:
        native.end_capture()


def set_tag(tag: str) -> None:
    """Text that race reports carry for what is enqueued from now on, such as "step 3, layers.7"."""
    native.set_tag(tag)


def reset(**settings: Any) -> None:
    """A clean state between tests: default settings with the given changes; history, reports, time, counters cleared.

    Waits for the device. Streams made before must not be used afterwards: their numbers are given out again.
    """
    native.configure(**(_DEFAULTS | settings))
    native.free_workspaces()
    native.empty_pinned_cache()
    native.begin_epoch()
    forget_stream_names()
    forget_ended_threads()
    native.set_tag("")
    native.take_reports()
    native.reset_stats()


def _note_collection(phase: str, _info: dict[str, int]) -> None:
    native.set_collecting(phase == "start")


@atexit.register
def _shut_down() -> None:
    with contextlib.suppress(RuntimeError):  # an error that no test waited for
        torch.accelerator.synchronize()
    wait_for_autograd()
    native.shut_down()


register()
give_workers_clocks()
watch_handovers()
gc.callbacks.append(_note_collection)
