"""How are gradients of the ranks of a node added up? Round by round, on the host or by collectives of devices.

On the host, each rank gives all of its gradients, and adds up its part of those of all ranks: in the order of the
ranks, each divided by their number, as one process does that takes their batches one after the other. Devices pack the
gradients of a block into rows, one for each rank, with an equal part of each parameter; a collective gives each device
the sum of its row, which alone leaves for the host. In rows, a parameter that a rank has not used counts as zeros.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from headrace.memory.arena import aligned
from headrace.memory.shared import SharedArena
from headrace.runtime.device_group import DeviceGroup
from headrace.runtime.lanes import CollectiveLane, Copy, Event, Lane, Transfer
from headrace.runtime.node import Node
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.block import Block
from headrace.weights.movement.flow import GradientFlow
from headrace.weights.movement.host_gradients import elements_of, offsets_of


@dataclass(eq=False)
class Round:
    """One averaging of one block's gradients, to which all ranks give theirs.

    `half`: memory for these gradients that all ranks of the node see, of which each rank has `region_bytes`.
    """

    block: Block
    number: int
    half: SharedArena
    region_bytes: int
    params: list[ManagedParam]
    says: list[int]  # what this rank says of each parameter
    from_host: dict[ManagedParam, torch.Tensor]  # gradients on the host, added to those from the device
    before: "Future[list[ManagedParam]] | None"  # the job that summed up the last round in `half`
    heard: torch.Tensor = field(init=False)  # what all ranks say, once they have met: shape (ranks, parameters)
    left: Event | None = None  # when copies off the device end; None: there are none, or none yet
    landing: Any = None  # what `Sums` notes of the round between its calls
    rows: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)  # packed on the device until they have left

    def said(self, rank: int) -> torch.Tensor:
        """Where `rank` says what it has of each parameter."""
        return self.half.tensor(rank * self.region_bytes, len(self.params))

    def given(self, rank: int, begin: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The memory of `count` elements that `rank` gives, from byte `begin` of its gradients on."""
        first = rank * self.region_bytes + aligned(len(self.params)) + begin
        return self.half.tensor(first, count * dtype.itemsize, dtype)


class Sums(ABC):
    """Adds up what ranks give, for `AveragedGradients`. It is called on three threads: backward's begins rounds; the
    meeting thread waits for the other ranks, round after round; the summing thread adds up what has come to the host,
    so that no meeting waits for sums.
    """

    on_host: ClassVar[bool]  # whether each rank reads what all ranks give, and adds it up itself, rank by rank
    in_flight: ClassVar[int]  # the most rounds whose gradients leave the device at once

    def __init__(self, node: Node, gradients: GradientFlow) -> None:
        """To be made by all ranks."""
        self._node, self._dtype_of = node, gradients.dtype
        self._lanes, self._meter = gradients.lanes, gradients.meter

    @abstractmethod
    def close(self) -> None:
        """Called when no round follows on this rank: ends what the sums have made."""

    @abstractmethod
    def part(self, count: int) -> slice:
        """Which of a parameter's elements this rank adds up."""

    @abstractmethod
    def given_bytes(self, params: Sequence[ManagedParam]) -> int:
        """The most bytes that a rank gives for a block."""

    @abstractmethod
    def give(self, given: Round, gradients: dict[ManagedParam, torch.Tensor]) -> Transfer | None:
        """On backward's thread: begins a round with this rank's gradients. Returns their transfer off the device; None
        where there is none, or where `exchange` returns it.
        """

    @abstractmethod
    def land(self, given: Round) -> None:
        """On the meeting thread: waits until everything is there that other ranks read of this one."""

    @abstractmethod
    def exchange(self, given: Round, gives: torch.Tensor) -> Transfer | None:
        """On the meeting thread, when all ranks have come to the round: returns the transfer, unless `give` did.

        `gives`: which rank gives which gradient, shape (ranks, parameters).
        """

    @abstractmethod
    def average(self, given: Round, gives: torch.Tensor, index: int, begin: torch.Tensor | None) -> torch.Tensor | None:
        """On the summing thread: the average of this rank's part of a parameter, which the caller may change; None
        where no rank gives a gradient. With `on_host`, the ranks' gradients are added to `begin`, one after the other.
        """

    def _given(self, param: ManagedParam) -> torch.dtype:
        """The dtype in which a gradient is given: one that rounds nothing before it is added."""
        return torch.promote_types(param.layout.dtype, self._dtype_of(param))

    def _send(self, given: Round, copies: list[Copy], after: Event) -> Transfer:
        transfer = self._lanes.copy(Lane.OFFLOAD, copies, after)
        self._meter.offloaded(transfer, given.block.name)
        given.left = transfer.done
        return transfer


