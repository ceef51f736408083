"""Is the device as strict as CUDA where a looser one would let bugs pass? Each bug here is one that it now names."""

import _thread
import mmap
import threading
import time
from types import ModuleType

import pytest
import torch

from emulator.emu._handovers import thread_names

MIB = 1 << 20
pytestmark = pytest.mark.emu("lazy", "random:0")


# ---- events, streams and captures ------------------------------------------------------------------------------------
def test_the_time_between_events_that_are_not_ready_is_refused(emu_device: ModuleType) -> None:
    begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    begin.record()
    torch.ones(8, device="emu").add_(1)
    end.record()
    with pytest.raises(RuntimeError, match="completed before calculating elapsed time"):
        begin.elapsed_time(end)
    end.synchronize()
    assert begin.elapsed_time(end) > 0


def test_the_33rd_stream_of_a_priority_is_the_first_one(emu_device: ModuleType) -> None:
    streams = [torch.Stream("emu") for _ in range(33)]
    assert len(set(streams[:32])) == 32
    assert streams[32] == streams[0]
    assert torch.Stream("emu", priority=-1) not in streams


@pytest.mark.parametrize("others", [30, 31])
def test_a_stream_for_each_layer_waits_behind_another_one_s(emu_device: ModuleType, others: int) -> None:
    """A lane that was made after 32 others runs behind the first one's work: it has no queue of its own."""
    first, work = torch.Stream("emu"), torch.ones(MIB, device="emu")
    first.wait_stream(torch.accelerator.current_stream())
    with first:
        emu_device.exchange_with_peers(work, 1.0)
    work.record_stream(first)
    for _ in range(others):
        torch.Stream("emu")
    own = torch.Stream("emu")
    assert (emu_device.event_seconds(own.record_event()) > 1) == (others == 31)


@pytest.mark.parametrize("question", ["event query", "event wait", "stream query", "stream wait", "device", "item"])
def test_a_capture_forbids_waits_and_questions(emu_device: ModuleType, question: str) -> None:
    side, x = torch.Stream("emu"), torch.ones(8, device="emu")
    side.wait_stream(torch.accelerator.current_stream())
    x.record_stream(side)
    before = side.record_event()
    calls = {
        "event query": before.query,
        "event wait": before.synchronize,
        "stream query": side.query,
        "stream wait": side.synchronize,
        "device": torch.accelerator.synchronize,
        "item": lambda: x.sum().item(),
    }
    with pytest.raises(RuntimeError, match="not permitted while a stream is capturing"), side, emu_device.capture():
        calls[question]()
    assert not torch.emu.is_current_stream_capturing()


def test_another_thread_that_asks_ends_a_capture(emu_device: ModuleType) -> None:
    event = torch.accelerator.current_stream().record_event()
    failures: list[Exception] = []

    def ask() -> None:
        try:
            event.query()
        except RuntimeError as error:
            failures.append(error)

    def captured() -> None:
        with emu_device.capture():
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

    with pytest.raises(RuntimeError, match="to ask whether an event is reached"):
        captured()
    assert failures


def test_a_capture_takes_down_and_must_lead_back(emu_device: ModuleType) -> None:
    x, side = torch.ones(8, device="emu"), torch.Stream("emu")
    main = torch.accelerator.current_stream()

    def capture_that_forks() -> None:
        with emu_device.capture():
            side.wait_event(main.record_event())
            with side:
                x.add_(1)

    torch.accelerator.synchronize()
    with emu_device.capture():
        assert torch.emu.is_current_stream_capturing()
        side.wait_event(main.record_event())
        with side:
            assert torch.emu.is_current_stream_capturing()
            x.add_(1)
        main.wait_event(side.record_event())
    assert x.tolist() == [1] * 8
    with pytest.raises(RuntimeError, match="does not wait for"):
        capture_that_forks()
    main.wait_stream(side)


def test_a_capture_waits_for_nothing_outside(emu_device: ModuleType) -> None:
    outside = torch.Stream("emu").record_event()
    with pytest.raises(RuntimeError, match="not captured"), emu_device.capture():
        torch.accelerator.current_stream().wait_event(outside)


