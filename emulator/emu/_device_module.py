"""What does PyTorch find as `torch.emu`? The functions that it looks up on the module of a device."""

import contextlib
import sys
import types

import torch
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
        native.host_register(ptr, nbytes)

    @staticmethod
    def host_unregister(ptr: int) -> None:
        """Undoes `host_register(ptr, ...)`. A copy that the host has not waited for is reported, and waited for.

        Raises RuntimeError when nothing registered begins at `ptr`.
        """
        native.host_unregister(ptr)

    @staticmethod
    def manual_seed(seed: int) -> None:
        native.set_rng(seed % _UINT64, 0)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.tensor(native.get_rng(), dtype=torch.uint64).view(torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        native.set_rng(*state.view(torch.uint64).tolist())

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    class device(contextlib.nullcontext[None]):  # noqa: N801
        """The name that PyTorch looks up. There is one device, so choosing it changes nothing."""


def register() -> None:
    rename_privateuse1_backend(DEVICE_TYPE)
    module = DeviceModule(f"torch.{DEVICE_TYPE}")
    torch._register_device_module(DEVICE_TYPE, module)
    sys.modules[module.__name__] = module
    generate_methods_for_privateuse1_backend(for_storage=True)