class HostSums(Sums):
    """Sums on the host: each rank gives all of its gradients, and reads those of all ranks."""

    on_host, in_flight = True, 1

    def close(self) -> None:
        """Does nothing: there is nothing to end."""

    def part(self, count: int) -> slice:
        return self._node.part(count)

    def given_bytes(self, params: Sequence[ManagedParam]) -> int:
        return offsets_of(params, self._given)[-1]

    def give(self, given: Round, gradients: dict[ManagedParam, torch.Tensor]) -> Transfer | None:
        given.landing = dict(zip(given.params, offsets_of(given.params, self._given), strict=False)), set(gradients)
        if not gradients:
            return None
        copies: list[Copy] = []
        for param, gradient in gradients.items():
            place = self._place(given, self._node.rank, param)
            copies.append((place, elements_of(gradient, param, place.dtype)))
        return self._send(given, copies, self._lanes.mark())

    def land(self, given: Round) -> None:
        """Waits until this rank's gradients have left the device, and adds those that were on the host."""
        if given.left is not None:
            given.left.synchronize()
        _, transferred = given.landing
        for param, gradient in given.from_host.items():
            place = self._place(given, self._node.rank, param)
            elements = elements_of(gradient, param, gradient.dtype)
            place.add_(elements) if param in transferred else place.copy_(elements)

    def exchange(self, given: Round, gives: torch.Tensor) -> None:
        """Does nothing: each rank reads what the others have given."""

    def average(self, given: Round, gives: torch.Tensor, index: int, begin: torch.Tensor | None) -> torch.Tensor | None:
        """Adds up in the order of the ranks."""
        param, total = given.params[index], begin
        for rank in range(self._node.size):
            if gives[rank, index]:
                whole = self._place(given, rank, param)
                one = whole[self.part(len(whole))] / self._node.world
                total = one.to(self._dtype_of(param)) if total is None else total.add_(one)
        return total

    def _place(self, given: Round, rank: int, param: ManagedParam) -> torch.Tensor:
        """The memory in which `rank` gives a gradient: shape (elements,)."""
        begins, _ = given.landing
        return given.given(rank, begins[param], param.home.numel(), self._given(param))


class DeviceSums(Sums):
    """Sums of a collective of the devices: a part of the sums leaves each device."""

    on_host, in_flight = False, 2

    def __init__(self, node: Node, gradients: GradientFlow) -> None:
        super().__init__(node, gradients)
        self._group = DeviceGroup(node, self._lanes.device)

    def close(self) -> None:
        self._group.close()

    def part(self, count: int) -> slice:
        """The same parts as in rows: equal ones for the first ranks, and what is left for the last."""
        length = -(-count // self._node.size)
        return slice(min(count, length * self._node.rank), min(count, length * (self._node.rank + 1)))

    def given_bytes(self, params: Sequence[ManagedParam]) -> int:
        """The bytes of one row."""
        return sum(aligned(length * dtype.itemsize) for dtype, length in self._lay_out(params)[1].items())

    def give(self, given: Round, gradients: dict[ManagedParam, torch.Tensor]) -> None:
        """Packs gradients into rows, those from the host too, each divided by the number of ranks of all nodes."""
        size, device = self._node.size, self._lanes.device
        places, lengths = self._lay_out(given.params)
        for dtype, length in lengths.items():
            given.rows[dtype] = torch.zeros(size, length, dtype=dtype, device=device)
        with torch.no_grad():
            for param in given.params:
                gradient, more = gradients.get(param), given.from_host.get(param)
                if more is not None:
                    gradient = more.to(device) if gradient is None else gradient + more.to(device)
                if gradient is None:
                    continue
                dtype, place = self._given(param), places[param]
                elements = elements_of(gradient, param, dtype)
                missing = size * (place.stop - place.start) - len(elements)
                given.rows[dtype][:, place].copy_(torch.nn.functional.pad(elements, (0, missing)).view(size, -1))
            for one in given.rows.values():
                one /= self._node.world
        given.landing = self._lanes.mark(), {}

    def land(self, given: Round) -> None:
        """Waits for nothing, as other ranks read nothing of this one on the host."""

    def exchange(self, given: Round, gives: torch.Tensor) -> Transfer | None:
        """Lets the devices add up, and sends this rank's row of the sums to the host; nothing, if no rank gave any."""
        done, sums = given.landing
        copies: list[Copy] = []
        begin, name = 0, given.block.name
        for dtype, rows in given.rows.items() if gives.any() else ():
            reduce = partial(self._group.reduce, rows, f"its gradients of {name!r}")
            moved = self._lanes.together(CollectiveLane.REDUCE, reduce, rows.nbytes, done)
            self._meter.arrived(moved, name)
            own = rows[self._node.rank]
            sums[dtype] = given.given(self._node.rank, begin, len(own), dtype)
            copies.append((sums[dtype], own))
            begin, done = begin + aligned(own.nbytes), moved.done
        if given.before is not None:
            given.before.exception()  # waits until the last round in this half has read its sums there
        transfer = self._send(given, copies, done)
        return Transfer(transfer.lane, (), transfer.nbytes, transfer.begun, transfer.done)  # `given` keeps `rows`

    def average(self, given: Round, gives: torch.Tensor, index: int, begin: torch.Tensor | None) -> torch.Tensor | None:
        """The part of the sum that has come to the host."""
        if not gives[:, index].any():
            return None
        param = given.params[index]
        first, part = self._lay_out(given.params)[0][param].start, self.part(param.home.numel())
        sums: torch.Tensor = given.landing[1][self._given(param)]
        return sums[first : first + part.stop - part.start]

    def _lay_out(self, params: Sequence[ManagedParam]) -> tuple[dict[ManagedParam, slice], dict[torch.dtype, int]]:
        """Where each parameter's part lies in a row, and how long the row of each dtype is."""
        places, lengths = {}, dict.fromkeys(map(self._given, params), 0)
        for param in params:
            dtype = self._given(param)
            begin, length = lengths[dtype], -(-param.home.numel() // self._node.size)
            places[param], lengths[dtype] = slice(begin, begin + length), begin + length
        return places, lengths
