"""How do trainers of Hugging Face's libraries run on the test's device? It is the accelerator to them."""

import contextlib
from collections.abc import Iterator

import accelerate.state
import pytest
import torch


@contextlib.contextmanager
def the_accelerator(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """To accelerate, and so to transformers, TRL and sentence-transformers; they do not know the emulated one."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
    _forget_device()
    yield
    _forget_device()


def _forget_device() -> None:
    """Accelerate keeps the first device of a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture
def trainer_device(compute_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The test's device, where trainers put what they move."""
    with the_accelerator(compute_device, monkeypatch):
        yield compute_device
