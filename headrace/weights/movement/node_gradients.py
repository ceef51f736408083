"""Where do the averages of a node's gradients lie? Once, in memory that its ranks share; each has a view of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.errors import StateError
from headrace.memory.arena import aligned
from headrace.memory.shared import Common, OwnView, SharedArena
from headrace.runtime.lanes import LateTransfer, Transfer
from headrace.runtime.threads import Job
from headrace.weights.model.slot import Slot
from headrace.weights.movement.block import Block

__all__ = [
    "NodeGradients",
    "Round",
    "Sums",
    "add_up",
    "divided",
    "flat",
    "given_dtype",
    "laid_out",
    "offsets_of",
    "refuse_hooks",
    "strides_of",
    "there_is",
]


@dataclass(eq=False)
class NodeGradients:
    """The node's memory for gradients of some parameters of one block, and this rank's view of it."""

    arena: Common
    view: OwnView
    offsets: dict[Slot, int]
    lent: dict[Slot, tuple[StorageWeakRef, int]] = field(default_factory=dict)  # storage and address

    def common(self, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        """The average as all ranks see it: shape (elements,)."""
        return self.arena.tensor(self.offsets[slot], slot.home.numel() * dtype.itemsize, dtype)

    def lend(self, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
        """The same as the user of this rank sees it, in the home's shape."""
        lent = self.view.tensor(self.offsets[slot], slot.home.numel() * dtype.itemsize, dtype)
        self.lent[slot] = StorageWeakRef(lent.untyped_storage()), lent.data_ptr()
        return lent.as_strided_(slot.layout.shape, strides_of(slot))

    def is_kept(self, slot: Slot) -> bool:
        """Whether the user still refers to what was lent last."""
        return slot in self.lent and not self.lent[slot][0].expired()

    def has_lent(self, slot: Slot, gradient: torch.Tensor) -> bool:
        """Whether `gradient` is what was lent last."""
        return self.is_kept(slot) and gradient.data_ptr() == self.lent[slot][1]

    def leave_to_user(self) -> None:
        """Whatever was lent is the user's own from now on."""
        self.view.keep()
        self.view = self.arena.own_view()
        self.lent.clear()


def offsets_of(sizes: Iterable[int]) -> list[int]:
    """Where so many bytes each lie one after the other, aligned, and the end."""
    offsets = [0]
    for nbytes in sizes:
        offsets.append(offsets[-1] + aligned(nbytes))
    return offsets


def strides_of(slot: Slot) -> tuple[int, ...]:
    """Those of gradients: the home's; of a contiguous tensor for one with holes."""
    home = torch.empty_strided(slot.layout.shape, slot.layout.stride, device="meta")
    dense = torch.ops.aten.is_non_overlapping_and_dense(home)
    return slot.layout.stride if dense else torch.empty(slot.layout.shape, device="meta").stride()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor, shape (elements,), in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def there_is(slot: Slot) -> torch.Tensor:
    """The home's gradient that there is, flat, in the order of the memory that headrace gives."""
    gradient: Any = slot.home.grad
    if gradient.stride() != strides_of(slot):
        gradient = torch.empty_strided(gradient.shape, strides_of(slot), dtype=gradient.dtype).copy_(gradient)
    return flat(gradient.detach())


def given_dtype(slot: Slot, dtype: torch.dtype) -> torch.dtype:
    """In which a gradient is given whose average has `dtype`: nothing is rounded before it is added."""
    return torch.promote_types(slot.layout.dtype, dtype)


def laid_out(gradient: torch.Tensor, slot: Slot, dtype: torch.dtype) -> torch.Tensor:
    """The gradient as its average lies, so that the copy across the link is one run of bytes."""
    if gradient.stride() == strides_of(slot) and gradient.dtype == dtype:
        return gradient
    return torch.empty_strided(gradient.shape, strides_of(slot), dtype=dtype, device=gradient.device).copy_(gradient)


@dataclass(kw_only=True, eq=False)
class Round:
    """The gradients that this rank gives of one block, at once.

    `half`: memory of the node for them, of which each rank has `region_bytes`.
    """

    block: Block
    number: int
    half: SharedArena
    region_bytes: int
    slots: list[Slot]
    flags: list[int]
    from_host: dict[Slot, torch.Tensor]  # added to what comes from the device
    before: Job[list[Slot]] | None  # the sums of the round that had `half` last
    transfer: Transfer | LateTransfer | None = None  # from the device; None: there is none, or it has landed
    landing: Any = None  # what the sums keep of the round

    def said(self, rank: int) -> torch.Tensor:
        """What that rank says of each parameter."""
        return self.half.tensor(rank * self.region_bytes, len(self.slots))

    def given(self, rank: int, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """So many elements of what that rank gives, from byte `begin` on."""
        first = rank * self.region_bytes + aligned(len(self.slots)) + begin
        return self.half.tensor(first, count * dtype.itemsize, dtype)


class Sums(Protocol):
    """Who adds up what ranks give. On two threads, so that one round's sums wait for no other's: one meets the other
    ranks, round after round, the other one adds up what has come to the host.
    """

    on_host: bool  # each rank reads what all give, and adds one after the other to what there is; otherwise the sum
    in_flight: int  # of so many rounds at most gradients are leaving the device

    def close(self) -> None:
        """No round follows, on this rank."""

    def part(self, count: int) -> slice:
        """Which of a parameter's elements this rank adds up."""

    def given_bytes(self, slots: Sequence[Slot]) -> int:
        """What a rank gives of a block at most."""

    def give(self, given: Round, gradients: dict[Slot, torch.Tensor]) -> int:
        """Submits the transfer of a round's gradients, and those from the host. The bytes on the device until then."""

    def let_go(self, given: Round) -> None:
        """Compute waits for the transfer, or the round is over: the device may have its memory."""

    def land(self, given: Round) -> None:
        """On the first thread: all that others need of this rank is there."""

    def exchange(self, given: Round, gives: torch.Tensor) -> None:
        """On the first thread, when all ranks have come. `gives`: which rank gives which parameter."""

    def collect(self, given: Round) -> None:
        """On the second thread: waits until all of it is on the host."""

    def of(self, given: Round, gives: torch.Tensor, index: int, begin: torch.Tensor | None) -> torch.Tensor | None:
        """On the second thread: the average of this rank's part of a parameter, to be changed; None where nobody gives
        it. `on_host` one rank after the other is added to `begin`.
        """

    def fail(self, given: Round, error: BaseException) -> None:
        """On the first thread: the round is over."""


def divided(blocks: Iterable[Block]) -> tuple[list[Block], list[Block]]:
    """Those that stream, and those that stay on the device."""
    every = list(blocks)
    return [one for one in every if one.index >= 0], [one for one in every if one.index < 0]


def add_up(sums: dict[Slot, torch.Tensor], slot: Slot, gradient: torch.Tensor) -> None:
    """One more gradient of a parameter, on the host."""
    sums[slot] = sums[slot].add_(gradient) if slot in sums else gradient.clone()


def refuse_hooks(block: Block) -> None:
    """Raises StateError for a hook that wants to see gradients before they are averaged."""
    for slot in block.slots:
        if slot.home._backward_hooks:
            raise StateError(
                f"parameter {slot.name!r} has a hook that sees gradients before they are averaged (register_hook);"
                " with several ranks use register_post_accumulate_grad_hook, which sees the average"
            )
