"""How long is a training step with the optimizer's part in it? Virtual time on the emulated accelerator, so no noise.

    PYTHONPATH=. python benchmarks/overlap_updates.py

The decoder of `overlap.py` (24 uniform blocks, budget of 3, loads take 0.9 of a forward) trains with AdamW on the host,
gradients clipped to a global norm, at several speeds of the update: `update / forward` says how long the update of all
blocks takes, over the forward of all of them. An update moves 28 bytes per parameter, its norm 4. Each row shows the
step over what `overlap="forward"` aims at, T_backward + max(T_forward, T_update), and the bar is 1.05 for that mode.
`backward` runs without clipping, which it cannot do; the floor of its row is max(T_forward + T_backward, T_update).

With `update="device"` the accelerator updates: 16 bytes per parameter go there and 12 come back, over the link that
brings the weights. How fast the host is matters no more; the second table shows where that pays.
"""

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from overlap import BLOCKS, Case, configure, resident_seconds, settled_seconds

import headrace
from emulator import emu
from headrace.optim import AdamW, norms
from headrace.optim.norms import GradientNorms
from headrace.optim.on_device import device_bytes
from headrace.optim.overlap import Updater
from headrace.optim.updates import Updates
from headrace.runtime.pending import Pending

RATIOS = (0.25, 0.5, 1.0, 1.5, 2.0)  # update of all blocks over forward of all blocks
DEVICE_RATIOS = (0.5, 2.0, 4.0)
UPDATE_BYTES, NORM_BYTES = 28, 4  # per parameter, in float32
BUDGET_BLOCKS = 3

T = TypeVar("T")


