"""How does a user see that something long is going on? By a bar of tqdm, once it has taken some seconds."""

import os
import sys
import threading
from typing import NoReturn

from tqdm import tqdm

_AFTER_SECONDS = 3.0
_LEAST_BYTES = 2**28  # fewer are done before a bar would appear


class _Bar(tqdm):  # type: ignore[type-arg]
    monitor_interval = 0  # no thread that watches bars
    _lock = threading.RLock()  # and no lock across processes


def progress(what: str, total: int, unit: str = "B") -> "tqdm[NoReturn]":
    """A bar for `what`, as a context manager. Its `update(count)` is called after each part of `total`, on one thread.

    The switch of transformers (`transformers.utils.logging.disable_progress_bar()`) turns it off, and so does
    TQDM_DISABLE. Of several ranks, the first has one.
    """
    transformers = sys.modules.get("transformers")
    on = transformers is None or transformers.utils.logging.is_progress_bar_enabled()
    shown = on and os.environ.get("RANK", "0") == "0" and (unit != "B" or total >= _LEAST_BYTES)
    shown = shown and not os.environ.get("TQDM_DISABLE")
    return _Bar(
        total=total,
        desc=what,
        unit=unit,
        unit_scale=unit == "B",
        unit_divisor=1024,
        delay=_AFTER_SECONDS,
        disable=not shown,
    )
