"""In which host memory do gradients arrive? In arenas made before backward: pinning there would stall it."""

from concurrent.futures import Future

import torch

from millrace.engine.slot import Slot
from millrace.memory.arena import Arena, aligned
from millrace.memory.ledger import Ledger

__all__ = ["HostGradient", "Staging"]

_PURPOSE = "gradients"


class HostGradient:
    """The memory of one parameter's `home.grad`, used again after `zero_grad(set_to_none=True)`.

    A user may keep a gradient beyond that (`saved = p.grad`). Then the memory is theirs, and new memory replaces it.
    """

    def __init__(self, slot: Slot, dtype: torch.dtype, arena: Arena, offset: int) -> None:
        self._arena = arena
        self._layout = (slot.layout.shape, slot.layout.stride)
        self._nbytes = slot.home.numel() * dtype.itemsize
        self._dtype = dtype
        self._memory = self._tensor(arena.tensor(offset, self._nbytes))
        self._own_references = _references(self._memory)

    def fresh(self) -> torch.Tensor:
        """A tensor of the home's shape and strides, in memory that nobody refers to. Contents are arbitrary."""
        if _references(self._memory) > self._own_references:
            self._arena = self._arena.like(self._nbytes)
            self._memory = self._tensor(self._arena.tensor(0, self._nbytes))
            self._own_references = _references(self._memory)
        return self._memory.detach()

    def _tensor(self, memory: torch.Tensor) -> torch.Tensor:
        if not self._nbytes:
            return torch.empty(self._layout[0], dtype=self._dtype)
        return memory.view(self._dtype).as_strided(*self._layout)


def _references(tensor: torch.Tensor) -> int:
    """How many tensors and views refer to the memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


class Staging:
    """Two halves of pinned memory that take turns: one receives copies while the host lane adds up the other."""

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._wanted_bytes = 0
        self._half_bytes = 0
        self._halves: list[torch.Tensor] = []
        self._busy: list[Future[None] | None] = [None, None]
        self._turn = 0
        self._used = 0

    def grow(self, half_bytes: int) -> None:
        """A half must be able to hold `half_bytes`. The memory is made at first use: one micro-batch needs none."""
        self._wanted_bytes = max(self._wanted_bytes, aligned(half_bytes))

    def fits(self, gradient: torch.Tensor) -> bool:
        """Whether the present half has room for it."""
        return self._used == 0 or self._used + aligned(gradient.nbytes) <= self._half_bytes

    def carve(self, gradient: torch.Tensor) -> torch.Tensor:
        """Memory for a contiguous copy of `gradient`. The host waits until the half's last additions are done."""
        if self._wanted_bytes > self._half_bytes or aligned(gradient.nbytes) > self._half_bytes:
            self._make(max(self._wanted_bytes, aligned(gradient.nbytes)))
        if self._used == 0:
            self._wait_for(self._turn)
        memory = self._halves[self._turn][self._used : self._used + gradient.nbytes]
        self._used += aligned(gradient.nbytes)
        return memory.view(gradient.dtype).view(gradient.shape)

    def turn(self, additions: "Future[None]") -> None:
        """The present half is full or sent: `additions` empties it, and the other one is next."""
        self._busy[self._turn] = additions
        self._turn = 1 - self._turn
        self._used = 0

    def under_way(self) -> list[Future[None]]:
        """Additions that were submitted and not waited for."""
        return [busy for busy in self._busy if busy is not None]

    def wait(self) -> None:
        """The host waits for all additions; raises what failed in one."""
        self._used = 0
        self._wait_for(0)
        self._wait_for(1)

    def _wait_for(self, half: int) -> None:
        busy, self._busy[half] = self._busy[half], None
        if busy is not None:
            busy.result()

    def _make(self, half_bytes: int) -> None:
        self.wait()
        self._half_bytes = half_bytes
        self._halves = [Arena(half_bytes, self._device, self._ledger, _PURPOSE).tensor(0, half_bytes) for _ in range(2)]
