"""How does a run end early without losing work? The first Ctrl-C asks it to stop after the current step."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signals(note: Callable[[str], None]) -> Iterator[threading.Event]:
    """While open, SIGINT and SIGTERM set the event; a second one acts as it did before.

    Python delivers signals to the main thread only; on any other thread, this installs nothing.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        restore()
        asked.set()
        note("stopping after this step, then saving; a second request stops at once")

    for number in previous:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        restore()
