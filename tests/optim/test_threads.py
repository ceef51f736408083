"""Do helper threads survive Ctrl-C, and optimizers that step on several threads?"""

import _thread
import threading
import time
from functools import partial

import pytest
import torch

from headrace.optim import AdamW, threads
from tests.support.interrupts import interrupted_at


def test_an_interrupted_update_ends_before_its_memory_goes() -> None:
    begun, ended = threading.Event(), []

    def work() -> None:
        if threading.current_thread() is threading.main_thread():
            begun.wait()
            _thread.interrupt_main()
            return
        begun.set()
        time.sleep(0.2)
        ended.append(True)

    with threads.limited_to(3), pytest.raises(KeyboardInterrupt):
        threads.on_each(work, at_most=3)
    assert len(ended) == 2


def test_ctrl_c_at_any_moment_waits_for_what_was_handed_over() -> None:
    moment, came, late = 1, True, []
    with threads.limited_to(3):
        while came:
            over = threading.Event()

            def work(over: threading.Event = over) -> None:
                if threading.current_thread() is not threading.main_thread():
                    time.sleep(0.002)
                if over.is_set():
                    late.append(over)

            came = interrupted_at(moment, partial(threads.on_each, work, at_most=3), "headrace")
            over.set()
            threads.on_each(lambda: None, at_most=3)  # behind whatever is under way
            moment += 1
    assert moment > 20
    assert not late


def test_optimizers_on_several_threads_share_the_helpers() -> None:
    failed = []

    def steps(stride: int) -> None:
        try:
            for number in range(100):
                threads.on_each(lambda: None, at_most=2 + number * stride % 19)
        except RuntimeError as error:
            failed.append(error)

    with threads.limited_to(20):
        running = [threading.Thread(target=steps, args=(stride,)) for stride in (1, 2, 3, 5)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    assert not failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_norms_do_not_depend_on_the_thread_that_takes_them(dtype: torch.dtype) -> None:
    """PyTorch cuts a tensor with gaps into as many parts as the thread may use: helpers may use another number."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(1000, 2000, generator=generator).to(dtype)[:, ::2] for _ in range(12)]
    parameters = [torch.nn.Parameter(torch.zeros(1000, 1000, dtype=dtype)) for _ in gradients]
    optimizer = AdamW(parameters, lr=0.0, max_grad_norm=1.0)
    try:
        with threads.limited_to(3):
            for number in (1, 4, 1):
                torch.set_num_threads(number)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                assert optimizer.last_grad_norm == float(torch.nn.utils.get_total_norm(gradients))
    finally:
        torch.set_num_threads(before)


def test_an_update_in_pytorch_leaves_all_threads_their_number() -> None:
    """It sets one intra-op thread on each helper, which is also what a thread that begins meanwhile gets."""
    before = torch.get_num_threads()
    parameters = [torch.nn.Parameter(torch.zeros(1 << 20, dtype=torch.float64)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    numbers, meet = [], threading.Barrier(8)

    def told() -> None:
        meet.wait(60)
        numbers.append(torch.get_num_threads())

    try:
        torch.set_num_threads(3)
        with threads.limited_to(8):
            AdamW(parameters).step()
            threads.on_each(told, at_most=8)
        fresh = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
        fresh.start()
        fresh.join()
    finally:
        torch.set_num_threads(before)
    assert numbers == [3] * 9
