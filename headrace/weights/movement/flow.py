"""How do gradients get from leaves to homes? They are taken when complete, leave the device block by block, and are all
in homes when backward ends.
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
from headrace.weights.rest.tiers import Tiers

PURPOSE = "gradients"  # the name under which the ledger books their memory


# A block, its parameters without memory for gradients, the byte at which each gradient will begin, and the end.
Wanted = tuple[Block, list[ManagedParam], list[int]]


class Leaving(NamedTuple):
    """Gradients that the device holds until compute has waited for their copies to the host."""

    number: int  # of the block, or of the round, in the order in which they leave
    transfer: Transfer | LateTransfer
    rows: dict[torch.dtype, torch.Tensor]  # memory that the copies read and that `transfer` does not hold


class GradientFlow(ABC):
    """Moves the gradients of one model's blocks from the leaves that receive them to the homes that keep them."""

    synchronises = True  # whether backward averages over ranks, if there are several

    def __init__(
        self, lanes: Lanes, ledger: Ledger, meter: Meter, tiers: Tiers, grad_dtype: torch.dtype | None
    ) -> None:
        self.lanes, self.ledger, self.meter = lanes, ledger, meter
        self._tiers = tiers
        self._grad_dtype = grad_dtype
        self._leaving: deque[Leaving] = deque()

    def prepare(self, blocks: Iterable[Block]) -> None:
        """Makes memory for gradients of trainable parameters that lack it. Called before backward: pinning is slow."""
        # The memory is ours, whatever transform the model is called in; and looking at a gradient waits for nobody.
        with without_transforms(), without_overrides():
            lacking = [(block, params) for block in blocks if (params := self._lacking(block))]
            self._make([(block, params, offsets_of(params, self.dtype)) for block, params in lacking])

    @abstractmethod
    def _lacking(self, block: Block) -> list[ManagedParam]:
        """Called before a pass: the parameters of a block that have no memory for gradients."""

    @abstractmethod
    def _make(self, wanted: list[Wanted]) -> None:
        """Makes the memory of these gradients. Raises BudgetError where there is no room."""

    @abstractmethod
    def take(self, param: ManagedParam, *gradients: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Takes a complete gradient on the device, which goes to its home with the others of its block.

        With `rows`, it is the gradient of some rows of a table, or of some experts, in pieces; without, that of the
        whole parameter, in one piece.
        """

    @abstractmethod
    def leave_block(self) -> None:
        """Called when backward goes on to another block: sends its gradients so far. Compute waits for earlier ones.

        So the device holds the gradients of two blocks at most: those that leave, and those that are being computed.
        """

    @abstractmethod
    def deliver(self, in_hooks: Callable[[], None]) -> None:
        """Called at the end of backward. Puts every gradient in its home, and then lets the homes' own hooks fire.

        If hooks need another backward, `in_hooks` is called in it before any hook.
        """

    def abandon(self) -> None:
        """Called when backward raised: drops what it computed, once nothing is in flight."""
        while self._leaving:
            self._release_oldest()
        self.ledger.add(Tier.DEVICE, PURPOSE, -self.ledger.held_bytes(Tier.DEVICE, PURPOSE))

    @abstractmethod
    def close(self) -> None:
        """Called when the model is let go of: ends threads."""

    def dtype(self, param: ManagedParam) -> torch.dtype:
        """The dtype that the gradient in the home has."""
        return param.dtype if self._grad_dtype is None else self._grad_dtype

    def _release_oldest(self) -> None:
        """Compute waits for the copies of the oldest gradients under way; then their device memory is free."""
        leaving = self._leaving[0]  # not taken before the wait: Ctrl-C between the two would free its memory
        self.lanes.wait(leaving.transfer.done)
        leaving.rows.clear()
        self._leaving.popleft()
        self.ledger.add(Tier.DEVICE, PURPOSE, -leaving.transfer.nbytes)
