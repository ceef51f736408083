"""Does what one host thread has waited for hold for another only when the two have synchronised?"""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch

Wait = Callable[[], None]


def by_future(wait: Wait) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(wait).result()


def by_bare_future(wait: Wait) -> None:
    done: Future[None] = Future()
    threading.Thread(target=lambda: done.set_result(wait())).start()
    done.result()


def by_queue(make: Callable[[], Any]) -> Callable[[Wait], None]:
    def pass_on(wait: Wait) -> None:
        results = make()
        threading.Thread(target=lambda: results.put(wait())).start()
        results.get()

    return pass_on


def by_event(wait: Wait) -> None:
    done = threading.Event()

    def job() -> None:
        wait()
        done.set()

    threading.Thread(target=job).start()
    done.wait()


def by_lock(make: Callable[[], Any]) -> Callable[[Wait], None]:
    def pass_on(wait: Wait) -> None:
        lock, holds = make(), []

        def job() -> None:
            with lock:
                holds.append(True)
                wait()

        threading.Thread(target=job).start()
        while not holds:
            time.sleep(1e-4)
        with lock:
            pass

    return pass_on


def by_join(wait: Wait) -> None:
    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()


def by_a_variable(wait: Wait) -> None:
    done: list[None] = []
    thread = threading.Thread(target=lambda: done.append(wait()))
    thread.start()
    while not done:
        time.sleep(1e-4)


HANDOVERS = {
    "future": by_future,
    "bare future": by_bare_future,
    "queue": by_queue(queue.Queue),
    "simple queue": by_queue(queue.SimpleQueue),
    "event": by_event,
    "lock": by_lock(threading.Lock),
    "reentrant lock": by_lock(threading.RLock),
    "join": by_join,
    "a variable": by_a_variable,
}


@pytest.fixture
def copied(emu_device: ModuleType) -> Iterator[tuple[torch.Tensor, torch.Event]]:
    """Pinned memory that a copy fills, and the end of the copy."""
    lane, source, target = torch.Stream("emu"), torch.ones(64, device="emu"), torch.empty(64).pin_memory()
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        target.copy_(source, non_blocking=True)
    yield target, lane.record_event()
    torch.accelerator.current_stream().wait_stream(lane)


@pytest.mark.emu("threads", "lazy")
@pytest.mark.parametrize("how", HANDOVERS)
def test_the_host_reads_after_a_wait_of_another_thread(
    emu_device: ModuleType, copied: tuple[torch.Tensor, torch.Event], how: str
) -> None:
    target, done = copied
    HANDOVERS[how](done.synchronize)
    emu_device.host_access(target, write=False, what="the main thread reads")
    reports = emu_device.take_reports()
    if how != "a variable":
        assert reports == []
    else:
        assert reports[0].startswith(
            "RACE read-after-write: the main thread reads on the host is not ordered after copy"
        )


@pytest.mark.emu("threads", "lazy")
@pytest.mark.parametrize("how", ["join", "a variable"])
def test_the_device_reads_after_a_wait_of_another_thread(emu_device: ModuleType, how: str) -> None:
    lane, target, source = torch.Stream("emu"), torch.empty(64, device="emu"), torch.ones(64).pin_memory()
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        target.copy_(source, non_blocking=True)
    HANDOVERS[how](lane.record_event().synchronize)
    target + 1
    reports = emu_device.take_reports()
    assert bool(reports) == (how == "a variable")
    assert all("aten::add on stream 0 is not ordered after copy H2D on stream 1" in report for report in reports)


@pytest.mark.emu("threads", "lazy")
@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_of_what_another_thread_writes(emu_device: ModuleType, waits: bool) -> None:
    """As when a block is loaded while an optimizer's thread updates its home."""
    home, target = torch.zeros(64).pin_memory(), torch.empty(64, device="emu")
    written = []

    def update() -> None:
        emu_device.host_access(home, write=True, what="an update")
        written.append(True)

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(update)
        while not written:
            time.sleep(1e-4)
        if waits:
            job.result()
        target.copy_(home, non_blocking=True)
        reports = emu_device.take_reports()
    assert bool(reports) == (not waits)
    assert all("copy H2D on stream 0 is not ordered after an update on the host (thread" in one for one in reports)


@pytest.mark.emu("threads", "lazy")
def test_what_was_known_before_a_reset_orders_nothing_after_it(emu_device: ModuleType) -> None:
    """An event of an earlier test, which PyTorch's allocator of pinned memory asks for whenever it gets to it."""
    home, target = torch.zeros(64).pin_memory(), torch.empty(64, device="emu")

    def update(times: int = 1) -> None:
        for _ in range(times):
            emu_device.host_access(home, write=True, what="an update")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(update, 50).result()
        earlier = torch.accelerator.current_stream().record_event()
        emu_device.reset(scheduler="lazy")
        by_a_variable(update)
        earlier.synchronize()
        target.copy_(home, non_blocking=True)
    reports = emu_device.take_reports()
    assert len(reports) == 1
    assert "copy H2D on stream 0 is not ordered after an update on the host (thread" in reports[0]


@pytest.mark.emu("threads", "lazy")
def test_a_backward_hands_over_both_ways(emu_device: ModuleType, copied: tuple[torch.Tensor, torch.Event]) -> None:
    target, done = copied
    done.synchronize()
    seen = []

    class Read(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(threading.get_ident())
            emu_device.host_access(target, write=False, what="backward reads")
            target.copy_(gradient, non_blocking=True)
            torch.accelerator.current_stream().record_event().synchronize()
            return gradient * 2

    Read.apply(torch.ones(64, device="emu", requires_grad=True)).sum().backward()
    assert seen != [threading.get_ident()]
    emu_device.host_access(target, write=False, what="the main thread reads")
    assert emu_device.take_reports() == []


@pytest.mark.emu("threads")
def test_memory_that_a_thread_gives_back_was_dropped_by_all(
    emu_device: ModuleType, copied: tuple[torch.Tensor, torch.Event]
) -> None:
    """The last reference dies on a thread that knows nothing of the wait; whoever had it before dropped it."""
    held = [torch.ones(64, device="emu")]
    lane, target = torch.Stream("emu"), torch.empty(64).pin_memory()
    lane.wait_stream(torch.accelerator.current_stream())

    def job() -> None:
        torch.accelerator.set_device_index(1)
        while len(held) < 2:
            time.sleep(1e-4)
        held.clear()

    thread = threading.Thread(target=job)
    thread.start()
    with lane:
        target.copy_(held[0], non_blocking=True)
    lane.record_event().synchronize()
    held.append(torch.empty(0))
    while held:
        time.sleep(1e-4)
    thread.join()
    assert emu_device.take_reports() == []
