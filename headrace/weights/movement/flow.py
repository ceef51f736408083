"""How do gradients get from leaves to homes? They are taken when complete, leave block by block, and are all there when
backward ends.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.autograd import without_overrides, without_transforms
from headrace.runtime.lanes import Lanes, LateTransfer, Transfer
from headrace.weights.meter import Meter
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block
from headrace.weights.movement.host_gradients import offsets_of
from headrace.weights.rest.placement import HostTiers

__all__ = ["PURPOSE", "GradientFlow", "Leaving", "Wanted"]

PURPOSE = "gradients"  # what the ledger books their memory for


# Parameters of a block that have no memory for gradients yet, the byte at which each will have its own, and the end.
Wanted = tuple[Block, list[ManagedParam], list[int]]


class Leaving(NamedTuple):
    """Gradients that the device holds until compute has waited for their copies."""

    number: int
    transfer: Transfer | LateTransfer
    rows: dict[torch.dtype, torch.Tensor]  # memory that the copies read and that `transfer` does not hold


class GradientFlow(ABC):
    """Gradients of all blocks of one model, between the leaves that receive them and the homes that keep them."""

    def __init__(
        self, lanes: Lanes, ledger: Ledger, meter: Meter, tiers: HostTiers, grad_dtype: torch.dtype | None
    ) -> None:
        self.lanes, self.ledger, self.meter = lanes, ledger, meter
        self._tiers = tiers
        self._grad_dtype = grad_dtype
        self._leaving: deque[Leaving] = deque()

    def prepare(self, blocks: Iterable[Block]) -> None:
        """Makes memory for gradients of trainable parameters that have none. Not in backward: pinning takes time."""
        # Memory of ours, in whatever transform the model is called; and a look at a gradient waits for nobody.
        with without_transforms(), without_overrides():
            lacking = [(block, slots) for block in blocks if (slots := self._lacking(block))]
            self._make([(block, slots, offsets_of(slots, self.dtype)) for block, slots in lacking])

    @abstractmethod
    def _lacking(self, block: Block) -> list[ManagedParam]:
        """Looks through the parameters of a block before a pass: those that have no memory for gradients."""

    @abstractmethod
    def _make(self, wanted: list[Wanted]) -> None:
        """Makes the memory of these gradients. Raises BudgetError where there is no room."""

    @abstractmethod
    def take(self, slot: ManagedParam, *gradients: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """A complete gradient on the device goes to its home with its block's.

        With `rows`, that of some rows of a table, or of some experts, in pieces; without, that of all, in one.
        """

    @abstractmethod
    def leave_block(self) -> None:
        """Backward goes on to another block: what it had of those before leaves. Compute waits for what left before.

        So the device holds the gradients of two blocks at most: those that leave, and those that are being computed.
        """

    @abstractmethod
    def deliver(self, in_hooks: Callable[[], None] = lambda: None) -> None:
        """The end of backward: every gradient is in its home when this returns. Then the homes' own hooks fire.

        Where that takes another backward, `in_hooks` is called in it before any of them.
        """

    def abandon(self) -> None:
        """Backward raised: what it computed is dropped, once nothing is in flight any more."""
        while self._leaving:
            self._let_go()
        self.ledger.add(Tier.DEVICE, PURPOSE, -self.ledger.held_bytes(Tier.DEVICE, PURPOSE))

    @abstractmethod
    def close(self) -> None:
        """The model is let go of: threads end."""

    def dtype(self, slot: ManagedParam) -> torch.dtype:
        """The dtype of the gradient in the home."""
        return slot.dtype if self._grad_dtype is None else self._grad_dtype

    def _let_go(self) -> None:
        """Compute waits for the copies of the oldest gradients under way; then the device may have their memory."""
        leaving = self._leaving.popleft()
        self.lanes.wait(leaving.transfer.done)
        leaving.rows.clear()
        self.ledger.add(Tier.DEVICE, PURPOSE, -leaving.transfer.nbytes)
