"""Are two devices two, with a current one for each thread, and is a context that nobody wanted reported?"""

import mmap
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.emu("threads", "lazy")


@pytest.fixture(autouse=True)
def _contexts_are_meant(emu_device: ModuleType) -> Iterator[None]:
    assert torch.accelerator.current_device_index() == 1
    yield
    emu_device.reset()


def in_thread(job: Callable[[], None]) -> None:
    thread = threading.Thread(target=job, name="worker")
    thread.start()
    thread.join()


def load(lane: torch.Stream, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
    """What an engine's worker does: a copy on a lane, between two events."""
    lane.wait_event(torch.accelerator.current_stream(1).record_event())
    with torch.Stream(stream_id=lane.stream_id, device_index=lane.device_index, device_type=lane.device_type):
        target.copy_(source, non_blocking=True)
    return lane.record_event()


@pytest.mark.parametrize("chooses", [True, False])
def test_a_thread_that_never_chose_its_device_makes_a_context_on_the_first(
    emu_device: ModuleType, chooses: bool
) -> None:
    lane, target = torch.Stream("emu:1"), torch.empty(8, device="emu:1")
    source = torch.ones(8).pin_memory()

    def job() -> None:
        if chooses:
            torch.accelerator.set_device_index(1)
        load(lane, target, source).synchronize()

    in_thread(job)
    assert target.tolist() == [1] * 8
    assert set(emu_device.contexts()) == ({1} if chooses else {0, 1})


@pytest.mark.parametrize("call", ["registers", "destroys an event"])
def test_other_calls_that_make_one(emu_device: ModuleType, call: str) -> None:
    memory = mmap.mmap(-1, 1 << 12)
    pointer = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    events = [torch.accelerator.current_stream().record_event()]
    in_thread(events.clear if call == "destroys an event" else lambda: torch.emu.host_register(pointer, 1 << 12))
    if call == "registers":
        torch.emu.host_unregister(pointer)
    assert set(emu_device.contexts()) == {0, 1}


def test_a_shared_stream_object_takes_the_device_away(emu_device: ModuleType) -> None:
    """Its context stack lies on the Python object: two threads in one `with` get each other's device back."""
    lane, inside, left = torch.Stream("emu:1"), threading.Event(), threading.Event()

    def job() -> None:  # its current device is the first one
        with lane:
            inside.set()
            left.wait()

    thread = threading.Thread(target=job)
    lane.__enter__()
    thread.start()
    inside.wait()
    lane.__exit__(None, None, None)
    left.set()
    thread.join()
    assert (torch.accelerator.current_device_index(), set(emu_device.contexts())) == (0, {0, 1})


def test_autograd_and_operators_stay_where_the_tensors_are(emu_device: ModuleType) -> None:
    weight = torch.ones(4, 4, device="emu", requires_grad=True)
    (weight @ weight).sum().backward()
    assert weight.grad.device == torch.device("emu:1")
    torch.accelerator.synchronize()
    assert set(emu_device.contexts()) == {1}
    assert torch.accelerator.memory_allocated(0) == 0 < torch.accelerator.memory_allocated(1)


def test_operators_refuse_tensors_of_two_devices(emu_device: ModuleType) -> None:
    there = torch.ones(4, device="emu:0")
    with pytest.raises(RuntimeError, match="at least two devices, emu:0 and emu:1"):
        there + torch.ones(4, device="emu:1")
    assert (there.to("emu:1") + torch.ones(4, device="emu:1")).tolist() == [2] * 4
    assert (there + 1).device == torch.device("emu:0")


def test_memory_engines_and_random_numbers_are_of_each_device(emu_device: ModuleType) -> None:
    emu_device.configure(device_memory=8 << 20, allocator="exact")
    both = [torch.empty(6 << 20, dtype=torch.uint8, device=f"emu:{index}") for index in range(2)]
    torch.manual_seed(1)
    first = torch.rand(4, device="emu:0")
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4, device="emu:1").cpu(), first.cpu())
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    begin = emu_device.virtual_seconds()
    for tensor in both:
        tensor.add_(1)
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    together = emu_device.virtual_seconds() - begin
    for _ in range(2):
        both[0].add_(1)
    torch.accelerator.synchronize(0)
    assert together < emu_device.virtual_seconds() - begin - together
