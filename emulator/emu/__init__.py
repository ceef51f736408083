"""The device `emu`: importing this module registers it with PyTorch, building it first when needed.

From then on `torch.device("emu")`, `torch.accelerator`, `torch.Stream`, `torch.Event`, `pin_memory()` and
`non_blocking=True` work as on a GPU. The functions below are for tests: settings, counters, and what went wrong.
"""

import atexit
import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from ..build import load

__all__ = [
    "configure",
    "configured",
    "host_access",
    "reset",
    "reset_stats",
    "set_tag",
    "settings",
    "stats",
    "take_reports",
    "virtual_seconds",
]

DEVICE_TYPE = "emu"
_UINT64 = 2**64

_C = load()
_DEFAULTS = _C.settings()


def configure(**settings: Any) -> None:
    """Waits for the device, then changes the named settings and seeds the random scheduler anew.

    Raises KeyError for a name that does not exist, ValueError for a choice that does not.
    """
    _C.configure(**settings)


def settings() -> dict[str, Any]:
    """All settings and their values."""
    return _C.settings()


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """`configure()` for the length of a with block."""
    before = _C.settings()
    _C.configure(**settings)
    try:
        yield
    finally:
        _C.configure(**before)


def stats() -> dict[str, Any]:
    """Counters since the last `reset_stats()`; bytes and seconds as the names say."""
    return _C.stats()


def reset_stats() -> None:
    _C.reset_stats()


def take_reports() -> list[str]:
    """The races and misuses found since the last call, at most 200."""
    return _C.take_reports()


def virtual_seconds() -> float:
    """The virtual clock of the host: it moves at each enqueue and at each wait."""
    return _C.virtual_seconds()


def set_tag(tag: str) -> None:
    """Text that race reports carry for what is enqueued from now on, such as "step 3, layers.7"."""
    _C.set_tag(tag)


def host_access(tensor: torch.Tensor, *, write: bool, what: str) -> None:
    """Tells the race detector that the host touches `tensor` now. Plain host code is invisible to it."""
    _C.host_access(tensor.data_ptr(), tensor.numel() * tensor.element_size(), write, what)


def reset(**settings: Any) -> None:
    """A clean state between tests: default settings with the given changes, no history, no reports, counters at 0.

    Waits for the device. Streams made before must not be used afterwards: their numbers are given out again.
    """
    _C.configure(**(_DEFAULTS | settings))
    _C.begin_epoch()
    _C.set_tag("")
    _C.take_reports()
    _C.reset_stats()


class _DeviceModule(types.ModuleType):
    """`torch.emu`: what PyTorch looks up on the module of a device (checkpoint, autocast, torch.accelerator)."""

    # checkpoint() saves and restores the RNG state only of devices whose module has this.
    _initialized = True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def synchronize(device: object = None) -> None:
        torch.accelerator.synchronize()

    @staticmethod
    def current_stream(device: object = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    @staticmethod
    def host_register(ptr: int, nbytes: int) -> None:
        """Pins the caller's own memory, as cudaHostRegister does; `ptr` is a multiple of the page size.

        Raises ValueError for such a range, RuntimeError when it overlaps pinned memory or the ceiling is reached.
        """
        _C.host_register(ptr, nbytes)

    @staticmethod
    def host_unregister(ptr: int) -> None:
        """Undoes `host_register(ptr, ...)`. A copy that the host has not waited for is reported, and waited for.

        Raises RuntimeError when nothing registered begins at `ptr`.
        """
        _C.host_unregister(ptr)

    @staticmethod
    def manual_seed(seed: int) -> None:
        _C.set_rng(seed % _UINT64, 0)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.tensor(_C.get_rng(), dtype=torch.uint64).view(torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        _C.set_rng(*state.view(torch.uint64).tolist())

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    class device(contextlib.nullcontext):  # noqa: N801
        """The name that PyTorch looks up. There is one device, so choosing it changes nothing."""


def _register() -> None:
    rename_privateuse1_backend(DEVICE_TYPE)
    module = _DeviceModule(f"torch.{DEVICE_TYPE}")
    torch._register_device_module(DEVICE_TYPE, module)
    sys.modules[module.__name__] = module
    generate_methods_for_privateuse1_backend(for_storage=True)


@atexit.register
def _shut_down() -> None:
    with contextlib.suppress(RuntimeError):  # an error that no test waited for
        torch.accelerator.synchronize()
    _C.shut_down()


_register()
