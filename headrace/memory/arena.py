"""Where do the bytes of the host tier lie? In arenas: exact-size slabs, touched, page-locked if there is a device.

PyTorch's own pinned allocator rounds every allocation up to a power of two and never gives it back. So an arena maps
its memory itself, and registers it with the device (see docs/design/arenas.md).
"""

import mmap

import torch

from headrace.memory.ledger import Ledger
from headrace.memory.locking import host_memory

ALIGNMENT_BYTES = 64  # of every tensor in an arena or a block: a cache line, which is enough for any dtype
# Of all but small tensors. Libraries choose kernels by alignment, up to this one: with a smaller one, they could choose
# another kernel than in the plain run, and results could differ in the last bit.
KERNEL_ALIGNMENT_BYTES = 256


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of a tensor of that size."""
    alignment = KERNEL_ALIGNMENT_BYTES if is_large(nbytes) else ALIGNMENT_BYTES
    return (nbytes + alignment - 1) // alignment * alignment


def is_large(nbytes: int) -> bool:
    """Whether a tensor of that size gets the alignment that kernels ask for. In a block, large tensors come first."""
    return nbytes >= KERNEL_ALIGNMENT_BYTES


def whole_pages(nbytes: int) -> int:
    """Bytes that an arena takes: `nbytes` rounded up to pages, one at least."""
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


class Arena:
    """`nbytes` of host memory, rounded up to whole pages, page-locked for `device` if that is an accelerator.

    `pinned` is False if `device` is the CPU, or if the system refuses to lock memory.

    The memory lives as long as any tensor made by `tensor` does, and is booked in `ledger` under `purpose` until then.
    `computed`: cores compute in it, as in an update; its pages come in turn from the NUMA nodes of these cores. Memory
    that is only copied to and from `device` comes from the device's node.

    Raises BudgetError, before anything is allocated, if the arena would exceed the ledger's host budget.
    """

    def __init__(
        self, nbytes: int, device: torch.device, ledger: Ledger, purpose: str, *, computed: bool = False
    ) -> None:
        self.nbytes = whole_pages(nbytes)
        with ledger.making(self.nbytes):
            ledger.check_host(self.nbytes, purpose)
            self._memory, self.pinned = host_memory(self.nbytes, device, ledger, purpose, computed=computed)

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Bytes `offset` to `offset + nbytes` as a tensor of shape (elements,) with a storage of its own.

        So saving one tensor does not save the whole arena, and two neighbours do not look as if they shared memory.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
