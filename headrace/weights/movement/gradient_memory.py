"""In which host memory do gradients arrive? In arenas made before backward: pinning there would stall it."""

import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.memory.arena import Arena, aligned, whole_pages
from headrace.memory.disk import Request
from headrace.memory.ledger import Ledger
from headrace.weights.model.slot import Slot
from headrace.weights.rest.placement import DiskGradients, GradientMemory

__all__ = ["Additions", "HostGradient", "Staging"]

_PURPOSE = "gradients"


class HostGradient:
    """The memory of one parameter's `home.grad`, used again after `zero_grad(set_to_none=True)`.

    A user may keep a gradient beyond that (`saved = p.grad`). Then the memory is theirs, and new memory replaces it.
    """

    def __init__(
        self,
        slot: Slot,
        dtype: torch.dtype,
        memory: GradientMemory,
        offset: int,
        make: Callable[[int], GradientMemory],
    ) -> None:
        self.dtype = dtype
        self.next: torch.Tensor | None = None  # what `fresh` gives, once `renew` has made it
        self.disk: DiskGradients | None = None  # where on disk it rests; None: in host memory, or it has no bytes
        self._nbytes = slot.home.numel() * dtype.itemsize
        self._layout = (slot.layout.shape, _dense_stride(slot))
        self._make = make  # more, in whatever tier has room
        self._lent: StorageWeakRef | None = None  # the storage of the tensor that was made last
        # On disk, what the user had: extents are not freed, so they are used again.
        self._others: list[tuple[GradientMemory, int, StorageWeakRef]] = []
        self._lie_in(memory, offset)

    def renew(self) -> None:
        """Makes the tensor that `fresh` gives next, if there is none: elsewhere, where somebody has the last one.

        Its storage is its own alone: whoever else refers to that is the user (see runtime/holders.py).
        """
        if self.next is not None:
            return
        if not self._nbytes:
            self.next = torch.empty(self._layout[0], dtype=self.dtype, device="cpu")
            return
        if self._lent is not None and not self._lent.expired():
            self._move(self._lent)
        flat = self._memory.tensor(self._offset, self._nbytes, self.dtype)
        self._lent = StorageWeakRef(flat.untyped_storage())
        self.next = flat.as_strided_(*self._layout)

    def fresh(self) -> torch.Tensor:
        """A tensor of the home's shape and strides, in memory that nobody refers to. Contents are arbitrary."""
        self.renew()
        fresh, self.next = self.next, None
        return fresh  # type: ignore[return-value]

    def _move(self, lent: StorageWeakRef) -> None:
        """The user has what was lent: to memory that nobody has."""
        if self.disk is not None:
            self._others.append((self._memory, self._offset, lent))
        for number, (memory, offset, other) in enumerate(self._others):
            if other.expired():
                del self._others[number]
                self._lie_in(memory, offset)
                return
        self._lie_in(self._make(self._nbytes), 0)

    def _lie_in(self, memory: GradientMemory, offset: int) -> None:
        self._memory, self._offset = memory, offset
        self.disk = memory if isinstance(memory, DiskGradients) and self._nbytes else None


def _dense_stride(slot: Slot) -> tuple[int, ...]:
    """The home's strides; those of a contiguous tensor for one with holes, a part of a storage that others share."""
    home = torch.empty_strided(slot.layout.shape, slot.layout.stride, device="meta")
    dense = torch.ops.aten.is_non_overlapping_and_dense(home)
    return slot.layout.stride if dense else torch.empty(slot.layout.shape, device="meta").stride()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements, shape (elements,), in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


class Additions:
    """The end of what the host lane does with one half, and of the writes to disk that it submits for that."""

    def __init__(self, job: "Future[list[Request]]") -> None:
        self._job = job

    def synchronize(self) -> None:
        """The caller waits for both; raises what failed."""
        writes = self._job.result()
        for write in writes:
            write.settle()
        for write in writes:
            write.synchronize()


