"""How do the devices of a node add gradients up? Packed so that each gets the sums of one part of every parameter.

A rank packs its gradients of a block into rows, one for each rank, which have an equal part of each parameter. When all
ranks have come to the block, a collective gives each the sum of its row, which alone leaves for the host. A parameter
that this rank has not used counts as zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from headrace.memory.arena import aligned
from headrace.runtime.device_group import DeviceGroup
from headrace.runtime.lanes import CollectiveLane, Copy, Event, Lane, Lanes, LateTransfer, Transfer
from headrace.runtime.node import Node
from headrace.runtime.threads import Job
from headrace.weights.meter import Meter
from headrace.weights.model.slot import Slot
from headrace.weights.movement.node_gradients import Round, flat, given_dtype, laid_out

__all__ = ["DeviceSums"]


@dataclass(eq=False)
class _Packed:
    """The gradients of one block on this rank: for each dtype a tensor of shape (ranks, n)."""

    rows: dict[torch.dtype, torch.Tensor]
    full: Event  # when they are
    left: Job[Transfer]  # the copy of the own row to the host, once it is submitted: compute may wait for it then
    sums: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)  # the row on the host,
    landed: Event | None = None  # when it is there


class DeviceSums:
    """The sums of one model's gradients. `dtype_of` the sums of a parameter's. To be made by all ranks."""

    on_host, in_flight = False, 2

    def __init__(self, node: Node, lanes: Lanes, meter: Meter, dtype_of: Callable[[Slot], torch.dtype]) -> None:
        self._node, self._lanes, self._meter = node, lanes, meter
        self._dtype_of: Callable[[Slot], torch.dtype] = lambda slot: given_dtype(slot, dtype_of(slot))
        self._group = DeviceGroup(node, lanes.device)

    def close(self) -> None:
        """No round follows."""
        self._group.close()

    def part(self, count: int) -> slice:
        """As rows have it: each of the first ranks as many, and the last what is left."""
        length = -(-count // self._node.size)
        return slice(min(count, length * self._node.rank), min(count, length * (self._node.rank + 1)))

    def given_bytes(self, slots: Sequence[Slot]) -> int:
        """One row."""
        return sum(aligned(length * dtype.itemsize) for dtype, length in self._lay_out(slots)[1].items())

    def give(self, given: Round, gradients: dict[Slot, torch.Tensor]) -> int:
        """They are packed, with those from the host, and each divided by the number of all ranks."""
        size, device = self._node.size, self._lanes.device
        places, lengths = self._lay_out(given.slots)
        rows = {dtype: torch.zeros(size, length, dtype=dtype, device=device) for dtype, length in lengths.items()}
        with torch.no_grad():
            for slot in given.slots:
                gradient, more = gradients.get(slot), given.from_host.get(slot)
                if more is not None:
                    gradient = more.to(device) if gradient is None else gradient + more.to(device)
                if gradient is None:
                    continue
                dtype, place = self._dtype_of(slot), places[slot]
                elements = flat(laid_out(gradient, slot, dtype))
                missing = size * (place.stop - place.start) - len(elements)
                rows[dtype][:, place].copy_(torch.nn.functional.pad(elements, (0, missing)).view(size, -1))
            for one in rows.values():
                one /= self._node.world
        given.landing = packed = _Packed(rows, self._lanes.mark(), Job())
        nbytes = sum(one.nbytes for one in rows.values())
        given.transfer = LateTransfer(Lane.OFFLOAD, nbytes, packed.left)
        return nbytes

    def let_go(self, given: Round) -> None:
        """The rows."""
        given.landing.rows.clear()

    def land(self, given: Round) -> None:
        """Others need nothing of this rank but that it comes."""

    def exchange(self, given: Round, gives: torch.Tensor) -> None:
        """The devices add up, and this rank's row of the sums leaves; nothing does where nobody gives anything."""
        packed: _Packed = given.landing
        copies: list[Copy] = []
        begin, done = 0, packed.full
        for dtype, rows in packed.rows.items() if gives.any() else ():
            moved = self._lanes.together(
                CollectiveLane.REDUCE, self._reduction(rows, given.block.name), rows.nbytes, done
            )
            self._meter.arrived(moved, given.block.name)
            own = rows[self._node.rank]
            packed.sums[dtype] = given.given(self._node.rank, begin, len(own), dtype)
            copies.append((packed.sums[dtype], own))
            begin, done = begin + aligned(own.nbytes), moved.done
        if given.before is not None:
            given.before.exception()  # only then its sums are not read any more from where these go
        transfer = self._lanes.copy(Lane.OFFLOAD, copies, done)
        self._meter.offloaded(transfer, given.block.name)
        packed.landed = transfer.done
        packed.left.set_result(Transfer(transfer.lane, (), transfer.nbytes, transfer.begun, transfer.done))

    def collect(self, given: Round) -> None:
        """The row has left."""
        if given.landing.landed is not None:
            given.landing.landed.synchronize()

    def of(self, given: Round, gives: torch.Tensor, index: int, _begin: torch.Tensor | None) -> torch.Tensor | None:
        """As it came to the host."""
        if not gives[:, index].any():
            return None
        slot = given.slots[index]
        begin, part = self._lay_out(given.slots)[0][slot].start, self.part(slot.home.numel())
        sums: torch.Tensor = given.landing.sums[self._dtype_of(slot)]
        return sums[begin : begin + part.stop - part.start]

    def fail(self, given: Round, error: BaseException) -> None:
        """Who waits for the transfer is told."""
        if not given.landing.left.done():
            given.landing.left.set_exception(error)

    def _reduction(self, rows: torch.Tensor, name: str) -> Callable[[], None]:
        return lambda: self._group.reduce(rows, f"its gradients of {name!r}")

    def _lay_out(self, slots: Sequence[Slot]) -> tuple[dict[Slot, slice], dict[torch.dtype, int]]:
        """Where each parameter's part lies in a row, and how long the row of each dtype is."""
        places, lengths = {}, dict.fromkeys(map(self._dtype_of, slots), 0)
        for slot in slots:
            dtype = self._dtype_of(slot)
            begin, length = lengths[dtype], -(-slot.home.numel() // self._node.size)
            places[slot], lengths[dtype] = slice(begin, begin + length), begin + length
        return places, lengths
