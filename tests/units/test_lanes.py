"""Do lanes keep the order they promise, and does what fails on one reach who waits for it? Streams, and threads."""

import threading
from types import ModuleType

import pytest
import torch

from headrace.runtime.lanes import Lane, Lanes, open_lanes


def host(*values: float) -> torch.Tensor:
    """Memory from which an accelerator copies without making the host wait."""
    tensor = torch.tensor(values, dtype=torch.float32)
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor


def test_a_copy_arrives_and_tells_what_it_moved(lanes: Lanes) -> None:
    first, second = host(1, 2, 3), host(4)
    there = [torch.zeros(3, device=lanes.device), torch.zeros(1, device=lanes.device)]
    transfer = lanes.copy(Lane.ONLOAD, list(zip(there, (first, second), strict=True)), lanes.mark())
    lanes.wait(transfer.done)
    assert transfer.nbytes == 16
    assert transfer.lane is Lane.ONLOAD
    assert [tensor.tolist() for tensor in there] == [[1, 2, 3], [4]]
    transfer.done.synchronize()
    assert transfer.done.query()
    assert lanes.seconds(transfer.begun, transfer.done) >= 0


@pytest.mark.parametrize("step", [1, 2])
def test_bytes_arrive_as_they_are_whatever_their_strides(lanes: Lanes, step: int) -> None:
    source = torch.arange(256, dtype=torch.uint8)[::step]
    there = torch.zeros(2 * len(source), dtype=torch.uint8, device=lanes.device)
    arrived = lanes.copy(Lane.ONLOAD, [(there[::2], source), (there[1:2], source[7:8])], lanes.mark())
    lanes.wait(arrived.done)
    assert torch.equal(there[::2].cpu(), source)
    assert there[1::2].tolist() == [7 * step] + [0] * (len(source) - 1)


def test_a_lane_copies_in_the_order_of_submission(lanes: Lanes) -> None:
    there = torch.zeros(1, device=lanes.device)
    sources = [host(value) for value in range(20)]
    done = [lanes.copy(Lane.ONLOAD, [(there, source)], lanes.mark()).done for source in sources]
    lanes.wait(done[-1])
    assert there.item() == 19
    assert all(event.query() for event in done)  # the last one is behind all others


def test_lanes_are_ordered_by_events(lanes: Lanes) -> None:
    """To the device, computed there, and back: each step waits for the one before, on another lane."""
    there, back = torch.zeros(4, device=lanes.device), host(0, 0, 0, 0)
    for step in range(5):
        source = host(step, step, step, step)
        lanes.wait(lanes.copy(Lane.ONLOAD, [(there, source)], lanes.mark()).done)
        result = there * 2 + 1
        returned = lanes.copy(Lane.OFFLOAD, [(back, result)], lanes.mark())
        lanes.wait(returned.done)  # before the next step writes what this one read
        returned.done.synchronize()
        assert back.tolist() == [2.0 * step + 1] * 4


def test_a_copy_waits_for_the_event_it_is_given(lanes: Lanes) -> None:
    """Also for one of another lane: what arrives is copied on, not what was there before."""
    there, back = torch.zeros(1, device=lanes.device), host(0)
    for value in range(1, 30):
        arrived = lanes.copy(Lane.ONLOAD, [(there, host(value))], lanes.mark())
        returned = lanes.copy(Lane.OFFLOAD, [(back, there)], arrived.done)
        returned.done.synchronize()
        assert back.item() == value
        lanes.wait(returned.done)


def test_a_thread_waits_for_a_job_of_the_host_lane() -> None:
    """A gate that the test opens: before that, the copy must not have begun."""
    lanes = open_lanes(torch.device("cpu"))
    gate, destination = threading.Event(), torch.zeros(1)

    class Gate:
        def synchronize(self) -> None:
            assert gate.wait(timeout=60)

        def query(self) -> bool:
            return gate.is_set()

    transfer = lanes.copy(Lane.ONLOAD, [(destination, torch.ones(1))], Gate())
    other = lanes.copy(Lane.OFFLOAD, [(torch.zeros(1), torch.ones(1))], lanes.mark())
    other.done.synchronize()  # the other direction is not held up
    assert not transfer.done.query()
    assert destination.item() == 0
    gate.set()
    transfer.done.synchronize()
    assert destination.item() == 1
    lanes.close()