class Staging:
    """Two halves of pinned memory that take turns: one receives copies while the host lane adds up the other.

    A half is large enough for the gradients of a block, but no larger than `most_bytes`: then gradients are cut.
    """

    def __init__(self, device: torch.device, ledger: Ledger, most_bytes: int | None) -> None:
        self._device = device
        self._ledger = ledger
        self._most_bytes = most_bytes
        self._wanted_bytes = 0
        self._half_bytes = 0
        self._halves: list[torch.Tensor] = []
        self._busy: list[Additions | None] = [None, None]
        self._beside: list[Additions] = []  # that read neither half
        self._turn = 0
        self._used = 0

    def grow(self, half_bytes: int) -> None:
        """A half must be able to hold `half_bytes`. The memory is made at first use: one micro-batch needs none."""
        half_bytes = half_bytes if self._most_bytes is None else min(half_bytes, self._most_bytes)
        self._wanted_bytes = max(self._wanted_bytes, aligned(half_bytes))

    def limit(self, most_bytes: int) -> None:
        """Gradients are cut to that from now on, where host memory is short."""
        self._most_bytes = most_bytes if self._most_bytes is None else min(self._most_bytes, most_bytes)
        self._wanted_bytes = min(self._wanted_bytes, self._most_bytes)

    @property
    def missing_bytes(self) -> int:
        """The most that both halves take when they are made, or made anew: a page more than wanted, see `carve`."""
        return 2 * whole_pages(self._wanted_bytes + mmap.PAGESIZE) if self._wanted_bytes > self._half_bytes else 0

    def cut(self, gradient: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The pair, of the same strides, in parts that fit into a half: shape (elements,) each."""
        if not torch.ops.aten.is_non_overlapping_and_dense(target):
            yield gradient.contiguous(), target  # strides of a gradient that the user made
            return
        count = gradient.numel()
        if self._most_bytes is not None:  # less a page, whose first bytes may be left out
            count = (self._most_bytes - mmap.PAGESIZE) // gradient.element_size()
        yield from zip(_flat(gradient).split(max(1, count)), _flat(target).split(max(1, count)), strict=True)

    def rows_at_once(self, gradient: torch.Tensor) -> int:
        """How many rows of the gradient fit into a half."""
        return max(1, self._wanted_bytes // max(1, gradient[0].nbytes))

    def fits(self, nbytes: int, page: int | None) -> bool:
        """Whether the present half has room for so much; `page` as in `carve`."""
        return self._used == 0 or self._place(page) + aligned(nbytes) <= self._half_bytes

    def carve(self, gradient: torch.Tensor, page: int | None) -> torch.Tensor:
        """Memory for a copy of contiguous `gradient`. The host waits until the half's last additions are done.

        Where it goes to disk, at byte `page` of a file: it lies in its page as it does there, so that whole pages can
        be written as they are.
        """
        nbytes = (page or 0) % mmap.PAGESIZE + aligned(gradient.nbytes)
        if self._wanted_bytes > self._half_bytes or nbytes > self._half_bytes:
            self._make(max(self._wanted_bytes, nbytes))
        if self._used == 0:
            self._wait_for(self._turn)
        first = self._place(page)
        memory = self._halves[self._turn][first : first + gradient.nbytes]
        self._used = first + aligned(gradient.nbytes)
        return memory.view(gradient.dtype).view(gradient.shape)

    def _place(self, page: int | None) -> int:
        """The first free byte that lies in its page as `page` does; None: the first free byte."""
        return self._used if page is None else self._used + (page - self._used) % mmap.PAGESIZE

    def turn(self, additions: Additions) -> None:
        """The present half is full or sent: `additions` empties it, and the other one is next; unless it is empty."""
        if not self._used:
            self._beside.append(additions)
            return
        self._busy[self._turn] = additions
        self._turn = 1 - self._turn
        self._used = 0

    def under_way(self) -> list[Additions]:
        """Additions that were submitted and not waited for."""
        return [*(busy for busy in self._busy if busy is not None), *self._beside]

    def wait(self) -> None:
        """The host waits for all additions; raises what failed in one."""
        self._used = 0
        self._wait_for(0)
        self._wait_for(1)
        while self._beside:
            self._beside.pop().synchronize()

    def _wait_for(self, half: int) -> None:
        busy, self._busy[half] = self._busy[half], None
        if busy is not None:
            busy.synchronize()

    def _make(self, half_bytes: int) -> None:
        self.wait()
        self._half_bytes = half_bytes
        self._halves = [Arena(half_bytes, self._device, self._ledger, _PURPOSE).tensor(0, half_bytes) for _ in range(2)]
