"""Where do the weights of a model that is being built lie? Large ones in files without names, not in RAM."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from millrace.errors import DiskError
from millrace.memory.disk.directory import StoreDirectory
from millrace.memory.disk.mapping import Mapping

__all__ = ["TensorsOnDisk"]

_SMALL_BYTES = 2**20  # less than this stays in RAM


class TensorsOnDisk(TorchFunctionMode):
    """Within it, `torch.empty` of a large tensor on the CPU gives memory of a file in `path`, which is gone with it.

    Modules make their parameters so and then draw the values in place, so the values are those that they would have
    in RAM; the kernel writes pages to the drive when it needs their memory. Raises DiskError when the drive is full.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._directory = StoreDirectory(path)

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._directory.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))  # RAM that nobody has touched, and so does not take any
        if func is torch.empty and made.device.type == "cpu" and made.nbytes >= _SMALL_BYTES and not made.is_pinned():
            return self._on_disk(made.nbytes).view(made.dtype).as_strided(made.shape, made.stride())
        return made

    def _on_disk(self, nbytes: int) -> torch.Tensor:
        self._directory.check_free(nbytes, "a new weight")
        descriptor = self._directory.create_file()
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
            return Mapping(descriptor, 0, nbytes, shared=True).tensor(0, nbytes)
        except OSError as error:
            raise DiskError(
                error.errno,
                f"a new weight of {nbytes:,} bytes could not be laid in {self._directory.path}: {error.strerror}. Free"
                " some space, or give a directory on another disk.",
            ) from error
        finally:
            os.close(descriptor)
