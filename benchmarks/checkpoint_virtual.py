"""How much longer is a step beside which a checkpoint is written? Virtual time on the emulated accelerator.

    PYTHONPATH=. python benchmarks/checkpoint_virtual.py

The step of `overlap_updates.py` with `overlap="forward"`, without a checkpoint, and with one that begins in every step,
into host memory that has room for a copy of all. The copy is modelled, and `headrace.save` is not called: as
`headrace.save(wait=False)` does, it reads weights and moments while nothing else uses the host's memory, and an update
waits until what it changes has been copied. A copy reads and writes 12 bytes per parameter. The bar is 1.05.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from overlap import Case, resident_seconds, settled_seconds
from overlap_updates import BUDGET_BLOCKS, RATIOS, Host, measured

import headrace
from emulator import emu
from headrace.optim.updates import Updates

COPY_BYTES = 24  # per parameter: weight and two moments in float32, read and written


class Saver:
    """Copies what is not copied yet: in the order of parameters while the memory is idle, and before an update."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._elements: dict[int, int] = {}  # of every parameter that was ever updated
        self._left: dict[int, int] = {}
        self.copied = self.copied_idle = 0  # elements
        self._idle_since = 0.0
        self._works = host.works
        host.works = self._after_idle_time  # type: ignore[method-assign]

    def begin(self) -> None:
        """A checkpoint begins now."""
        if self._left:
            raise RuntimeError("the checkpoint before is not complete")
        self._idle_since = max(self._idle_since, emu.virtual_seconds())
        self._left = dict(self._elements)

    def _after_idle_time(self, elements: int, nbytes: int, what: str) -> None:
        """Others use the memory. Nobody did since the last time, but this."""
        room = (emu.virtual_seconds() - self._idle_since) * self._host.bytes_per_second / COPY_BYTES
        for key in list(self._left):
            if self._left[key] > room:
                break
            room -= self._left[key]
            self.copied_idle += self._left.pop(key)
        self._works(elements, nbytes, what)
        self._idle_since = emu.virtual_seconds()

    def before_update(self, key: int, elements: int) -> None:
        """An update is about to change this parameter."""
        self._elements[key] = elements
        left = self._left.pop(key, 0)
        self.copied += left
        self._host.works(left, COPY_BYTES, "copy")


@contextlib.contextmanager
def saving(saver: Saver) -> Iterator[None]:
    """Beside the updates that `overlap_updates.modelled` has put in the place of headrace's."""
    perform = Updates._apply

    def copied_first(self: Updates, members: Sequence[Any], scale: float) -> None:
        for member in members:
            saver.before_update(id(member.parameter), member.master.host.numel())
        perform(self, members, scale)

    Updates._apply = copied_first  # type: ignore[method-assign]
    try:
        yield
    finally:
        Updates._apply = perform  # type: ignore[method-assign]


def step_seconds(case: Case, ratio: float, forward_seconds: float, *, save: bool) -> tuple[float, float]:
    """Virtual seconds of a step, and the share of the checkpoint that was copied while the memory was idle."""

    savers: list[Saver] = []

    @contextlib.contextmanager
    def beside(host: Host) -> Iterator[None]:
        savers.append(Saver(host))
        with saving(savers[0]):
            yield

    def measure(_handle: headrace.Offloaded, step: Callable[[], None]) -> float:
        def step_with_checkpoint() -> None:
            savers[0].begin()
            step()

        return settled_seconds(step_with_checkpoint if save else step)

    seconds = measured(case, ratio, forward_seconds, "forward", measure, beside)
    copied = savers[0].copied + savers[0].copied_idle
    return seconds, savers[0].copied_idle / copied if copied else 0.0


def main() -> None:
    training = Case(model="uniform", mode="training", ratio=0.9, budget_blocks=BUDGET_BLOCKS)
    forward = resident_seconds("uniform", "inference", 0.9)
    print("update / forward    beside a checkpoint, over without    copied while idle")
    worst = 0.0
    for ratio in RATIOS:
        alone, _ = step_seconds(training, ratio, forward, save=False)
        beside, idle = step_seconds(training, ratio, forward, save=True)
        worst = max(worst, beside / alone)
        print(f"{ratio:16.2f} {beside / alone:36.3f} {idle:20.2f}", flush=True)
    print(f"\nworst {worst:.3f} (bar 1.05)")


if __name__ == "__main__":
    main()
