"""Which calls differ between kinds of devices? All of them are in this file: calls for CUDA, ROCm, XPU and others."""

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

_CUDA_HOST_REGISTER_PORTABLE = 1
_locked: set[int] = set()  # addresses that register_host_memory() locks, from before that until they are unlocked


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """The compute device, always with its index, so that "cuda" and "cuda:0" compare equal.

    None means the current accelerator; or the CPU, if there is none or if its memory is the host's (MPS). Raises
    ValueError for a device that does not exist here, TypeError for what is no device.
    """
    if device is None:
        present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if present is None or present.type == "mps":
            return torch.device("cpu")
        device = present
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f'device={device!r} is not a device; give one such as "cuda", "cuda:0" or "cpu"') from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    if not is_accelerator(chosen):
        present = torch.accelerator.current_accelerator()
        available = "cpu" if present is None else f"{present} and cpu"
        raise ValueError(f"device={str(device)!r} is not available here; available: {available}")
    index = torch.accelerator.current_device_index() if chosen.index is None else chosen.index
    if index >= torch.accelerator.device_count():
        count = torch.accelerator.device_count()
        raise ValueError(f"device={str(device)!r} does not exist: there are {count} devices of type {chosen.type!r}")
    return torch.device(chosen.type, index)


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` is of the accelerator type that this PyTorch drives."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current is not None and current.type == device.type


def is_capturing(device: torch.device) -> bool:
    """Whether work on the device is being captured into a graph (CUDA, ROCm, XPU and NPU)."""
    asks = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return asks is not None and bool(asks())


def pci_address(device: torch.device) -> str | None:
    """An accelerator's PCI address, as the kernel has it in /sys/bus/pci/devices; None if PyTorch does not tell it."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    found = None if properties is None or not is_accelerator(device) else properties(device)
    domain, bus, number = (getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    return None if domain is None or bus is None or number is None else f"{domain:04x}:{bus:02x}:{number:02x}.0"


def allocated_bytes(device: torch.device) -> int:
    """Bytes of tensors on the accelerator now; 0 on the CPU, where PyTorch does not count them."""
    return torch.accelerator.memory_allocated(device) if is_accelerator(device) else 0


def free_device_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on the accelerator now: free ones, and unused ones of its caching allocator."""
    unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(free_and_total_bytes(device)[0] + unused)


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Bytes that nobody has allocated on the accelerator, and all its bytes.

    Drivers of some XPUs do not tell the first number. Then this process counts as the only one that uses the device.
    """
    try:
        free, total = torch.accelerator.get_memory_info(device)
    except RuntimeError:
        if device.type != "xpu":
            raise
        total = torch.get_device_module(device).get_device_properties(device).total_memory
        free = total - torch.accelerator.memory_reserved(device)
    return int(free), int(total)


def new_stream(device: torch.device, others: Iterable[torch.Stream] = ()) -> torch.Stream:
    """A stream that is neither the current one nor one of `others`, if the device has enough streams.

    PyTorch hands out streams of a pool in turn. On XPU, the first one is the default stream itself.
    """
    taken = {torch.accelerator.current_stream(device), *others}
    stream = torch.Stream(device=device)
    for _ in taken:
        if stream not in taken:
            break
        stream = torch.Stream(device=device)
    return stream


def can_register_host_memory(device: torch.device) -> bool:
    """Whether memory that the caller owns can be page-locked for the device (CUDA and ROCm).

    On other devices, memory comes locked from PyTorch's own allocator: `torch.xpu` has no call that locks memory, and
    that of `torch.npu` has never been tried.
    """
    return device.type == "cuda" or hasattr(torch.get_device_module(device), "host_register")


def register_host_memory(device: torch.device, address: int, nbytes: int) -> Callable[[], Any] | None:
    """Page-locks memory that the caller owns, for asynchronous copies. Returns the call that unlocks it, or None if the
    system refuses.

    That call waits for the device, as a copy out of this memory may be under way when a model is dropped. For devices
    of which `can_register_host_memory` is true.
    """
    module = torch.get_device_module(device)
    if device.type == "cuda":
        runtime = module.cudart()
        lock = partial(runtime.cudaHostRegister, address, nbytes, _CUDA_HOST_REGISTER_PORTABLE)
        unlock = partial(runtime.cudaHostUnregister, address)
    else:
        lock = partial(module.host_register, address, nbytes)
        unlock = partial(module.host_unregister, address)
    if address in _locked:  # Ctrl-C kept earlier memory at this address from being unlocked
        with contextlib.suppress(RuntimeError):
            if int(unlock() or 0) != 0:  # it came before the memory was locked, or after it was unlocked
                _clear_last_error(device)
    _locked.add(address)
    try:
        refused = int(lock() or 0) != 0  # CUDA returns a number; others raise
    except RuntimeError:
        refused = True
    if refused:
        _locked.discard(address)
        _clear_last_error(device)
        return None
    owner = os.getpid()

    def unregister() -> None:
        if os.getpid() != owner:  # a forked process has a copy of the memory, and does not use the device
            return
        # The garbage collector may call this on any thread, whose device is to stay as it is.
        try:
            with torch.accelerator.device_index(device.index):
                try:
                    torch.accelerator.synchronize(device)
                finally:
                    unlock()
                    _locked.discard(address)
        except KeyboardInterrupt:  # before or after the unlock; the memory is unmapped next
            if address in _locked:
                with contextlib.suppress(RuntimeError):
                    unlock()
                _clear_last_error(device)
                _locked.discard(address)
            raise

    return unregister


def allocate_locked_memory(nbytes: int) -> torch.Tensor | None:
    """Page-locked memory from PyTorch's own allocator, which rounds sizes up; None if the system refuses."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # the base class of torch.AcceleratorError and torch.OutOfMemoryError
        return None


def waits_for_device(device: torch.device) -> Callable[..., None]:
    """Returns the call to make before page-locked memory is used for something else: copies may be under way when a
    model is dropped. It waits for the device; in a forked process, which does not use the device, it does nothing.
    It does nothing with its arguments: the caller gives it what must live until the wait is over.
    """
    owner = os.getpid()

    def wait(*_kept: object) -> None:
        if os.getpid() == owner:
            with torch.accelerator.device_index(device.index):
                torch.accelerator.synchronize(device)

    return wait


def _clear_last_error(device: torch.device) -> None:
    """Clears the error that a refused call has left behind: PyTorch's next kernel would raise it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device)