class Host:
    """The host's memory, in virtual time."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second

    def works(self, elements: int, nbytes: int, what: str) -> None:
        emu.host_works(elements * nbytes / self.bytes_per_second, what)


class _Late(Future[None]):
    """A job of the thread of updates, which runs when somebody asks for its end."""

    def __init__(self, thread: "_UpdateThread", begins: Callable[[], None]) -> None:
        super().__init__()
        self.thread, self.begins = thread, begins
        self.handed_over = emu.virtual_seconds()
        self.ended = 0.0

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.thread.run_to(self)
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> None:
        self.thread.run_to(self)
        return super().result(timeout)


class _UpdateThread:
    """The thread of updates, in virtual time: one job at a time, each when it was handed over or later.

    In real time, jobs run when the thread of the pass waits for one, or has reached the virtual moment at which it
    begins. So the copies of both threads are given to the link in the order of virtual time.
    """

    def __init__(self, run: Callable[..., "Future[None]"]) -> None:
        self._run = run
        self._waiting: deque[_Late] = deque()
        self._free_at = 0.0

    def submit(self, updater: Updater, job: Callable[[], None], device: torch.device | None = None) -> "Future[None]":
        """In the place of `Updater.run`."""
        late = _Late(self, lambda: self._run(updater, lambda: self._timed(late, job), device).result())
        self._waiting.append(late)
        return late

    def end_of(self, job: "Future[None]") -> float:
        """The virtual moment at which a job ends."""
        assert isinstance(job, _Late)
        self.run_to(job)
        return job.ended

    def is_over(self, job: "Future[None]") -> bool:
        """Whether a job has ended by now, in virtual time."""
        assert isinstance(job, _Late)
        self.catch_up()
        return job not in self._waiting and job.ended <= emu.virtual_seconds()

    def catch_up(self) -> None:
        """Runs the jobs that have begun by now, in virtual time."""
        now = emu.virtual_seconds()
        while self._waiting and max(self._waiting[0].handed_over, self._free_at) < now:
            self._run_one()

    def run_to(self, job: _Late) -> None:
        """Runs the jobs up to this one, unless they have run."""
        while job in self._waiting:
            self._run_one()

    def _run_one(self) -> None:
        late = self._waiting.popleft()
        try:
            late.begins()
        except BaseException as error:
            late.set_exception(error)
        else:
            late.set_result(None)

    def _timed(self, late: _Late, job: Callable[[], None]) -> None:
        with emu.own_clock(max(late.handed_over, self._free_at)):
            job()
            late.ended = self._free_at = emu.virtual_seconds()


@contextlib.contextmanager
def modelled(host: Host, update: str) -> Iterator[None]:
    """Updates take virtual time, and those on the host nothing else; who waits for one waits for its virtual moment."""
    kept = [
        (Updates, "_apply", Updates._apply),
        (Updater, "run", Updater.run),
        (Pending, "done", Pending.done),
        (Pending, "wait", Pending.wait),
        (norms, "foreach_norm", norms.foreach_norm),
        (GradientNorms, "total", GradientNorms.total),
        (GradientNorms, "delivered", GradientNorms.delivered),
    ]
    wait, total, delivered = Pending.wait, GradientNorms.total, GradientNorms.delivered
    thread = _UpdateThread(Updater.run)

    def perform(self: Updates, members: Sequence[Any], scale: float) -> None:
        host.works(sum(member.master.host.numel() for member in members), UPDATE_BYTES, "update")
        for member in members:
            member.updated = True

    def timed_norms(tensors: Sequence[torch.Tensor], *_: Any) -> list[torch.Tensor]:
        host.works(sum(tensor.numel() for tensor in tensors), NORM_BYTES, "norm")
        return [torch.ones(()) for _ in tensors]

    def timed_total(self: GradientNorms, *gradients: Any) -> torch.Tensor:
        for job in self._jobs:
            emu.host_waits_until(thread.end_of(job))
        return total(self, *gradients)

    def timed_delivered(self: GradientNorms, parameters: Mapping[Any, bool]) -> None:
        thread.catch_up()  # a job that has ended holds no gradient any more
        delivered(self, parameters)

    def timed_wait(self: Pending) -> None:
        emu.host_waits_until(thread.end_of(self._job))
        wait(self)

    if update == "host":
        Updates._apply = perform
    Updater.run = lambda self, job, device=None: thread.submit(self, job, device)
    Pending.done = lambda self: thread.is_over(self._job)
    Pending.wait = timed_wait
    norms.foreach_norm = timed_norms
    GradientNorms.total = timed_total
    GradientNorms.delivered = timed_delivered
    try:
        yield
    finally:
        for holder, name, value in kept:
            setattr(holder, name, value)


def step_seconds(case: Case, ratio: float, forward_seconds: float, overlap: str, update: str = "host") -> float:
    """Virtual seconds of a whole step in the steady state."""
    return measured(case, ratio, forward_seconds, overlap, lambda _, step: settled_seconds(step), update=update)


def measured(
    case: Case,
    ratio: float,
    forward_seconds: float,
    overlap: str,
    measure: Callable[[headrace.Offloaded, Callable[[], None]], T],
    beside: Callable[[Host], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    update: str = "host",
) -> T:
    """What `measure` finds of the handle of a model and its step, which it runs as often as it likes.

    `beside`: what else uses the host's memory meanwhile.
    """
    configure(case)
    model = case.build()
    elements = sum(parameter.numel() for parameter in model.parameters())
    host = Host(elements * UPDATE_BYTES / (ratio * forward_seconds))
    block_bytes = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    clip = None if overlap == "backward" else 1.0
    budget = BUDGET_BLOCKS * block_bytes
    if update == "device":
        budget += device_bytes(dict.fromkeys(model.parameters(), False))
    with (
        modelled(host, update),
        headrace.offload(model, device="emu", device_memory=budget, blocks=[model.layers]) as handle,
    ):
        optimizer = AdamW(model.parameters(), overlap=overlap, max_grad_norm=clip, update=update)

        def step() -> None:
            hidden = torch.empty(512, 1024, device="emu")
            model(hidden.requires_grad_()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with beside(host):
            found = measure(handle, step)
    reports = emu.take_reports()
    if reports:
        raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")
    gc.collect()
    return found


def main() -> None:
    training = Case(model="uniform", mode="training", ratio=0.9, budget_blocks=BUDGET_BLOCKS)
    both = resident_seconds("uniform", "training", 0.9)
    forward = resident_seconds("uniform", "inference", 0.9)
    backward = both - forward
    print(f"{BLOCKS} blocks, budget of {BUDGET_BLOCKS}; forward {forward:.3f} s, backward {backward:.3f} s\n")
    print("step over T_backward + max(T_forward, T_update), and of `backward` over its own floor")
    print("update / forward    none  forward  backward  over its floor")
    worst = 0.0
    for ratio in RATIOS:
        target = backward + max(forward, ratio * forward)
        floor = max(both, ratio * forward)
        modes = ("none", "backward", "forward")
        row = {overlap: step_seconds(training, ratio, forward, overlap) for overlap in modes}
        worst = max(worst, row["forward"] / target)
        print(
            f"{ratio:16.2f} {row['none'] / target:7.3f} {row['forward'] / target:8.3f} {row['backward'] / target:9.3f}"
            f" {row['backward'] / floor:15.3f}",
            flush=True,
        )
    print(f"\noverlap='forward': worst {worst:.3f} (bar 1.05)\n")
    print('step over T_forward + T_backward, updated on the host, and on the device (update="device")')
    print("update / forward    none  forward  backward    device none  device forward  device backward")
    modes = ("none", "forward", "backward")
    there = [step_seconds(training, 1.0, forward, overlap, "device") / both for overlap in modes]
    for ratio in DEVICE_RATIOS:
        here = [step_seconds(training, ratio, forward, overlap) / both for overlap in modes]
        print(
            f"{ratio:16.2f} {here[0]:7.3f} {here[1]:8.3f} {here[2]:9.3f} {there[0]:14.3f} {there[1]:15.3f}"
            f" {there[2]:16.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
