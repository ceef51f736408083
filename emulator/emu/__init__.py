"""The device `emu`: importing this module registers it with PyTorch, building it first when needed.

From then on `torch.device("emu")`, `torch.accelerator`, `torch.Stream`, `torch.Event`, `pin_memory()` and
`non_blocking=True` work as on a GPU. The functions below are for tests: settings, counters, and what went wrong.
"""

import atexit
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from ._autograd_exit import wait_for_autograd
from ._device_module import register
from ._host_watch import host_access, watch_host
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
    "configure",
    "configured",
    "event_seconds",
    "exchange_with_peers",
    "host_access",
    "host_waits_until",
    "host_works",
    "name_stream",
    "own_clock",
    "reset",
    "reset_stats",
    "set_tag",
    "settings",
    "start_trace",
    "stats",
    "take_reports",
    "take_threads_without_device",
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


def take_threads_without_device() -> set[str]:
    """Names of the running threads that have used streams or events since the last call, and never chose a device.

    On CUDA each of these makes a context on the first device, whichever one the model is on.
    """
    touched = set(native.take_threads_without_device())
    return {thread.name for thread in threading.enumerate() if thread.native_id in touched}


def set_tag(tag: str) -> None:
    """Text that race reports carry for what is enqueued from now on, such as "step 3, layers.7"."""
    native.set_tag(tag)


def reset(**settings: Any) -> None:
    """A clean state between tests: default settings with the given changes; history, reports, time, counters cleared.

    Waits for the device. Streams made before must not be used afterwards: their numbers are given out again.
    """
    native.configure(**(_DEFAULTS | settings))
    native.begin_epoch()
    forget_stream_names()
    native.set_tag("")
    native.take_reports()
    native.reset_stats()


@atexit.register
def _shut_down() -> None:
    with contextlib.suppress(RuntimeError):  # an error that no test waited for
        torch.accelerator.synchronize()
    wait_for_autograd()
    native.shut_down()


register()
give_workers_clocks()
