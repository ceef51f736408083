"""How are parameters on an accelerator updated in host memory? Gradients come to the host, updated weights go back.

Each such parameter has a twin in page-locked host memory, in the parameter's own dtype, which the update writes.
Batches of parameters pass through three stages: while one batch is updated, gradients of later ones arrive and weights
of earlier ones leave. Order comes from events alone; the host waits for arrivals, never for departures.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from headrace.memory.arena import Arena, aligned
from headrace.memory.ledger import Ledger
from headrace.optim.options import Pin
from headrace.optim.weights import MasterWeight
from headrace.runtime.device import free_device_bytes
from headrace.runtime.lanes import Lane, Lanes, Transfer, open_lanes
from headrace.runtime.threads import keeps_interrupts, wait_asleep

_RESERVE = 0.1  # the share of free device memory that "auto" leaves
_BATCH_BYTES = 32 * 2**20  # of gradients: long enough for the link, short enough to overlap


@dataclasses.dataclass(kw_only=True)
class Member:
    """One parameter that takes part in a step, and where its update happens."""

    index: int
    parameter: torch.Tensor
    rule: Any  # the ElementRule or MatrixRule of its group, with the settings of this step
    step: int  # the number of this step among all steps of the optimizer
    master: MasterWeight
    state: dict[str, Any]
    gradient: torch.Tensor  # in the memory where the weights are, when its batch is performed
    shared: bool = False  # whether somebody else holds the gradient, and may write it once step() has returned
    begun: bool = False  # whether this step may have written to the parameter
    updated: bool = False  # whether its update has been performed

    def begins(self) -> None:
        """Called right before the update writes: from now on, the parameter may be half written."""
        self.begun = True


class DeviceShare:
    """Which parameters on accelerators keep their state and are updated there: the last ones, each as a whole."""

    def __init__(self) -> None:
        self._stays: dict[torch.Tensor, bool] = {}

    def assign(self, parameters: Sequence[torch.Tensor], device_fraction: float | str, state_bytes: int) -> None:
        """Decides for the new parameters among these, which are all on one device. `state_bytes`: per element.

        The fraction "auto" means as much as fits on the device.
        """
        new = [parameter for parameter in parameters if parameter not in self._stays]
        if not new:
            return
        if isinstance(device_fraction, str):
            device_fraction = _fraction_that_fits(parameters, state_bytes)
        on_host = round((1 - device_fraction) * sum(parameter.numel() for parameter in new))
        for parameter in new:
            self._stays[parameter] = parameter.numel() > 0 and 2 * max(0, on_host) <= parameter.numel()
            on_host -= parameter.numel()

    def divide(self, members: Sequence[Member]) -> tuple[list[Member], list[Member]]:
        """The members that are updated on the host, and those that are updated on the device."""
        on_host = [member for member in members if not self._stays[member.parameter]]
        return on_host, [member for member in members if self._stays[member.parameter]]


def _fraction_that_fits(parameters: Sequence[torch.Tensor], state_bytes: int) -> float:
    """The share of the state for which the accelerator has memory to spare.

    As much memory as passes took at their peak stays free for the next ones.
    """
    device = parameters[0].device
    passing = torch.accelerator.max_memory_allocated(device) - torch.accelerator.memory_allocated(device)
    spare = (free_device_bytes(device) - passing) * (1 - _RESERVE)
    wanted = state_bytes * sum(parameter.numel() for parameter in parameters)
    return min(1.0, max(0.0, spare / max(1, wanted)))


class HostMirror:
    """Host memory for the parameters of one accelerator: twins of their weights, and their gradients.

    `pin`: whether both are page-locked, or which of them. `overlap`: batches travel while others are updated, instead
    of one after the other.
    """

    def __init__(self, device: torch.device, *, pin: Pin, overlap: bool) -> None:
        self._pin = pin
        self._overlap = overlap
        self._lanes: Lanes = open_lanes(device)
        self._device = device
        self._ledger = Ledger()
        self._twins: dict[torch.Tensor, torch.Tensor] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._leaving: list[Transfer] = []
        weakref.finalize(self, keeps_interrupts(_close), self._lanes, self._leaving)

    def update(self, members: Sequence[Member], perform: Callable[[Sequence[Member]], None]) -> None:
        """Brings gradients of `members` to the host, calls `perform` on batches of them, and sends the weights back."""
        _wait(self._leaving)  # copies of the last step may still read the twins
        begin = self._lanes.mark()
        sources = [member.gradient for member in members]
        self._make_room(members)
        fetched = [member for member in members if member.master.changed]
        if fetched:
            copies = [(self._twins[member.parameter], member.parameter.detach()) for member in fetched]
            wait_asleep(self._lanes.copy(Lane.OFFLOAD, copies, begin).done)
        batches = list(_batches(list(zip(members, sources, strict=True))))
        arriving: Iterator[Transfer] = (
            self._lanes.copy(Lane.OFFLOAD, [(member.gradient, source.detach()) for member, source in batch], begin)
            for batch in batches
        )
        if self._overlap:
            arriving = iter(list(arriving))  # submits all at once
        for batch, transfer in zip(batches, arriving, strict=True):
            wait_asleep(transfer.done)
            perform([member for member, _ in batch])
            copies = [(member.parameter.detach(), member.master.host) for member, _ in batch]
            self._leaving.append(self._lanes.copy(Lane.ONLOAD, copies, begin))
            if not self._overlap:
                _wait(self._leaving)
        for transfer in self._leaving:
            self._lanes.wait(transfer.done)
        # Later work on the device comes after these copies, so nobody has to keep their memory alive.
        self._leaving[:] = [dataclasses.replace(transfer, copies=()) for transfer in self._leaving]

    def held_bytes(self) -> int:
        """The bytes of host memory that this holds."""
        return sum(tensor.nbytes for held in (self._twins, self._gradients) for tensor in held.values())

    def _make_room(self, members: Sequence[Member]) -> None:
        """Gives members host memory for weights and gradients; new weights get one arena, new gradients another."""
        weights = {member.parameter: member.parameter for member in members}
        gradients = {member.parameter: member.gradient for member in members}
        self._add_like(self._twins, weights, pinned=self._pin in (True, "weights"))
        self._add_like(self._gradients, gradients, pinned=self._pin in (True, "gradients"))
        for member in members:
            member.master.host = self._twins[member.parameter]
            member.gradient = self._gradients[member.parameter]

    def _add_like(
        self, held: dict[torch.Tensor, torch.Tensor], wanted: Mapping[torch.Tensor, torch.Tensor], *, pinned: bool
    ) -> None:
        new = {
            parameter: like
            for parameter, like in wanted.items()
            if (old := held.get(parameter)) is None or (old.dtype, old.shape) != (like.dtype, like.shape)
        }
        held |= zip(new, self._carve(list(new.values()), pinned=pinned), strict=True)

    def _carve(self, tensors: Sequence[torch.Tensor], *, pinned: bool) -> Iterable[torch.Tensor]:
        if not tensors:
            return
        where = self._device if pinned else torch.device("cpu")
        arena = Arena(
            sum(aligned(tensor.nbytes) for tensor in tensors), where, self._ledger, "optimizer", computed=True
        )
        offset = 0
        for tensor in tensors:
            strides = torch.empty_like(tensor, device="meta").stride()
            flat = arena.tensor(offset, tensor.numel() * tensor.itemsize).view(tensor.dtype)
            yield flat.as_strided(tensor.shape, strides)
            offset += aligned(tensor.nbytes)


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        wait_asleep(transfer.done)
    transfers.clear()


def _close(lanes: Lanes, leaving: list[Transfer]) -> None:
    """Waits for the copies before the lanes close: page-locked memory may go only when no copy reads it any more."""
    _wait(leaving)
    lanes.close(wait=False)


def _batches(members: list[tuple[Member, torch.Tensor]]) -> Iterable[list[tuple[Member, torch.Tensor]]]:
    batch: list[tuple[Member, torch.Tensor]] = []
    nbytes = 0
    for member in members:
        batch.append(member)
        nbytes += member[1].nbytes
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