# ---- what a kernel takes and how it is chosen ------------------------------------------------------------------------
def test_a_weight_at_another_place_gives_another_last_bit(emu_device: ModuleType) -> None:
    """As where a library chooses its kernel by alignment: 64 bytes are not enough."""
    emu_device.configure(alignment_canary=1)
    memory, x = torch.zeros(2048, device="emu"), torch.randn(16, 16).to("emu")
    weight = torch.randn(16, 16)

    def product(offset_bytes: int) -> torch.Tensor:
        place = memory[offset_bytes // 4 :][:256].view(16, 16)
        place.copy_(weight)
        return (x @ place).cpu()

    aligned = product(0)
    assert torch.equal(product(256), aligned)
    shifted = [product(offset) for offset in (64, 128, 192)]
    for result in shifted:
        assert (result != aligned).sum() == 1
        assert torch.allclose(result, aligned)
    assert not torch.equal(shifted[0], shifted[1])


def test_each_thread_has_a_workspace_on_each_stream(emu_device: ModuleType) -> None:
    """An engine that multiplies on many threads has less memory than it counts on."""
    emu_device.configure(workspace=MIB, allocator="exact")
    x = torch.randn(16, 16).to("emu")

    def multiply() -> None:
        torch.accelerator.set_device_index(1)
        for _ in range(3):
            x @ x

    def held() -> int:
        return emu_device.stats()["allocated_bytes"] - x.nbytes

    multiply()
    assert held() == MIB
    torch.accelerator.synchronize()
    with torch.Stream("emu"):
        multiply()
    torch.accelerator.synchronize()
    assert held() == 2 * MIB
    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    assert held() == 3 * MIB


# ---- what waiting takes ----------------------------------------------------------------------------------------------
@pytest.mark.emu("lazy", "random:0")
@pytest.mark.parametrize("wait", ["event", "stream", "asleep"])
def test_a_thread_that_waits_takes_a_core(emu_device: ModuleType, wait: str) -> None:
    """Unless it sleeps, and asks now and then."""
    x = torch.ones(512, 512, device="emu")
    y, stream = x @ x, torch.accelerator.current_stream()
    event = stream.record_event()
    needed = emu_device.event_seconds(event) - emu_device.virtual_seconds()

    def job() -> None:
        torch.accelerator.set_device_index(1)
        while wait == "asleep" and not event.query():
            time.sleep(1e-5)
        (stream if wait == "stream" else event).synchronize()
        spun.append(emu_device.spins())

    spun: list[dict[str, float]] = []
    thread = threading.Thread(target=job, name="worker")
    thread.start()
    thread.join()
    assert spun == [{} if wait == "asleep" else {"worker": pytest.approx(needed)}]
    assert y.sum().item() == 512**3
    assert "MainThread" not in emu_device.spins()


@pytest.mark.emu("lazy")
def test_a_thread_without_a_name_does_not_get_an_earlier_ones(emu_device: ModuleType) -> None:
    """The system gives it the number of a thread that has ended, once it has given all others."""
    begin, end = threading.Lock(), threading.Lock()
    begin.acquire()
    end.acquire()

    def spin() -> None:
        thread_names[threading.get_native_id()] = "earlier"
        end.release()
        begin.acquire()
        torch.accelerator.set_device_index(1)
        torch.ones(8, device="emu").add_(1)
        torch.accelerator.current_stream().synchronize()
        end.release()

    _thread.start_new_thread(spin, ())
    end.acquire()
    emu_device.reset(scheduler="lazy")
    begin.release()
    end.acquire()
    assert set(emu_device.spins()) == {"a thread that Python does not know"}


# ---- time ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("pinned", [True, False])
def test_pageable_memory_is_slower(emu_device: ModuleType, pinned: bool) -> None:
    source = torch.empty(8 * MIB, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(8 * MIB, dtype=torch.uint8, device="emu")
    for to, given in ((target, source), (source, target)):
        begin = emu_device.virtual_seconds()
        to.copy_(given)
        assert emu_device.virtual_seconds() - begin == pytest.approx(8 * MIB / (25e9 if pinned else 8e9), rel=0.05)


@pytest.mark.parametrize("times", [1, 4])
def test_memory_that_is_registered_again_costs_time(emu_device: ModuleType, times: int) -> None:
    memory = mmap.mmap(-1, 8 * MIB)
    pointer = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    begin = emu_device.virtual_seconds()
    for _ in range(times):
        torch.emu.host_register(pointer, 8 * MIB)
        torch.emu.host_unregister(pointer)
    assert emu_device.virtual_seconds() - begin == pytest.approx(times * 0.5 / 128)


@pytest.mark.emu("lazy")
def test_new_pinned_memory_and_segments_cost_time_where_that_is_asked_for(emu_device: ModuleType) -> None:
    emu_device.configure(pin_seconds_per_gib=1.0, segment_seconds=1e-3, allocator="caching", launch_seconds=0)
    begin = emu_device.virtual_seconds()
    pinned = torch.empty(3 * MIB + 8192, dtype=torch.uint8, pin_memory=True)  # no block of this size is there already
    assert emu_device.virtual_seconds() - begin == pytest.approx(3 / 1024, rel=0.01)
    begin = emu_device.virtual_seconds()
    for _ in range(3):
        torch.empty(30 * MIB, dtype=torch.uint8, device="emu")  # a segment of its own, used again
    assert emu_device.virtual_seconds() - begin == pytest.approx(1e-3)
    syncs = emu_device.stats()["host_syncs"]
    torch.accelerator.empty_cache()
    assert emu_device.virtual_seconds() - begin >= 2e-3
    assert emu_device.stats()["host_syncs"] > syncs
    del pinned


# ---- accesses of the host --------------------------------------------------------------------------------------------
@pytest.mark.emu("threads", "lazy", "random:0", throttle=True, h2d_bytes_per_second=1e6)
def test_a_write_of_the_host_beside_a_copy_is_named_in_every_schedule(emu_device: ModuleType) -> None:
    """Nothing announces it: not the detector but the pages notice, and the program goes on."""
    home, other = (torch.zeros(64 << 10, dtype=torch.uint8).pin_memory() for _ in range(2))
    there = torch.empty(64 << 10, dtype=torch.uint8).to("emu")
    torch.accelerator.synchronize()
    for source in (other, home):  # the second copy waits for the first one
        there.copy_(source, non_blocking=True)
    home.numpy()[40 << 10] = 7
    torch.accelerator.synchronize()
    (report,) = emu_device.take_reports()
    assert report.startswith("GUARD: the host touched PINNED memory that a copy in flight reads, by writing to it")
    home.numpy()[50 << 10] = 7
    assert emu_device.take_reports() == []
