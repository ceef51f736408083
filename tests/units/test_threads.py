"""Does Ctrl-C, at any moment of a submission or of a wait, leave others waiting for ever? Who sleeps while waiting?"""

import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.memory import fork_safe, locking
from headrace.memory.disk import DiskStore, mapping
from headrace.memory.ledger import Ledger
from headrace.optim import devices, disk_state
from headrace.runtime.autograd import EndOfBackward
from headrace.runtime.process_wide import ProcessWide
from headrace.runtime.threads import OneThread, keeps_interrupts, on_headrace_thread, wait_asleep
from headrace.weights.movement.packed_loads import PackedLoads
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


def strike(**_kwargs: Any) -> None:
    raise KeyboardInterrupt


def drops_a_user_of_a_patch(_patch: pytest.MonkeyPatch) -> None:
    ProcessWide(lambda: strike, anywhere=True).use(lambda: None)


def drops_the_end_of_a_backward(_patch: pytest.MonkeyPatch) -> None:
    EndOfBackward(strike)


def drops_locked_memory(patch: pytest.MonkeyPatch) -> None:
    memory, _ = fork_safe.map_fork_safe(4096)
    patch.setattr(fork_safe, "unmap", lambda _address, _nbytes: strike())
    del memory


def drops_memory_that_a_driver_locked(patch: pytest.MonkeyPatch) -> None:
    for name in ("is_accelerator", "can_register_host_memory"):
        patch.setattr(locking, name, lambda _device: True)
    patch.setattr(locking, "lock", lambda *_: strike)
    locking.host_memory(4096, torch.device("cpu"), Ledger(), "weights", computed=False)


def drops_a_mapping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mapping, "_unmap", lambda _address, _nbytes: strike())
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        mapping.Mapping(file.fileno(), 0, 4096, shared=True)


def drops_state_on_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DiskStore, "close", lambda _store: strike())
    disk_state.DiskState(tempfile.gettempdir())  # its file has no name


def drops_many(_patch: pytest.MonkeyPatch) -> None:
    """Their finalizers are called in a row."""

    class Dropped:
        pass

    several = [Dropped() for _ in range(20)]
    for one in several:
        weakref.finalize(one, time.sleep, 0.01)
    weakref.finalize(several[-1], keeps_interrupts(strike))  # the first to be called


def drops_twins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(devices, "_close", lambda _lanes, _leaving: strike())
    devices.HostMirror(torch.device("cpu"), pin=False, overlap=False)


def drops_packed_loads(_patch: pytest.MonkeyPatch) -> None:
    loads: Any = PackedLoads.__new__(PackedLoads)
    loads._halves, loads._process, loads.finish = [None], os.getpid(), strike


@pytest.mark.parametrize(
    "drop",
    [
        drops_a_user_of_a_patch,
        drops_the_end_of_a_backward,
        drops_locked_memory,
        drops_memory_that_a_driver_locked,
        drops_a_mapping,
        drops_state_on_disk,
        drops_many,
        drops_twins,
        drops_packed_loads,
    ],
)
def test_ctrl_c_in_a_finalizer_strikes_after_it(
    drop: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop_and_go_on() -> None:
        drop(monkeypatch)
        time.sleep(LONG_SECONDS)

    with pytest.raises(KeyboardInterrupt):  # which Python would drop in the finalizer
        drop_and_go_on()
