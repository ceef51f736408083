"""May several host threads use the device at once? A worker waits on events while others enqueue."""

import queue
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDS, WORKERS, COUNT = 60, 3, 1024


def test_workers_wait_while_others_enqueue(emu_device: ModuleType) -> None:
    """As an engine does: gradients leave on a stream, workers wait for them and send results back, autograd goes on."""
    work: queue.Queue[tuple[torch.Event, torch.Tensor, int] | None] = queue.Queue()
    failures: list[BaseException] = []
    sums: list[float] = []

    def worker() -> None:
        torch.accelerator.set_device_index(compute.device_index)
        try:
            while (item := work.get()) is not None:
                arrived, gradient, number = item
                if number % 3:
                    arrived.synchronize()
                else:
                    while not arrived.query():
                        pass
                assert gradient.eq(number).all()
                sums.append(gradient.to("emu").sum().item())
        except BaseException as failure:
            failures.append(failure)

    compute, offload = torch.accelerator.current_stream(), torch.Stream("emu")
    threads = [threading.Thread(target=worker) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    weight = torch.ones(16, 16, device="emu", requires_grad=True)
    for number in range(ROUNDS):
        gradient = torch.full((COUNT,), float(number), device="emu")
        offload.wait_event(compute.record_event())
        target = torch.empty(COUNT, pin_memory=True)
        with offload:
            target.copy_(gradient, non_blocking=True)
        arrived = offload.record_event()
        compute.wait_event(arrived)
        work.put((arrived, target, number))
        (weight @ weight).tanh().sum().backward()
    for _ in threads:
        work.put(None)
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(sums) == [float(number * COUNT) for number in range(ROUNDS)]


@pytest.mark.emu("lazy")
def test_kernels_run_on_a_thread_inside_a_python_mode(emu_device: ModuleType) -> None:
    """A host thread that waits while a compiler traces may run what was enqueued before: for real."""
    seen: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    table = torch.arange(12.0).view(4, 3).to("emu")
    picked = table.index_select(0, torch.tensor([2, 0]).to("emu"))
    with Mode():
        torch.accelerator.synchronize()
    assert seen == []
    assert torch.equal(picked.cpu(), torch.tensor([[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]))


@pytest.mark.emu("lazy")
def test_kernels_run_on_a_thread_inside_a_kernel_of_fake_tensors(emu_device: ModuleType) -> None:
    """As a finalizer does that asks for an event, when garbage is collected while a compiler infers shapes."""
    table = torch.arange(12.0).view(4, 3).to("emu")
    picked = table.index_select(0, torch.tensor([2, 0]).to("emu"))
    with FakeTensorMode() as mode, in_kernel_invocation_manager(mode):  # its kernels run as those of meta tensors
        torch.accelerator.synchronize()
    assert torch.equal(picked.cpu(), torch.tensor([[6.0, 7.0, 8.0], [0.0, 1.0, 2.0]]))


FORKS = """
import os, signal, threading
import torch, emulator.emu

def use():
    while True:
        torch.empty(4096, device="emu").add_(1).cpu()

for _ in range(2):
    threading.Thread(target=use, daemon=True).start()
for _ in range(100):
    tensors = [torch.empty(64, device="emu") for _ in range(20)] + [torch.empty(64, pin_memory=True)]
    child = os.fork()
    if not child:
        signal.alarm(30)  # ends it
        tensors.clear()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, code
print("left", flush=True)
os._exit(0)
"""


@pytest.mark.extended
def test_a_forked_process_lets_go_of_tensors_while_the_device_is_in_use() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "left"), done.stderr