def test_the_host_lane_runs_jobs_in_order_after_their_events(lanes: Lanes) -> None:
    there, back, seen = torch.zeros(1, device=lanes.device), host(0), []
    for value in range(5):
        arrived = lanes.copy(Lane.ONLOAD, [(there, host(value))], lanes.mark())
        returned = lanes.copy(Lane.OFFLOAD, [(back, there)], arrived.done)
        job = lanes.run(lambda: seen.append(back.item()), returned.done)
        job.result()
        lanes.wait(returned.done)
    assert seen == [0, 1, 2, 3, 4]


def test_what_fails_in_a_copy_reaches_the_caller(lanes: Lanes) -> None:
    """A stream refuses it at once, a thread when its end is waited for; the lane goes on."""
    current = torch.accelerator.current_stream() if lanes.device.type != "cpu" else None
    wrong = [(torch.zeros(3, device=lanes.device), host(1, 2))]
    with pytest.raises(RuntimeError, match="size"):
        lanes.wait(lanes.copy(Lane.ONLOAD, wrong, lanes.mark()).done)
    assert current is None or torch.accelerator.current_stream() == current
    there = torch.zeros(1, device=lanes.device)
    lanes.wait(lanes.copy(Lane.ONLOAD, [(there, host(5))], lanes.mark()).done)
    assert there.item() == 5


def test_what_fails_before_a_copy_reaches_its_waiter_and_its_clock() -> None:
    lanes = open_lanes(torch.device("cpu"))
    large = 2**17  # so that a thread copies it
    first = lanes.copy(Lane.ONLOAD, [(torch.zeros(large + 1), torch.zeros(large))], lanes.mark())
    second = lanes.copy(Lane.OFFLOAD, [(torch.zeros(1), torch.ones(1))], first.done)
    with pytest.raises(RuntimeError, match="size"):
        lanes.wait(second.done)
    with pytest.raises(RuntimeError, match="size"):
        lanes.seconds(second.begun, second.done)
    lanes.close()


def test_what_fails_in_a_job_reaches_its_waiter(lanes: Lanes) -> None:
    def fail() -> None:
        raise ArithmeticError("of the job")

    job = lanes.run(fail, lanes.mark())
    with pytest.raises(ArithmeticError, match="of the job"):
        job.result()
    assert lanes.run(lambda: None, lanes.mark()).result() is None


def test_close_ends_what_was_submitted_and_takes_nothing_more(compute_device: torch.device) -> None:
    lanes = open_lanes(compute_device)
    there, seen = torch.zeros(1, device=compute_device), []
    transfer = lanes.copy(Lane.ONLOAD, [(there, host(7))], lanes.mark())
    for value in range(50):
        lanes.run(lambda value=value: seen.append(value), transfer.done)
    before = threading.active_count()
    lanes.close()
    assert seen == list(range(50))
    assert threading.active_count() < before
    lanes.wait(transfer.done)
    assert there.item() == 7
    with pytest.raises(RuntimeError, match="shutdown"):
        lanes.run(lambda: None, transfer.done)
    lanes.close()  # twice does no harm


def test_ticks_measure_the_compute_lane(lanes: Lanes) -> None:
    ticks = []
    work = torch.ones(64, 64, device=lanes.device)
    for _ in range(4):
        ticks.append(lanes.tick())
        work = work @ work
        work /= work.max()
    seconds = [lanes.seconds(ticks[0], tick) for tick in ticks]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0 < seconds[-1]


def test_two_threads_that_compute_on_one_stream_go_back_to_their_own(emu_device: ModuleType) -> None:
    lanes = open_lanes(torch.device("emu", 1))
    shared, mine = torch.Stream(device="emu:1"), torch.Stream(device="emu:1")
    inside, left = threading.Event(), threading.Event()
    streams: list[torch.Stream] = []

    def other_thread() -> None:
        torch.accelerator.set_device_index(1)
        with lanes.computing_on(shared):
            inside.set()
            left.wait(10)
        streams.append(torch.accelerator.current_stream())

    before = torch.accelerator.current_stream()
    with mine:
        with lanes.computing_on(shared):
            thread = threading.Thread(target=other_thread)
            thread.start()
            assert inside.wait(10)
        streams.append(torch.accelerator.current_stream())
        left.set()
        thread.join()
    lanes.close()
    assert streams == [mine, before]
    assert torch.accelerator.current_stream() == before
