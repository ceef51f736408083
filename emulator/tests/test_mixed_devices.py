"""Which tensors of two devices may meet in one operator? Those that may on CUDA; all others are refused."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import integers, randn

pytestmark = pytest.mark.emu("threads", "random:0")
Place = Callable[[Tensor], Tensor]  # puts a tensor where the case wants it
Case = Callable[[Place, Place], Tensor]  # of two devices: results, or what was written

ROWS, COLUMNS, MASK = integers(6, 4), integers(5, 4), randn(6, 5) > 0


def put(target: Tensor, index: object, values: Tensor | float, *, accumulate: bool = False) -> Tensor:
    if accumulate:
        return target.index_put_(index, values, accumulate=True)
    target[index] = values
    return target


# With a tensor of the device first and one of the CPU second; the other way round under "host_".
ALLOWED: dict[str, Case] = {
    "get_index": lambda a, b: a(randn(6, 5))[b(ROWS), b(COLUMNS)],
    "get_both": lambda a, b: a(randn(6, 5))[a(ROWS), b(COLUMNS)],
    "get_list": lambda a, b: a(randn(6, 5))[[0, 2, 4]] + a(randn(6, 5))[:, [1]][:3],
    "get_mask": lambda a, b: a(randn(6, 5))[b(MASK)],
    "get_row": lambda a, b: a(randn(6, 5))[b(torch.tensor(2))],
    "put_index": lambda a, b: put(a(randn(6, 5)), (b(ROWS), b(COLUMNS)), a(randn(4))),
    "put_slice": lambda a, b: put(a(randn(2, 6, 5)), (slice(None), b(ROWS), b(COLUMNS)), a(randn(2, 4))),
    "put_accumulate": lambda a, b: put(a(randn(6, 5)), (b(ROWS), b(COLUMNS)), a(randn(4)), accumulate=True),
    "put_number": lambda a, b: put(a(randn(6, 5)), (b(ROWS),), b(torch.tensor(2.0))),
    "put_python_number": lambda a, b: put(a(randn(6, 5)), (b(ROWS),), 2.0),
    "put_mask": lambda a, b: put(a(randn(6, 5)), b(MASK), 2.0),
    "put_mask_number": lambda a, b: put(a(randn(6, 5)), a(MASK), b(torch.tensor([2.0]))),
    "put_mask_values": lambda a, b: put(a(randn(6, 5)), b(MASK), a(randn(int(MASK.sum())))),
    "host_put_index": lambda a, b: put(b(randn(6, 5)), (a(ROWS), a(COLUMNS)), b(randn(4))),
    "host_put_slice": lambda a, b: put(b(randn(2, 6, 5)), (slice(None), a(ROWS), a(COLUMNS)), b(randn(2, 4))),
    "host_put_accumulate": lambda a, b: put(b(randn(6, 5)), (a(ROWS), a(COLUMNS)), b(randn(4)), accumulate=True),
    "host_put_number": lambda a, b: put(b(randn(6, 5)), (a(ROWS),), a(torch.tensor(2.0))),
    "number": lambda a, b: a(randn(6, 5)) * b(torch.tensor(2.0)) - b(torch.tensor(1.0)),
    "where_number": lambda a, b: torch.where(a(MASK), a(randn(6, 5)), b(torch.tensor(2.0))),
    "masked_fill_number": lambda a, b: a(randn(6, 5)).masked_fill(a(MASK), b(torch.tensor(2.0))),
    "index_fill_number": lambda a, b: a(randn(6, 5)).index_fill(0, a(ROWS), b(torch.tensor(2.0))),
    "foreach_number": lambda a, b: torch.stack(torch._foreach_mul([a(randn(5)), a(randn(5))], b(torch.tensor(2.0)))),
    "copy": lambda a, b: a(randn(6, 5)).copy_(b(randn(5))),
    "host_copy": lambda a, b: b(randn(6, 5)).copy_(a(randn(5))),
}
REFUSED: dict[str, Case] = {
    "host_get_index": lambda a, b: b(randn(6, 5))[a(ROWS)],
    "put_values": lambda a, b: put(a(randn(6, 5)), (a(ROWS), a(COLUMNS)), b(randn(4))),
    "host_put_values": lambda a, b: put(b(randn(6, 5)), (b(ROWS), b(COLUMNS)), a(randn(4))),
    "add": lambda a, b: a(randn(5)) + b(randn(5)),
    "add_to_number": lambda a, b: b(torch.tensor(1.0)).add_(a(torch.tensor(1.0))),
    "host_out": lambda a, b: torch.add(a(randn(5)), a(randn(5)), out=b(randn(5))),
    "masked_fill": lambda a, b: a(randn(6, 5)).masked_fill(b(MASK), 0.0),
    "masked_select": lambda a, b: a(randn(6, 5)).masked_select(b(MASK)),
    "gather": lambda a, b: a(randn(6, 5)).gather(1, b(integers(5, 6, 2))),
    "scatter": lambda a, b: a(randn(6, 5)).scatter_(1, b(integers(5, 6, 2)), a(randn(6, 2))),
    "scatter_values": lambda a, b: a(randn(6, 5)).scatter_add_(1, a(integers(5, 6, 2)), b(randn(6, 2))),
    "index_select": lambda a, b: a(randn(6, 5)).index_select(0, b(ROWS)),
    "index_add": lambda a, b: a(randn(6, 5)).index_add_(0, b(ROWS), a(randn(4, 5))),
    "linear": lambda a, b: F.linear(a(randn(2, 5)), b(randn(3, 5))),
    "embedding": lambda a, b: F.embedding(b(ROWS), a(randn(6, 5))),
    "cross_entropy": lambda a, b: F.cross_entropy(a(randn(4, 6)), b(ROWS)),
    "cat": lambda a, b: torch.cat([a(randn(5)), b(randn(5))]),
    "foreach": lambda a, b: torch.stack(torch._foreach_add([a(randn(5))], [b(randn(5))])),
}


def on_device(tensor: Tensor) -> Tensor:
    return tensor.to("emu")


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(emu_device: ModuleType, case: str) -> None:
    expected = ALLOWED[case](Tensor.clone, Tensor.clone)
    actual = ALLOWED[case](on_device, Tensor.clone)
    assert actual.device.type == ("cpu" if case.startswith("host_") else "emu")
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(emu_device: ModuleType, case: str) -> None:
    REFUSED[case](Tensor.clone, Tensor.clone)
    with pytest.raises(RuntimeError, match=r"device|on cpu"):
        REFUSED[case](on_device, Tensor.clone)


NUMBERS_OF_THE_DEVICE = """
import torch
from emulator import emu

@torch.library.custom_op("emulator_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
emu.configure(scheduler="threads")
weight = torch.full((), 0.25, device="emu")
for _ in range(100):
    values, targets = [torch.ones(4, device="emu")], [torch.zeros(4, device="emu")]
    torch._foreach_lerp_(values, targets, 1 - twice(weight))
    torch._foreach_lerp_(values, targets, 1 / (weight + 1.75))
print(values[0].tolist())
"""


@pytest.mark.extended
def test_a_number_of_the_device_as_argument(emu_device: ModuleType) -> None:
    """PyTorch waits for it with Python's lock, and a kernel in Python wants that."""
    done = subprocess.run(
        [sys.executable, "-c", NUMBERS_OF_THE_DEVICE],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[0.25, 0.25, 0.25, 0.25]", done.stderr
