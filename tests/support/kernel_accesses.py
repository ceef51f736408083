"""Which bytes does the native optimizer kernel read and write? The race detector is told, in tests on the emulator.

The kernel is given addresses, and runs outside of PyTorch: nothing else sees what it does to page-locked memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from headrace.optim import kernel

_BYTES = {
    kernel.Number.FLOAT32: 4,
    kernel.Number.BFLOAT16: 2,
    kernel.Number.FLOAT16: 2,
    kernel.Number.EIGHT_BIT: 1,
}
_MASTER_BYTES = {kernel.Master.SPLIT: 2, kernel.Master.FULL: 4}


@pytest.fixture(autouse=True)
def _kernel_accesses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = getattr(getattr(request.node, "callspec", None), "params", {})
    if "emu_device" not in request.fixturenames and chosen.get("compute_device", "cpu") == "cpu":
        return
    from emulator import emu

    run = kernel.run

    def announced(tasks: Sequence[kernel.Task], constants: Sequence[kernel.Constants]) -> Any:
        for task in tasks:
            for address, nbytes, write in _ranges(task):
                if address:
                    emu.host_access_at(address, nbytes, write=write, what="the optimizer's kernel")
        return run(tasks, constants)

    monkeypatch.setattr(kernel, "run", announced)


def _ranges(task: kernel.Task) -> Iterator[tuple[int | None, int, bool]]:
    weight, state = _BYTES[kernel.Number(task.weight_number)], _BYTES[kernel.Number(task.state_number)]
    yield task.gradient, task.elements * _BYTES[kernel.Number(task.gradient_number)], False
    yield task.weight, task.elements * weight, True
    yield task.master, task.elements * _MASTER_BYTES.get(kernel.Master(task.master_form), 0), True
    for address in (task.first, task.second, task.maximum):
        yield address, task.elements * state, True
