"""Which accelerator do these tests use, and when are they skipped?

They need a real one: `pytest tests/gpu`, in a session of its own, because other tests register the emulated
accelerator, and PyTorch drives one accelerator in a process. To check the tests themselves without a real one, let them
run on the emulator:

    make test-gpu-emulated
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.runs import EMULATED

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS is not deterministic; read when CUDA starts

if EMULATED:
    # Lazy: nothing runs before something waits for it, so a missing wait shows in the data. Both runs are on the device
    # here, so products may depend on how their arguments are aligned: those of 256 bytes and more, as smaller ones lie
    # at multiples of 64 in a block (docs/design/arenas.md).
    STRICT = {"scheduler": "lazy", "allocator": "exact", "guard_pinned": True, "alignment_canary": 256}


def pytest_collection_modifyitems() -> None:
    """Registers the emulated device before the first backward, when PyTorch counts the devices, and after pytest has
    installed its own handler of faults."""
    if EMULATED:
        import emulator.emu  # noqa: F401


def why_not() -> str | None:
    """The reason to skip; None where the tests can run."""
    if not torch.accelerator.is_available():
        return (
            "needs a real accelerator, and PyTorch finds none here; HEADRACE_TEST_ACCELERATOR=emu runs the emulated one"
        )
    if torch.accelerator.current_accelerator().type == "emu" and not EMULATED:
        return "needs a real accelerator, and this session registered the emulated one: run `pytest tests/gpu` alone"
    return None


@pytest.fixture
def accelerator() -> Iterator[torch.device]:
    """The current accelerator, with deterministic kernels; skips where there is none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    if EMULATED:
        from emulator import emu

        emu.reset(**STRICT)
        torch.accelerator.set_device_index(1)
    device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield device
    torch.accelerator.synchronize()
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
    if EMULATED:
        assert emu.take_reports() == []
        assert set(emu.contexts()) == {1}
