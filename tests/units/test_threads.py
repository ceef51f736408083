"""Does Ctrl-C, at any moment of a submission or of a wait, leave others waiting for ever? Who sleeps while waiting?"""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.runtime.threads import OneThread, on_headrace_thread, wait_asleep
from tests.support.interrupts import interrupted_at

LONG_SECONDS = 20


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
        assert thread.submit(on_headrace_thread).result()
    assert not on_headrace_thread()


@pytest.mark.emu("lazy", "random:0")
def test_own_threads_wait_for_a_stream_asleep(emu_device: ModuleType) -> None:
    """A user's thread waits as PyTorch does."""
    device, x = torch.device("emu:1"), torch.ones(64, 64, device="emu")
    executor = OneThread("test-asleep", device)

    def event() -> torch.Event:
        x.add_(1)
        return torch.accelerator.current_stream().record_event()

    executor.submit(wait_asleep, event()).result()
    assert emu_device.spins() == {}
    executor.submit(event().synchronize).result()
    assert set(emu_device.spins()) == {"test-asleep_0"}
    wait_asleep(event())
    assert set(emu_device.spins()) == {"test-asleep_0", "MainThread"}
    executor.shutdown()
