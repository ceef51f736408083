"""How is the native kernel called? Through ctypes: it knows neither PyTorch nor Python, and runs without Python's lock.

It is built with the package (`setup.py`), never at run time. Where it could not be built, `headrace.optim.update` does
the same with PyTorch's own kernels, more slowly; `available()` tells which of the two is in use.
"""

import ctypes
import functools
import warnings
from collections.abc import Sequence
from enum import IntEnum

import torch

from headrace.optim import threads
from headrace.runtime.native import load_native

CHUNK_ELEMENTS = 1 << 16  # what one thread takes at a time

SLOWER = "the native optimizer kernel is missing, so updates on the host take 4 to 40 times as long"  # measured
INSTALL = (
    "install a C++ compiler (such as apt-get install g++; on macOS xcode-select --install), then headrace again:"
    " pip install --force-reinstall --no-deps --no-cache-dir, with what you gave pip install before"
)


class Rule(IntEnum):
    """Update rules of the kernel."""

    ADAM = 0
    SGD = 1
    LION = 2


class Number(IntEnum):
    """Kinds of numbers that the kernel reads and writes."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    EIGHT_BIT = 3  # only for state; see eight_bit.py


class Master(IntEnum):
    """How the exact float32 value of a weight is kept."""

    IS_WEIGHT = 0  # the weight is float32 itself
    SPLIT = 1  # a bfloat16 weight, and the 16 bits that it lacks
    FULL = 2  # a low-precision weight, and a float32 one beside it
    NONE = 3  # a bfloat16 weight alone, rounded stochastically


class Constants(ctypes.Structure):
    """Constants of one update rule at one step; see kernel.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rule", "maximize", "flags")),
        ("seed", ctypes.c_uint32),
        *((name, ctypes.c_float) for name in ("gradient_scale", "decay", "keep_first", "take_first", "keep_second")),
        *((name, ctypes.c_float) for name in ("take_second", "correction", "epsilon", "step_size")),
    )


class Task(ctypes.Structure):
    """One parameter, or a run of elements of one; see kernel.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "master", "gradient", "first", "second", "maximum")),
        *((name, ctypes.c_int64) for name in ("elements", "chunk")),
        *((name, ctypes.c_int32) for name in ("constants", "master_form", "weight_number", "gradient_number")),
        *((name, ctypes.c_int32) for name in ("state_number", "first_step")),
        *((name, ctypes.c_uint32) for name in ("checksum", "stream", "place", "not_finite")),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("tasks", ctypes.c_void_p),
        ("constants", ctypes.c_void_p),
        ("task_count", ctypes.c_int64),
        ("chunk_count", ctypes.c_int64),
        ("next_chunk", ctypes.c_int64),
        ("level", ctypes.c_int32),
    )


_LAYOUT = len(Master) * (1 << 24) + ctypes.sizeof(Task) * 65536 + ctypes.sizeof(Constants) * 256 + ctypes.sizeof(_Job)
_LEVELS = {"AVX2": 1, "AVX512": 2}


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernel; None if it was not built with this installation."""
    library = load_native(__file__, "headrace_optim_layout", _LAYOUT)
    if library is None:
        return None
    library.headrace_optim_work.argtypes = [ctypes.c_void_p]
    library.headrace_optim_work.restype = None
    library.headrace_optim_checksum.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.headrace_optim_checksum.restype = ctypes.c_uint32
    return library


def available() -> bool:
    """Whether the native kernel was built with this installation. Without it a slower path in PyTorch is used."""
    return native_library() is not None


@functools.cache
def warn_if_missing() -> None:
    """Warns, once in a process, if the kernel was not built."""
    if native_library() is None:
        warnings.warn(f"{SLOWER}; {INSTALL}", RuntimeWarning, stacklevel=4)


def level() -> int:
    """The vector instructions in use: 0 baseline, 1 AVX2, 2 AVX-512. As in PyTorch, because results depend on them."""
    library = native_library()
    if library is None:
        return 0
    wanted = _LEVELS.get(torch.backends.cpu.get_cpu_capability(), 0)
    return min(wanted, int(library.headrace_optim_best_level()))


def run(tasks: Sequence[Task], constants: Sequence[Constants]) -> list[tuple[int, bool]]:
    """Performs all `tasks` on all threads that this process may use.

    Returns, for each task, the checksum of its weights, and whether it met a gradient that is not finite.

    The caller keeps the memory alive that the tasks point to. Raises RuntimeError if the kernel was not built.
    """
    library = native_library()
    if library is None:
        raise RuntimeError("the native optimizer kernel was not built; headrace.optim.kernel.available() is False")
    chunks = 0
    for task in tasks:
        task.chunk = chunks
        task.checksum = task.not_finite = 0
        chunks += -(-task.elements // CHUNK_ELEMENTS)
    if not chunks:
        return [(0, False)] * len(tasks)
    # A task without elements would have the chunk number of the next task.
    filled = [index for index, task in enumerate(tasks) if task.elements]
    all_tasks = (Task * len(filled))(*(tasks[index] for index in filled))
    all_constants = (Constants * len(constants))(*constants)
    job = _Job(ctypes.addressof(all_tasks), ctypes.addressof(all_constants), len(filled), chunks, 0, level())
    threads.on_each(lambda: library.headrace_optim_work(ctypes.addressof(job)), at_most=chunks)
    found = [(0, False)] * len(tasks)
    for index, task in zip(filled, all_tasks, strict=True):
        found[index] = (task.checksum, task.not_finite != 0)
    return found


def checksum(weights: torch.Tensor) -> int | torch.Tensor:
    """The checksum of contiguous bfloat16 weights, as a step in split form computes it for the weights that it writes.

    On an accelerator, it is a tensor that stays there, so that nobody waits for it.
    """
    if weights.device.type != "cpu":
        return weights.view(torch.int16).sum(dtype=torch.int64)
    library = native_library()
    if library is not None:
        return int(library.headrace_optim_checksum(weights.data_ptr(), weights.numel()))
    bits = weights.reshape(-1).view(torch.int16)
    total = 0
    for start in range(0, bits.numel(), CHUNK_ELEMENTS):
        part = bits[start : start + CHUNK_ELEMENTS].to(torch.int64) & 0xFFFF
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device="cpu")
        total += int((part * (2 * places + 1) & 0xFFFFFFFF).sum())
    return total & 0xFFFFFFFF
