"""Do the operators of PyTorch's own database give on the emulator what they give on the CPU, or raise as there?

Three samples of each operator in four dtypes; with HEADRACE_EMULATOR_DATABASE=all every sample in every dtype, which
takes some minutes.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = [
    pytest.mark.emu("random:0"),
    pytest.mark.filterwarnings("ignore"),  # what PyTorch says of its own samples
]
EVERYTHING = os.environ.get("HEADRACE_EMULATOR_DATABASE") == "all"
PARTS = 12  # of the database, so that no test takes long
SAMPLES = None if EVERYTHING else 3  # of each operator and dtype
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
LARGEST = 5_000  # elements

# Of these, only dtypes and shapes are compared. Random numbers are the device's own ...
RANDOM = ("cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "bernoulli", "multinomial")
RANDOM += ("randn", "randn_like", "rand_like", "randint", "randint_like", "svd_lowrank", "pca_lowrank")
RANDOM += ("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d")
# ... here only where the sample says so.
RANDOM_IN_TRAINING = ("dropout", "rrelu", "multi_head_attention", "scaled_dot_product_attention")
# ... and these are memory that nobody wrote.
UNWRITTEN = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
# LAPACK rounds these by where they lie in memory, on the CPU alone as well.
ROUNDED = ("linalg.lstsq",)
# PyTorch adds these up in float32 on devices named cpu and cuda, and in bfloat16 or float16 on any other.
BY_NAME_OF_DEVICE = ("nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none")
HALVES = (torch.bfloat16, torch.float16)
FACTORIES = ("arange", "linspace", "logspace")  # where a sample names no device, results lie on the CPU
ARGUMENTS_ON_CPU = ("tensor_split",)  # as on CUDA: its sections have to lie there
NOT_COMPARED = {
    ("to_sparse", "function"): "the emulator has no sparse tensors",
    ("sparse.sampled_addmm", "function"): "the emulator has no sparse tensors",
    ("sparse.sampled_addmm", "out"): "the emulator has no sparse tensors",
    ("sparse.mm.reduce", "function"): "the emulator has no sparse tensors",
    ("fft.ihfft2", "out"): "the CPU does not write all of `out`",
    ("fft.ihfftn", "out"): "the CPU does not write all of `out`",
    ("addbmm", "in place"): "it may enlarge what it writes; raises on the emulator",
}


@cache
def database() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def dtypes_of(op: Any) -> list[torch.dtype]:
    supported = op.supported_dtypes("cpu")
    return sorted(supported, key=str) if EVERYTHING else [dtype for dtype in DTYPES if dtype in supported]


def samples_of(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Without `op.sample_inputs`, which walks the stack of Python at each sample."""
    seed(0)
    for sample in islice(op.sample_inputs_func(op, "cpu", dtype, False), SAMPLES):
        leaves = tree_leaves((sample.input, sample.args))
        if sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)) <= LARGEST:
            yield sample


def seed(number: int) -> None:
    """The CPU's generator alone: `torch.manual_seed` keeps the stack for a CUDA that is not there."""
    torch.default_generator.manual_seed(number)


def copies(value: Any, device: str) -> Any:
    """The sample with all that it has on a device on this one."""

    def copy(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.detach().clone().to(device)
        is_device = isinstance(part, torch.device) or (isinstance(part, str) and part == "cpu")
        return torch.device(device) if is_device else part

    return tree_map(copy, value)


def forms(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", lambda first, *rest, **named: op.op(first, *rest, **named)
    if op.inplace_variant is not None:
        yield "in place", lambda first, *rest, **named: (op.inplace_variant(first, *rest, **named), first)
    if op.supports_out:
        yield "out", lambda first, *rest, **named: into_one_element(op.op, first, *rest, **named)


def into_one_element(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """`out=` of too few elements, which PyTorch makes larger."""
    results = function(*arguments, **named)
    outputs = tree_map(lambda result: result.new_zeros(1), results)
    function(*arguments, **named, out=outputs)
    return outputs


def outcome(op: Any, function: Callable[..., Any], sample: Any, device: str) -> list[Any] | None:
    """What it gives; None: it raises, or gives what lies elsewhere."""
    of_rest = "cpu" if op.name in ARGUMENTS_ON_CPU else device
    first, rest, named = copies(sample.input, device), copies(sample.args, of_rest), copies(sample.kwargs, of_rest)
    try:
        leaves = tree_leaves(function(first, *rest, **named))
        if device == "emu":
            torch.accelerator.synchronize()
    except Exception:  # whatever it is: only whether both raise counts
        return None
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    if op.name not in FACTORIES and any(tensor.device.type != device for tensor in tensors):
        return None
    return [tensor.cpu().resolve_conj().resolve_neg() for tensor in tensors]


def has_determined_values(op: Any, sample: Any, dtype: torch.dtype) -> bool:
    if op.name in (*RANDOM, *UNWRITTEN, *ROUNDED):
        return False
    if op.full_name in BY_NAME_OF_DEVICE and dtype in HALVES:
        return False
    is_training = sample.kwargs.get("dropout_p", sample.kwargs.get("training", True))
    return not (is_training and any(name in op.name for name in RANDOM_IN_TRAINING))


def is_same(actual: list[Any] | None, expected: list[Any] | None, *, values: bool = True) -> bool:
    if actual is None or expected is None:
        return actual is expected
    if [(one.dtype, one.shape) for one in actual] != [(one.dtype, one.shape) for one in expected]:
        return False
    return not values or all(map(has_same_values, actual, expected))


def has_same_values(actual: Tensor, expected: Tensor) -> bool:
    return bool(((actual == expected) | (actual.ne(actual) & expected.ne(expected))).all())


@pytest.mark.extended
@pytest.mark.parametrize("part", range(PARTS))
def test_operators_of_the_database(emu_device: ModuleType, part: int) -> None:
    compared, different = 0, []
    for op in database()[part::PARTS]:
        for dtype in dtypes_of(op):
            for sample in samples_of(op, dtype):
                values = has_determined_values(op, sample, dtype)
                for form, function in forms(op):
                    if (op.full_name, form) in NOT_COMPARED:
                        continue
                    compared += 1
                    actual, expected = (outcome(op, function, sample, device) for device in ("emu", "cpu"))
                    if not is_same(actual, expected, values=values):
                        different.append(f"{op.full_name} ({form}, {dtype}) of {sample.summary()}")
    assert compared > 100
    assert not different, "\n".join(different)


def test_linear_cross_entropy_in_chunks(emu_device: ModuleType) -> None:
    """Where the program chooses the dtype of sums, and not PyTorch by the name of the device."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2, acc_dtype=torch.float32, acc_policy="balanced")
    operands = torch.randn(8, 3).bfloat16(), torch.randn(4, 3).bfloat16(), torch.randint(4, (8,))
    results = []
    for device in ("cpu", "emu"):
        rows, weight, target = (operand.to(device) for operand in operands)
        for operand in (rows, weight):
            operand.requires_grad_()
        loss = torch.nn.functional.linear_cross_entropy(rows, weight, target, options=options)
        results.append([result.cpu() for result in (loss, *torch.autograd.grad(loss, (rows, weight)))])
    assert all(map(torch.equal, *results))
