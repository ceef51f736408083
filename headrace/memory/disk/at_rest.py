"""What stands for a tensor whose elements are on disk? How it looks, and how its bytes are read, some at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["TensorAtRest"]


@dataclass(frozen=True)
class TensorAtRest:
    """A tensor like `like` (on meta). `read(begin, memory)` fills uint8 memory with its bytes from `begin` on.

    The bytes are in the order of memory: as the strides of `like` say.
    """

    like: torch.Tensor
    read: Callable[[int, torch.Tensor], None]

    @property
    def nbytes(self) -> int:
        return self.like.numel() * self.like.itemsize

    def load(self) -> torch.Tensor:
        """Reads the whole tensor into memory."""
        flat = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        if self.nbytes:
            self.read(0, flat)
        return flat.view(self.like.dtype).as_strided(self.like.shape, self.like.stride())
