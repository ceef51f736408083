"""How does Ctrl-C come at a moment of a test's choice?"""

import contextlib
import dis
import functools
import gc
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import headrace

PACKAGE = str(Path(headrace.__file__).parent) + os.sep


@functools.cache
def signals_come(code: CodeType, last: int, offset: int) -> bool:
    """Whether Ctrl-C may come between two instructions: after calls, where functions begin, in loops.

    What the interpreter raises then is raised by the first of the two. A trace function raises at the second, so those
    moments are left out at which another handler has the second (the way out of a `with` block).
    """
    name = dis.opname[code.co_code[last]]
    handlers = [
        {entry.target for entry in dis.Bytecode(code).exception_entries if entry.start <= place < entry.end}
        for place in (last, offset)
    ]
    return (name.startswith("CALL") or name in ("RESUME", "JUMP_BACKWARD")) and handlers[0] == handlers[1]


def interrupted_at(moment: int, action: Callable[[], Any], within: str = "") -> bool:
    """Whether Ctrl-C came: at the moment of that number, from 1, at which it may, counted over all that `action` calls
    in files whose path has `within` in it.

    An interrupt that comes in a finalizer comes again after it; this waits for that. No garbage is collected meanwhile:
    what is raised in a callback of the collector, as Hypothesis has one, is dropped.
    """
    left = [moment]
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if within not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            may_come = frame in last and signals_come(frame.f_code, last[frame], frame.f_lasti)
            last[frame] = frame.f_lasti
            left[0] -= may_come
            if may_come and left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        action()
        sys.settrace(before)
        if left[0] <= 0:
            time.sleep(30)
            raise AssertionError("an interrupt was lost")
    except (KeyboardInterrupt, RuntimeError):  # the latter by a condition that was just being left
        return True
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
        last.clear()  # frames refer to what traces them: nothing may keep what they hold
    return False


class Strike:
    """A profiler that counts functions as they are entered, in files whose path has one of `within` in it. It raises
    KeyboardInterrupt, as a signal handler may, at function `number`, from 1, or at the first one after it whose caller
    hears of the error. It strikes once, as Python removes a profiler that raises.
    """

    def __init__(self, number: int = sys.maxsize, within: tuple[str, ...] = (PACKAGE,)) -> None:
        self.number = number
        self.within = within
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and any(part in frame.f_code.co_filename for part in self.within):
            self.seen += 1
            if self.seen >= self.number and _is_heard(frame):
                raise KeyboardInterrupt

    def during(self, action: Callable[[], Any]) -> None:
        """Calls `action`, which the interrupt may end."""
        sys.setprofile(self)
        try:
            action()
        finally:
            sys.setprofile(None)


def _is_heard(frame: FrameType) -> bool:
    """Whether an error raised as this frame is entered reaches its caller. The interpreter drops errors raised in
    `__del__`, and in generators that it closes because the loop over them ended early. A generator that is closed
    cannot be told from one that is resumed, so no generator counts, except those of context managers.
    """
    caller = frame.f_back
    if frame.f_code.co_flags & inspect.CO_GENERATOR and (
        caller is None or caller.f_code.co_filename != contextlib.__file__
    ):
        return False
    at: FrameType | None = frame
    while at is not None and at.f_code.co_name != "__del__":
        at = at.f_back
    return at is None
