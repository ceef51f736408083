"""Does Ctrl-C, at any moment of a submission or of a wait, leave others waiting for ever?"""

import dis
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from headrace.runtime.threads import OneThread, on_own_thread

LONG_SECONDS = 20


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


def interrupted_at(moment: int, action: Callable[[], Any]) -> bool:
    """Whether Ctrl-C came: at the moment of that number at which it may, counted over all that `action` calls."""
    left = [moment]
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            may_come = frame in last and signals_come(frame.f_code, last[frame], frame.f_lasti)
            last[frame] = frame.f_lasti
            left[0] -= may_come
            if may_come and left[0] == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except (KeyboardInterrupt, RuntimeError):  # the latter by a condition that was just being left
        return True
    finally:
        sys.settrace(before)
    return False


def on_another_thread(action: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(LONG_SECONDS)
    assert results, "waits for ever"
    return results[0]


def test_submitting() -> None:
    executor = OneThread("test-submit")
    moment = 1
    while interrupted_at(moment, lambda: executor.submit(int)):
        assert on_another_thread(lambda: executor.submit(lambda: 7).result()) == 7
        moment += 1
    assert moment > 10
    executor.shutdown()


def test_waiting() -> None:
    executor = OneThread("test-wait")
    moment, came = 1, True
    while came:
        goes_on = threading.Event()
        job = executor.submit(goes_on.wait)
        timer = threading.Timer(0.05, goes_on.set)  # time enough to come to wait, on a busy machine too
        timer.start()
        came = interrupted_at(moment, job.result)
        assert on_another_thread(lambda job=job: job.result()) is True
        moment += 1
    assert moment > 5
    executor.shutdown()


def test_threads_of_ours_know_that_they_are() -> None:
    with OneThread("test") as thread:
        assert thread.submit(on_own_thread).result()
    assert not on_own_thread()
