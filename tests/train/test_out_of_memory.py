"""What does a user read when memory runs out?"""

import errno
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.cli.main import main
from headrace.errors import BudgetError, DiskError, OutOfMemoryError
from headrace.train.config import TrainConfig
from headrace.train.out_of_memory import explained
from headrace.train.progress import Progress
from headrace.train.run import Run
from headrace.train.trainer import train

Settings = Callable[..., TrainConfig]


def disk_full() -> DiskError:
    error = DiskError("/nvme/weights: no room for 3 GiB")
    error.errno = errno.ENOSPC
    return error


HOST = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes. Error code 12"
CASES: dict[str, tuple[Exception, dict[str, Any], str]] = {
    "device": (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free."),
        {"batch_size": 4},
        r"out of device memory: CUDA out of memory\. Tried to allocate 2\.00 GiB\..* are free|free.*What helps:.*"
        r"--gradient-checkpointing; --offload-activations; --batch-size below 4",
    ),
    "device, all done": (
        torch.OutOfMemoryError("out of memory"),
        {"gradient_checkpointing": True, "offload_activations": (), "batch_size": 1},
        r"What helps: a lower --device-memory, which leaves more to activations; --sequence-length below 32; smaller",
    ),
    "host": (
        RuntimeError(HOST),
        {},
        r"out of host memory: .*4000000000 bytes.* iB are free.*--disk DIR.*--state-dtype 8bit",
    ),
    "host, Python": (
        MemoryError(),
        {"host_memory": "1GiB"},
        r"MemoryError\. .*--host-memory is 1GiB\..*a larger --host-memory",
    ),
    "host, no pages": (OSError(errno.ENOMEM, "Cannot allocate memory"), {}, r"out of host memory"),
    "budget of the device": (
        BudgetError("device_memory allows 1 KiB"),
        {},
        r"out of device memory: device_memory allows",
    ),
    "budget of the device, in smaller blocks": (
        BudgetError(
            "device_memory allows 1 MiB; raise it to at least 2 MiB, or pass smaller blocks such as blocks='1'"
        ),
        {"device_memory": "1MiB"},
        r"What helps: a larger --device-memory; smaller --blocks; --dtype bfloat16",
    ),
    "budget of the host": (
        BudgetError("host_memory allows 1 KiB", tier="host"),
        {},
        r"out of host memory: host_memory allows 1 KiB",
    ),
    "disk": (disk_full(), {"keep": 3}, r"out of disk: .*no room for 3 GiB\. .*iB are free in .*out\. .*--keep 1"),
    "disk, writing": (
        OSError(errno.ENOSPC, "No space left on device"),
        {},
        r"out of disk: .*an --output with more room",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tier_the_numbers_and_the_flags_are_named(settings: Settings, case: str):
    error, changes, says = CASES[case]
    with pytest.raises(OutOfMemoryError) as raised, explained(settings(device="cpu", **changes)):
        raise error
    assert re.search(says.replace(" iB", " [KMGT]iB"), str(raised.value)), str(raised.value)
    assert "\n" not in str(raised.value)


def test_other_errors_are_left_alone(settings: Settings):
    with pytest.raises(RuntimeError, match=r"^odd$"), explained(settings()):
        raise RuntimeError("odd")


def test_the_command_ends_with_1_and_without_a_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(self: Run, batches: Any) -> float:
        raise RuntimeError(HOST)

    monkeypatch.setattr(Run, "step", fails)
    assert main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("headrace train: out of host memory: DefaultCPUAllocator")
    assert not any("Traceback" in line for line in lines)


def test_a_device_that_is_full_is_told_of(settings: Settings, progress: Progress, emu_device: ModuleType):
    emu_device.configure(device_memory=16 << 20)
    with pytest.raises(OutOfMemoryError, match=r"out of device memory: .*What helps: .*--offload-activations"):
        train(settings(device="emu:1", batch_size=1024, device_memory="90%"), progress)


def test_a_budget_that_no_block_fits_is_told_before_training(settings: Settings, progress: Progress):
    says = "device_memory allows 1 KiB; .*What helps: a larger --device-memory; --dtype bfloat16"
    with pytest.raises(OutOfMemoryError, match=says):
        train(settings(device_memory="1KiB"), progress)
    assert progress.records == []
