"""How are gradients of ranks added up on the host? Each rank gives all of its own, and adds up its part of all.

In the order of the ranks, each divided by their number: as one process would that takes their batches one after the
other.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from headrace.runtime.lanes import Copy, Lane, Lanes
from headrace.runtime.node import Node
from headrace.weights.meter import Meter
from headrace.weights.model.slot import Slot
from headrace.weights.movement.node_gradients import Round, flat, given_dtype, laid_out, offsets_of, strides_of

__all__ = ["HostSums"]


class HostSums:
    """The sums of one model's gradients. `dtype_of` the sums of a parameter's."""

    on_host, in_flight = True, 1

    def __init__(self, node: Node, lanes: Lanes, meter: Meter, dtype_of: Callable[[Slot], torch.dtype]) -> None:
        self._node, self._lanes, self._meter, self._dtype_of = node, lanes, meter, dtype_of
        self.part = node.part

    def close(self) -> None:
        """Nothing is to be ended."""

    def given_bytes(self, slots: Sequence[Slot]) -> int:
        """All gradients of a block."""
        return self._offsets_of(slots)[-1]

    def give(self, given: Round, gradients: dict[Slot, torch.Tensor]) -> int:
        """They leave as they are."""
        given.landing = dict(zip(given.slots, self._offsets_of(given.slots), strict=False)), frozenset(gradients)
        if not gradients:
            return 0
        places = self._places(given, self._node.rank, gradients)
        copies: list[Copy] = [(places[slot], laid_out(one, slot, self._given(slot))) for slot, one in gradients.items()]
        given.transfer = transfer = self._lanes.copy(Lane.OFFLOAD, copies, self._lanes.mark())
        self._meter.offloaded(transfer, given.block.name)
        return sum(one.nbytes for one in gradients.values())

    def let_go(self, given: Round) -> None:
        """The transfer has it."""

    def land(self, given: Round) -> None:
        """They have left, and those from the host are added."""
        if given.transfer is not None:
            given.transfer.done.synchronize()
            given.transfer = None  # which keeps what was on the device
        _, transferred = given.landing
        mine = self._places(given, self._node.rank, given.from_host)
        for slot, gradient in given.from_host.items():
            mine[slot].add_(gradient) if slot in transferred else mine[slot].copy_(gradient)

    def exchange(self, given: Round, gives: torch.Tensor) -> None:
        """Nothing: each reads what the others have given."""

    def collect(self, given: Round) -> None:
        """It is there."""

    def of(self, given: Round, gives: torch.Tensor, index: int, begin: torch.Tensor | None) -> torch.Tensor | None:
        """In the order of the ranks."""
        slot, total = given.slots[index], begin
        for rank in range(self._node.size):
            if gives[rank, index]:
                whole = flat(self._places(given, rank, [slot])[slot])
                one = whole[self.part(len(whole))] / self._node.world
                total = one.to(self._dtype_of(slot)) if total is None else total.add_(one)
        return total

    def fail(self, given: Round, error: BaseException) -> None:
        """Nobody waits for it."""

    def _places(self, given: Round, rank: int, wanted: Iterable[Slot]) -> dict[Slot, torch.Tensor]:
        """Where that rank gives these gradients, in the home's shape."""
        offsets, _ = given.landing
        found = {}
        for slot in wanted:
            place = given.given(rank, offsets[slot], slot.home.numel(), self._given(slot))
            found[slot] = place.as_strided(slot.layout.shape, strides_of(slot))
        return found

    def _offsets_of(self, slots: Sequence[Slot]) -> list[int]:
        return offsets_of(slot.home.numel() * self._given(slot).itemsize for slot in slots)

    def _given(self, slot: Slot) -> torch.dtype:
        return given_dtype(slot, self._dtype_of(slot))
