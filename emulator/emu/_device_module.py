"""What does PyTorch find as `torch.emu`? The functions that it looks up on the module of a device."""

import sys
import types
from typing import Any

import torch
from torch.accelerator._utils import _get_device_index
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from ._native import native

DEVICE_TYPE = "emu"
_UINT64 = 2**64


class DeviceModule(types.ModuleType):
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
    def _lazy_init() -> None:
        """Until it was called, `torch.accelerator.synchronize()` of PyTorch 2.11 does nothing."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return native.DEVICE_COUNT

    @staticmethod
    def current_device() -> int:
        return native.current_device()

    @staticmethod
    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(device)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return bool(native.is_capturing())

    @staticmethod
    def host_register(ptr: int, nbytes: int) -> None:
        """Pins the caller's own memory, as cudaHostRegister does; `ptr` is a multiple of the page size.

        Raises ValueError for such a range, RuntimeError when it overlaps pinned memory or the ceiling is reached.
        """
        native.host_register(ptr, nbytes)

    @staticmethod
    def host_unregister(ptr: int) -> None:
        """Undoes `host_register(ptr, ...)`. A copy that the host has not waited for is reported, and waited for.

        Raises RuntimeError when nothing registered begins at `ptr`.
        """
        native.host_unregister(ptr)

    @staticmethod
    def manual_seed(seed: int) -> None:
        native.set_rng(native.current_device(), seed % _UINT64, 0)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for index in range(native.DEVICE_COUNT):
            native.set_rng(index, seed % _UINT64, 0)

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        numbers = native.get_rng(_get_device_index(device, optional=True))
        return torch.tensor(numbers, dtype=torch.uint64).view(torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        native.set_rng(_get_device_index(device, optional=True), *state.view(torch.uint64).tolist())

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    class device:  # noqa: N801
        """The name that PyTorch looks up: the current device of this thread, for a with block."""

        def __init__(self, device: Any) -> None:
            self._index = _get_device_index(device, optional=True)
            self._before = -1

        def __enter__(self) -> None:
            self._before = native.current_device()
            native.set_device(self._index)

        def __exit__(self, *_error: object) -> None:
            native.restore_device(self._before)


def register() -> None:
    rename_privateuse1_backend(DEVICE_TYPE)
    module = DeviceModule(f"torch.{DEVICE_TYPE}")
    torch._register_device_module(DEVICE_TYPE, module)
    sys.modules[module.__name__] = module
    generate_methods_for_privateuse1_backend(for_storage=True)
