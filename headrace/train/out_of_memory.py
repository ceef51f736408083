"""What is said when memory runs out? Which tier, the numbers, and the flags that would help."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headrace.config import format_bytes
from headrace.errors import BudgetError, OutOfMemoryError
from headrace.runtime.host import available_host_bytes
from headrace.runtime.system import free_bytes
from headrace.train.config import TrainConfig, flag

_DEVICE, _HOST, _DISK = "device memory", "host memory", "disk"


@contextmanager
def explained(config: TrainConfig) -> Iterator[None]:
    """A context in which a failed allocation raises OutOfMemoryError with what to change."""
    try:
        yield
    except Exception as error:
        tier = _tier(error)
        if tier is None:
            raise
        raise OutOfMemoryError(_report(tier, error, config)) from error


def _tier(error: Exception) -> str | None:
    """The tier that is full; None if the error says something else."""
    if isinstance(error, BudgetError):
        return {"device": _DEVICE, "host": _HOST}[error.tier]
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return _DEVICE
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in text:
        return _HOST
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text:
        return _DISK
    if getattr(error, "errno", None) == errno.ENOMEM:
        return _HOST
    return None


def _report(tier: str, error: Exception, config: TrainConfig) -> str:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    said = next((line for line in lines if "alloc" in line or "memory" in line), lines[0]).rstrip(".")
    return f"out of {tier}: {said}. {_numbers(tier, config)}. What helps: {'; '.join(_remedies(tier, error, config))}"


def _numbers(tier: str, config: TrainConfig) -> str:
    """What is free in the tier, and the budget that was given for it."""
    if tier == _DISK:
        places = [config.output] if config.disk is None else [config.disk, config.output]
        found = {place: next(p for p in (place, *place.absolute().parents) if p.exists()) for place in places}
        return ", ".join(f"{format_bytes(free_bytes(at))} are free in {place}" for place, at in found.items())
    name = "device_memory" if tier == _DEVICE else "host_memory"
    budget = getattr(config, name)
    given = "" if budget is None else f"; {flag(name)} is {budget}"
    free = format_bytes(available_host_bytes())
    if tier == _HOST:
        return f"{free} are free for this process{given}"
    device = config.compute_device()  # nothing is allocated on it, because memory may be full
    if device.type == "cpu":
        return f"The device is the CPU, with {free} free{given}"
    try:
        free, total = map(format_bytes, torch.accelerator.get_memory_info(device))
    except (RuntimeError, AttributeError, NotImplementedError):  # not every backend reports its memory
        return f"The device is {device}{given}"
    return f"{free} of {total} on {device} are free{given}"


def _remedies(tier: str, error: Exception, config: TrainConfig) -> list[str]:
    """The remedies that the run does not use already, the gentlest first."""
    staying = config.device_fraction is not None
    remedies: list[tuple[bool, str]] = []
    if tier == _DEVICE and isinstance(error, BudgetError):
        remedies = [
            (config.device_memory is not None, "a larger --device-memory"),
            (config.blocks == ("auto",) and "smaller blocks" in str(error), "smaller --blocks"),  # it names their size
            (config.dtype is None and config.disk is None, "--dtype bfloat16"),
        ]
    elif tier == _DEVICE:
        remedies = [
            (not staying, "a lower --device-memory, which leaves more to activations"),
            (
                config.micro_batches_together not in (None, 1),
                "a lower --micro-batches-together, which keeps activations of as many micro-batches",
            ),
            (not config.gradient_checkpointing, "--gradient-checkpointing"),
            (config.offload_activations is None, "--offload-activations"),
            (staying, "no --device-fraction, so that weights come to the device block by block"),
            (config.batch_size > 1, f"--batch-size below {config.batch_size}, with --accumulate for the same step"),
            (True, f"--sequence-length below {config.sequence_length}"),
            (config.blocks == ("auto",), "smaller --blocks, such as 64MiB"),
        ]
    elif tier == _HOST:
        remedies = [
            (config.host_memory is not None, "a larger --host-memory"),
            (config.disk is None, "--disk DIR, for weights that do not fit and all optimizer state"),
            (config.disk is not None and config.state_tier == "host", "--optimizer-tier disk"),
            (config.state_dtype != "8bit", "--state-dtype 8bit"),
            (config.dtype is None and config.disk is None, "--dtype bfloat16"),
            (config.lora_rank is None, "--lora-rank 16, to train adapters only"),
        ]
    else:
        remedies = [
            (config.disk is not None, f"a --disk with more room than {config.disk}"),
            (True, "an --output with more room"),
            (config.keep > 1, "--keep 1"),
            (config.state_dtype != "8bit" and config.state_tier == "disk", "--state-dtype 8bit"),
        ]
    return [text for helps, text in remedies if helps]
