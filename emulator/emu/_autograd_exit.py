"""How does a process end well right after a backward? It waits until autograd's device thread has put everything away.

That thread drops the last graph after `backward()` has returned, and needs Python's lock for it. If the interpreter is
being finalised by then, Python ends the thread in a way that C++ answers by aborting the process. No call of PyTorch
waits for the thread, so its state in /proc has to tell: it sleeps when it is through, and for as long as nothing comes.
"""

import time
from pathlib import Path

_SAMPLES_ASLEEP, _PERIOD_SECONDS, _LIMIT_SECONDS = 4, 0.005, 5.0


def wait_for_autograd() -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    before, asleep = "", 0
    while asleep < _SAMPLES_ASLEEP and time.monotonic() < deadline:
        states = [_state(task) for task in Path("/proc/self/task").iterdir() if _name(task).startswith("pt_autograd")]
        if not states:
            return
        now = "".join(states)
        asleep = asleep + 1 if now == before and all(state.startswith("S") for state in states) else 0
        before = now
        time.sleep(_PERIOD_SECONDS)  # gives Python's lock to the thread


def _name(task: Path) -> str:
    try:
        return (task / "comm").read_text()
    except OSError:  # the thread has ended meanwhile
        return ""


def _state(task: Path) -> str:
    """A letter (S: asleep), and how often the thread has run."""
    fields = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
    return fields["State"][0] + fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
