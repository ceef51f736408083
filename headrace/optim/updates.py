"""Where and when does a step update parameters? At once or beside passes, on the host or on their accelerator."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.optim.devices import DeviceShare, HostMirror, Member
from headrace.optim.early import EarlyUpdates
from headrace.optim.elements import ElementUpdates
from headrace.optim.interruption import Interruption
from headrace.optim.local_shards import LocalShards
from headrace.optim.not_finite import NotFiniteSteps
from headrace.optim.on_device import DeviceUpdates, device_bytes
from headrace.optim.options import Options
from headrace.optim.overlap import Updater, by_unit
from headrace.optim.ownership import Ownership
from headrace.optim.rules import MatrixRule
from headrace.optim.states import ParamStates
from headrace.optim.whole import update_whole
from headrace.runtime.capture import before_write, will_write
from headrace.runtime.device import is_accelerator
from headrace.runtime.pending import Manager, Pending, Unit, unit_of


class Updates:
    """The updates of one optimizer."""

    def __init__(
        self, options: Options, states: ParamStates, local_shards: LocalShards, not_finite: NotFiniteSteps
    ) -> None:
        self._options = options
        self._states = states
        self._local_shards = local_shards
        self._not_finite = not_finite
        self._elements = ElementUpdates(states, not_finite, always_counts=options.state_dtype != torch.float32)
        self._on_device: dict[object, DeviceUpdates] = {}  # by what lends memory: see `_lender_of`
        self.updater = Updater()
        self.interruption = Interruption()
        self.early: EarlyUpdates | None = None
        self.reset()

    def reset(self) -> None:
        """Called when another state is loaded: where state lives is decided anew."""
        self._device_share = DeviceShare()
        self._mirrors: dict[torch.device, HostMirror] = {}

    @property
    def overlaps(self) -> bool:
        """Whether updates of an offloaded model's parameters run beside passes over it."""
        return self._options.overlap != "none"

    def held_bytes(self) -> int:
        """The bytes of host memory that copies of weights and gradients take."""
        return sum(mirror.held_bytes() for mirror in self._mirrors.values())

    def perform(
        self, members: list[Member], scale: float, owners: Ownership, parameters: Iterable[torch.Tensor]
    ) -> None:
        """Updates `members`, or begins to. `scale` multiplies gradients; `parameters`: all of the optimizer."""
        mine = [one for one in parameters if not owners.is_elsewhere(one)] if self._options.device_fraction else []
        if not self.overlaps:
            self._perform_alike(members, scale, owners, mine)
            return
        with self.interruption.guard_partial_step(members, self.updater.drain):
            units, alone = by_unit(members)
            under_way = [(self.submit(unit, travelling, scale, owners), travelling) for unit, travelling in units]
            for pending, travelling in under_way:
                if any(member.shared for member in travelling):
                    pending.settle()
            if alone:
                self._perform_alike(alone, scale, owners, mine)

    def _perform_alike(
        self, members: list[Member], scale: float, owners: Ownership, mine: Sequence[torch.Tensor]
    ) -> None:
        """Updates all members now, each on the rank that owns it. A collective if ranks share the parameters."""
        if owners.shares:
            before_write([member.parameter for member in members])
        owners.update(members, lambda batch: self._perform_now(batch, scale, mine))
        if owners.shares:
            self._mark_written(members)

    def submit(
        self,
        unit: Unit,
        members: Sequence[Member],
        scale: float,
        owners: Ownership,
        arrived: Callable[[], None] | None = None,
    ) -> Pending:
        """Begins to update parameters of a unit, with the current settings of their groups."""
        will_write([member.parameter for member in members])
        self._mark_written(members)

        def perform(batch: Sequence[Member]) -> None:
            before_write([member.parameter for member in batch])
            with self.interruption.guard_partial_step(batch):
                owners.perform_own(lambda mine: self._apply(mine, scale), batch)
            if self.early is not None:
                self.early.performed(member.parameter for member in batch)

        return self.updater.submit(unit, members, perform, arrived, owners.begin_update(unit))

    def _perform_now(self, members: list[Member], scale: float, mine: Sequence[torch.Tensor]) -> None:
        before_write([member.parameter for member in members])
        with self.interruption.guard_partial_step(members):
            for device in dict.fromkeys(member.parameter.device for member in members):
                present = [member for member in members if member.parameter.device == device]
                if device.type == "cpu" or self._options.update == "device":
                    self._apply(present, scale)
                else:
                    self._perform_beside(device, present, scale, mine)
                self._mark_written(present)

    def _perform_beside(
        self, device: torch.device, members: list[Member], scale: float, mine: Sequence[torch.Tensor]
    ) -> None:
        """Updates parameters on an accelerator: updates there run beside the transfers for updates on the host."""
        on_host, on_device = members, list[Member]()
        if self._options.device_fraction:
            moments = max(len(member.rule.elementwise) for member in members)
            self._device_share.assign(
                [parameter for parameter in mine if parameter.device == device],
                self._options.device_fraction,
                moments * self._options.moment_dtype.itemsize + torch.float32.itemsize,
            )
            on_host, on_device = self._device_share.divide(members)
        if on_device:
            self._apply(on_device, scale)
        if on_host:
            if device not in self._mirrors:
                self._mirrors[device] = HostMirror(device, pin=self._options.pin, overlap=self._options.overlap_d2h_h2d)
            self._mirrors[device].update(on_host, lambda batch: self._apply(batch, scale))

    def reserve_device_memory(self, parameters: Mapping[torch.Tensor, bool]) -> None:
        """Gets device memory for updates there: at construction, and when a step begins. Raises BudgetError.

        `parameters`: all of the optimizer, and whether a rule needs each as a whole.
        """
        by_lender: dict[Any, dict[torch.Tensor, bool]] = {}
        for parameter, whole in parameters.items():
            if (lender := _lender_of(parameter)) is not None:
                by_lender.setdefault(lender, {})[parameter] = whole
        self._on_device = {lender: known for lender, known in self._on_device.items() if lender in by_lender}
        for lender, theirs in by_lender.items():
            nbytes = device_bytes(theirs)
            if lender in self._on_device and self._on_device[lender].memory.untyped_storage().nbytes() < nbytes:
                self.updater.drain()  # updates under way use the memory,
                del self._on_device[lender]  # which is lent again
            if lender not in self._on_device:
                self._on_device[lender] = DeviceUpdates(_lent(next(iter(theirs)), nbytes))

    @property
    def has_device_memory(self) -> bool:
        """Whether the memory that was lent for updates on the device is still there: a lender may take it back."""
        return all(known.memory.untyped_storage().nbytes() for known in self._on_device.values())

    def check_device(self) -> None:
        """Called when a step begins. Raises ValueError if an accelerator is to update, and none computes the model."""
        if self._options.update == "device" and not self._on_device:
            raise ValueError(
                'update="device" updates on the accelerator where the model computes; all parameters are on the CPU,'
                ' and of no model that was offloaded to an accelerator: leave update at "host"'
            )

    def _apply(self, members: Sequence[Member], scale: float) -> None:
        """Updates the weights of `members`, in the memory where they are or by the device that is to update them.

        They are all on the host, or all on one device. `scale` multiplies their gradients.
        """
        by_device: dict[DeviceUpdates | None, list[Member]] = {}
        for member in members:
            device = self._on_device.get(_lender_of(member.parameter)) if self._on_device else None
            by_device.setdefault(device, []).append(member)
        for device, present in by_device.items():
            whole = [member for member in present if isinstance(member.rule, MatrixRule)]
            by_element = [member for member in present if not isinstance(member.rule, MatrixRule)]
            if by_element:
                self._elements.perform(by_element, scale, in_place=not self.overlaps, device=device)
            update_whole(whole, scale, self._states, self._not_finite, device)

    def _mark_written(self, members: Sequence[Member]) -> None:
        written = [member.parameter for member in members]
        torch.autograd.graph.increment_version([*written, *self._local_shards.dtensors_of(written)])
        for member in members:
            member.master.written()


def _lender_of(parameter: torch.Tensor) -> "torch.device | weakref.ref[Manager] | None":
    """What lends device memory for a parameter's update: its accelerator, or its model; None: no accelerator has it."""
    unit = unit_of(parameter)
    if unit is not None:
        return weakref.ref(unit.manager) if is_accelerator(unit.device) else None
    return parameter.device if is_accelerator(parameter.device) else None


def _lent(parameter: torch.Tensor, nbytes: int) -> torch.Tensor:
    unit = unit_of(parameter)
    if unit is not None:
        return unit.manager.lend_device_memory(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8, device=parameter.device)
