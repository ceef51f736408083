"""Do accelerators unpack to the same bits as the host? Triton's kernels run in its interpreter here, with no device."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.memory.packed import Packed, pack, unpack, unpack_on_device
from headrace.memory.packed.device import unpack_by_torch

from .conftest import weights

COUNTS = [1_000, 8_192, 100_001, 128 * 8_192 + 129]


def every_word() -> torch.Tensor:
    """All 65,536 patterns, most of which escape, among weights."""
    every = torch.arange(65_536, dtype=torch.int32).to(torch.int16)
    return torch.cat([weights(1_000_000).view(torch.int16), every, weights(77).view(torch.int16)])


@pytest.mark.parametrize("count", COUNTS)
def test_operators_unpack_as_the_host_does(count: int, compute_device: torch.device) -> None:
    words = every_word() if count == COUNTS[-1] else weights(count).view(torch.int16)
    memory = pack(words)
    assert memory is not None
    at_home = Packed.in_memory(memory)
    there = Packed(memory.to(compute_device), at_home.words, at_home.escapes)
    out = torch.empty(len(words), dtype=torch.int16, device=compute_device)
    unpack_on_device(there, out)
    host = torch.empty_like(words)
    unpack(at_home, host)
    assert torch.equal(host, words)
    assert torch.equal(out.cpu(), words)


def test_another_number_of_words_is_refused() -> None:
    memory = pack(weights(1_000))
    assert memory is not None
    with pytest.raises(ValueError, match="1000 words are packed, and 999 have room"):
        unpack_on_device(Packed.in_memory(memory), torch.empty(999, dtype=torch.int16))


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
@pytest.mark.parametrize("architecture", [80, 90])
def test_kernels_compile_for_nvidia(architecture: int) -> None:
    """Down to machine code, which needs no GPU: the interpreter takes much that the compiler refuses."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from headrace.memory.packed import triton_kernel

    numbers = {"words": "*i16", "count": "i32", "BLOCK": "constexpr"}
    for kernel, pointers in (
        (triton_kernel._unpack, {"groups": "*u8", "palette": "*u8"}),
        (triton_kernel._escape, {"escaped": "*i32"}),
    ):
        source = ASTSource(kernel, signature=pointers | numbers, constexprs={"BLOCK": 1024})
        assert triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["cubin"]


@needs_triton
def test_triton_unpacks_as_the_host_does() -> None:
    """In a process of its own: the interpreter is chosen when kernels are defined."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.packed.test_device"], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(count) for count in COUNTS]


if __name__ == "__main__":
    from headrace.memory.packed.triton_kernel import unpack_by_triton

    for wanted in COUNTS:
        plain = every_word() if wanted == COUNTS[-1] else weights(wanted).view(torch.int16)
        made = pack(plain)
        assert made is not None
        found, other = torch.empty_like(plain), torch.empty_like(plain)
        unpack_by_triton(Packed.in_memory(made), found)
        unpack_by_torch(Packed.in_memory(made), other)
        assert torch.equal(found, plain), wanted
        assert torch.equal(other, plain), wanted
        print(wanted)
