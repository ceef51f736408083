"""Where do the weights of a model that is being built lie? Large ones in files without names, not in RAM."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headrace.errors import DiskError
from headrace.memory.disk.directory import StoreDirectory
from headrace.memory.disk.mapping import Mapping
from headrace.runtime.system import reserve

_SMALL_BYTES = 2**20  # less than this stays in RAM
_COPIES = frozenset((torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.to, torch.Tensor.reshape))


class TensorsOnDisk(TorchFunctionMode):
    """Within this context, large CPU tensors of `torch.empty` lie in files in `path`; each file goes with its tensor.

    Modules make their parameters by `torch.empty`, and then draw the values in place, so the values are the same as in
    RAM. The kernel writes pages to the drive when it needs their memory. Tensors that are made from others (experts of
    a checkpoint, joined into one tensor) go to the drive as soon as they are made; then `made_one` is called.

    Raises DiskError if the drive is full.
    """

    def __init__(self, path: str | os.PathLike[str], made_one: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._directory = StoreDirectory(path, alone=False)
        self._made_one = made_one

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._directory.close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.stack, torch.cat) and (joined := self._joined(func, *args, **(kwargs or {}))) is not None:
            return joined
        made = func(*args, **(kwargs or {}))  # of `torch.empty`: memory that is not touched, and takes no RAM
        if func is torch.empty:
            if made.device.type == "cpu" and made.nbytes >= _SMALL_BYTES and not made.is_pinned():
                return _like(made, self.memory(made.nbytes).tensor(0, made.nbytes))
        elif func in _COPIES and made.device.type == "cpu" and made.nbytes >= _SMALL_BYTES and _is_new(made, args):
            return self._moved(made)
        return made

    def _joined(
        self, func: Callable[..., Any], tensors: Sequence[torch.Tensor], dim: int = 0, **others: Any
    ) -> torch.Tensor | None:
        """`torch.stack` or `torch.cat` onto disk, tensor by tensor; None for a small result or another kind of call."""
        if others or any(tensor.device.type != "cpu" or tensor.dtype != tensors[0].dtype for tensor in tensors):
            return None
        like = func([tensor.to("meta") for tensor in tensors], dim)
        if like.nbytes < _SMALL_BYTES:
            return None
        mapping = self.memory(like.nbytes)
        joined = _like(like, mapping.tensor(0, like.nbytes))
        at = 0
        for tensor in tensors:
            rows = 1 if func is torch.stack else tensor.shape[dim]
            place = joined.select(dim, at) if func is torch.stack else joined.narrow(dim, at, rows)
            place.copy_(tensor)
            at += rows
            self._let_go(mapping)
        return joined

    def _let_go(self, mapping: Mapping) -> None:
        mapping.forget()
        if self._made_one is not None:
            self._made_one()

    def _moved(self, made: torch.Tensor) -> torch.Tensor:
        if not torch.ops.aten.is_non_overlapping_and_dense(made):
            return made
        mapping = self.memory(made.nbytes)
        moved = _like(made, mapping.tensor(0, made.nbytes)).copy_(made)
        self._let_go(mapping)
        return moved

    def memory(self, nbytes: int, what: str = "a new weight") -> Mapping:
        """Memory of a new file, which goes with it."""
        self._directory.check_free(nbytes, what)
        descriptor = self._directory.create_file()
        try:
            reserve(descriptor, 0, nbytes)
            return Mapping(descriptor, 0, nbytes, shared=True)
        except OSError as error:
            raise DiskError(
                error.errno,
                f"{what} of {nbytes:,} bytes could not be put in {self._directory.path}: {error.strerror}. Free"
                " some space, or give a directory on another disk.",
            ) from error
        finally:
            os.close(descriptor)


def _like(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _is_new(made: torch.Tensor, args: Sequence[Any]) -> bool:
    """Whether `made` has memory of its own, not that of the tensor that it was made from, the first of `args`."""
    given = args[0] if args else None
    return (
        not isinstance(given, torch.Tensor) or given.untyped_storage().data_ptr() != made.untyped_storage().data_ptr()
    )
