"""Where are a parameter's state and exact value? In host memory, on its device, or on disk; shown as if in one place.

How state on disk takes part in steps is in `disk_state.py`. When somebody asks for the state, it is lent: shown as
memory that is read from disk when touched. Tensors that were put in its place meanwhile go to disk with the next step.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from headrace.memory.arena import Arena, aligned
from headrace.memory.disk import TensorAtRest
from headrace.memory.ledger import Ledger
from headrace.optim import eight_bit
from headrace.optim.disk_state import DiskState
from headrace.optim.options import Options
from headrace.optim.rules import ElementRule, MatrixRule
from headrace.optim.weights import FULL, REMAINDER, MasterWeight

LEAST_BYTES = 1 << 14  # smaller tensors stay in memory: of a matrix rule's state, and of any that sleeps


class ParamStates:
    """The states of one optimizer's parameters, wherever they rest, and the masters of their weights."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.disk = DiskState(options.disk) if options.tier == "disk" else None
        self.entries: defaultdict[torch.Tensor, Any] = defaultdict(dict)  # as in torch.optim: the state in memory
        self.masters: dict[torch.Tensor, MasterWeight] = {}
        self._asleep: DiskState | None = None  # the states that are on disk while their model sleeps
        self._ledger = Ledger()
        self._may_lock = True  # until the system refuses to page-lock memory
        self._lent: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # the state on disk that `entries` shows
        self._shapes: dict[torch.Tensor, dict[str, torch.Size]] = {}  # of tensors on disk, if not the parameter's

    def reset(self) -> None:
        """Called when another state is loaded: forgets masters, and drops what is on disk."""
        self.masters.clear()
        self._lent.clear()
        self._shapes.clear()
        self._asleep = None
        if self.disk is not None:
            self.disk = self.disk.emptied()

    def master_of(self, parameter: torch.Tensor, given: torch.Tensor) -> MasterWeight:
        """The exact value of a parameter, for a step or a look at it; `given`: the parameter as the user has it."""
        master = self.masters.get(parameter)
        if master is not None and not master.layout_unchanged:
            self._follow(master)
            master = None
        if master is None:
            master = self.masters[parameter] = self._new_master(parameter, given)
        master.check_version()
        return master

    def _new_master(self, parameter: torch.Tensor, given: torch.Tensor) -> MasterWeight:
        eight_bits = self._options.state_dtype == "8bit"
        on_host = self._options.update == "device"
        return MasterWeight(parameter, given, self._options.master_form, eight_bits=eight_bits, state_on_host=on_host)

    def _follow(self, before: MasterWeight) -> None:
        """Has the state follow a parameter that was given another dtype, device or layout, as `model.to()` does."""
        parameter = before.parameter
        before.check_layout(keeps_order=self.disk is not None)
        self.wake()  # what sleeps lies in the order that the parameter had
        if self.disk is not None:
            self._lend(self.disk, before)
        del self.masters[parameter]
        state = self.entries[parameter]
        if before.dtype != parameter.dtype:
            for name in (REMAINDER, FULL):
                state.pop(name, None)
        # Copies: state that is lent rests on disk in the form that the parameter had.
        state.update({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)})

    def begin(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The part of a parameter's state in memory. If somebody removed its entry, its state on disk is dropped."""
        if parameter not in self.entries and self.disk is not None and parameter not in self._lent:
            for key in self._keys(parameter):
                self.disk.forget(key)
            self._shapes.pop(parameter, None)
        entries: dict[str, Any] = self.entries[parameter]
        return entries

    def drop(self, parameter: torch.Tensor) -> None:
        """Drops the state of a parameter: another rank keeps it from now on."""
        self._lent.pop(parameter, None)
        self.masters.pop(parameter, None)
        if self.entries.pop(parameter, None) is not None:
            self.begin(parameter)  # drops what is on disk

    # of which tensors a state consists -------------------------------------------------------------------------------
    def dtypes(self, rule: ElementRule, master: MasterWeight) -> dict[str, torch.dtype]:
        """The dtypes of the tensors of state that a parameter needs, by name: moments, maximum, master."""
        own_dtype = torch.float64 if master.dtype == torch.float64 else torch.float32
        moments = self._options.moment_dtype if own_dtype == torch.float32 else own_dtype
        if moments == torch.uint8 and not master.uses_8bit:
            moments = own_dtype
        suffix = eight_bit.SUFFIX if master.uses_8bit else ""
        maximum = {} if rule.maximum is None else {rule.maximum: own_dtype}
        return {name + suffix: moments for name in rule.moments} | maximum | master.master_dtypes

    def in_locked_memory(self, state: dict[str, Any], names: Iterable[str], device: torch.device) -> None:
        """Has these tensors of a state lie in memory that is page-locked for a device which updates them."""
        values = {name: state[name] for name in names if self._may_lock}
        values = {name: value for name, value in values.items() if value.numel() and not value.is_pinned()}
        if not values:
            return
        arena = Arena(sum(aligned(value.nbytes) for value in values.values()), device, self._ledger, "optimizer")
        self._may_lock = arena.pinned
        offset = 0
        for name, value in values.items():
            memory = arena.tensor(offset, value.nbytes, value.dtype)
            state[name] = memory.as_strided(value.shape, value.stride()).copy_(value)
            offset += aligned(value.nbytes)

    def normalize(self, state: dict[str, Any], rule: ElementRule, master: MasterWeight) -> None:
        """Brings moments that were loaded or set by somebody into the form that is kept: 8 bits or not."""
        eight_bit.convert(state, rule.moments, master.host, narrow=master.uses_8bit)

    def bytes_when_awake(self, rule: ElementRule | MatrixRule, parameter: torch.Tensor, given: torch.Tensor) -> int:
        """The bytes of host memory that a parameter's state takes while it is awake, or will take from its first step
        on. `given`: the parameter as the user has it.
        """
        if self.disk is not None:
            return 0
        nbytes = self.bytes_awake_now(parameter)
        if self._asleep is not None:
            for key in self._keys(parameter):
                nbytes += sum(one.like.nbytes for one in self._asleep.at_rest(key, key[1]).values())
        if nbytes or not parameter.requires_grad:
            return nbytes
        master = self._new_master(parameter, given)
        if isinstance(rule, MatrixRule):
            nbytes, dtypes = rule.state_elements(parameter.shape) * torch.float32.itemsize, master.master_dtypes
        else:
            dtypes = self.dtypes(rule, master)
        return nbytes + sum(eight_bit.nbytes(parameter.numel(), dtype) for dtype in dtypes.values())

    def bytes_awake_now(self, parameter: torch.Tensor) -> int:
        """The bytes of host memory that a parameter's state takes now, without its number of steps."""
        state = self.entries.get(parameter, {}) if self.disk is None else {}
        return sum(value.nbytes for name, value in state.items() if isinstance(value, torch.Tensor) and name != "step")

    # asleep -----------------------------------------------------------------------------------------------------------
    @property
    def sleeps(self) -> bool:
        """Whether states are on disk until `wake`."""
        return self._asleep is not None

    def sleep(self, directory: str | os.PathLike[str], masters: Iterable[MasterWeight]) -> None:
        """Moves the states of these weights from host memory to a file in `directory`, until `wake`.

        Raises DiskError if the drive has no room, and has moved nothing then.
        """
        if self.disk is not None:
            self.disk.let_go()
            return
        disk = self._asleep = self._asleep or DiskState(directory)
        moving = {master: _movable(self.entries[master.parameter], master) for master in masters}
        try:
            for master, tensors in moving.items():
                self._keep(disk, master, tensors)
            disk.synchronize()
        except BaseException:
            for master, tensors in moving.items():
                for key in self._keys(master.parameter):
                    disk.drop(key, tensors)
            disk.let_go()
            raise
        for master, tensors in moving.items():
            for name in tensors:
                del self.entries[master.parameter][name]
        disk.let_go()

    def wake(self) -> None:
        """Moves them back. Raises DiskError: what did not come is still on disk then, and comes with another call."""
        disk = self._asleep
        if disk is None:
            return
        try:
            for parameter, master in self.masters.items():
                if parameter not in self.entries:  # somebody removed its entry
                    continue
                state = self.entries[parameter]
                for key in self._keys(parameter):
                    if disk.holds(key):
                        found = self._shaped(master, disk.fetch(key, key[1]))
                        state.update({name: value for name, value in found.items() if name not in state})
                        disk.forget(key)
        finally:
            disk.let_go()
        self._asleep = None

    # on disk ----------------------------------------------------------------------------------------------------------
    def _keys(self, parameter: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """The keys of a parameter's tensors in `disk`: one for all tensors that have the same number of elements."""
        others = (shape.numel() for shape in self._shapes.get(parameter, {}).values())
        return [(parameter, elements) for elements in dict.fromkeys([parameter.numel(), *others])]

    def to_disk(
        self, disk: DiskState, rule: ElementRule | MatrixRule, master: MasterWeight, state: dict[str, Any]
    ) -> None:
        """Moves state that was lent, loaded or set by somebody to disk, except a master of the other form.

        What somebody removed from `state` is dropped on disk, too.
        """
        parameter = master.parameter
        master.forget_masters(state)
        lent = self._lent.get(parameter, {})
        for key in self._keys(parameter) if lent else ():
            disk.take_back(key)
            disk.drop(key, [name for name, value in lent.items() if state.get(name) is not value])
        self._lent.pop(parameter, None)  # not before: if the drive fails in `take_back`, the next step tries again
        if isinstance(rule, MatrixRule):
            tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
            present = {name: value.dtype for name, value in tensors.items() if value.nbytes >= LEAST_BYTES}
        else:
            self.normalize(state, rule, master)
            present = {name: dtype for name, dtype in self.dtypes(rule, master).items() if name in state}
        if any(state[name] is not lent.get(name) for name in present):
            self._keep(disk, master, {name: state[name].to(dtype) for name, dtype in present.items()})
        for name in present:
            del state[name]

    def to_rest(self, rule: ElementRule | MatrixRule, master: MasterWeight) -> None:
        """Moves loaded state of a parameter to disk, if that is where it rests."""
        if self.disk is not None and master.state_device.type == "cpu":
            self.to_disk(self.disk, rule, master, self.entries[master.parameter])

    def _keep(self, disk: DiskState, master: MasterWeight, tensors: Mapping[str, torch.Tensor]) -> None:
        for key in self._keys(master.parameter):
            disk.drop(key, tensors)  # they may have had another shape before
        shapes = self._shapes.setdefault(master.parameter, {})
        by_elements: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            adopted = master.adopt(value, value.dtype)
            if adopted is None:  # of another shape, such as a factor of a matrix
                shapes[name] = value.shape
                by_elements.setdefault(value.numel(), {})[name] = value.contiguous().view(-1)
            else:
                shapes.pop(name, None)
                by_elements.setdefault(master.parameter.numel(), {})[name] = master.flat(adopted)
        for elements, flat in by_elements.items():
            disk.keep((master.parameter, elements), elements, flat)

    def fetch(self, disk: DiskState, rule: MatrixRule, master: MasterWeight, state: dict[str, Any]) -> None:
        """Copies all of a parameter's state into `state`, in host memory, until `to_disk` moves it back."""
        self.to_disk(disk, rule, master, state)
        for key in self._keys(master.parameter):
            state |= self._shaped(master, disk.fetch(key, key[1]))

    def _shaped(self, master: MasterWeight, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shapes = self._shapes.get(master.parameter, {})
        return {name: master.shaped(flat, shapes.get(name)) for name, flat in tensors.items()}

    def _lend(self, disk: DiskState, master: MasterWeight) -> None:
        if master.parameter in self._lent:
            return
        lent: dict[str, torch.Tensor] = {}
        for key in self._keys(master.parameter):
            lent |= self._shaped(master, disk.lend(key, key[1]))
        if lent:
            self._lent[master.parameter] = lent
            self.entries[master.parameter].update(lent)

    def show(self) -> None:
        """Makes `entries` show the whole state."""
        if self.disk is None:
            return
        for master in list(self.masters.values()):
            if master.layout_unchanged:
                self._lend(self.disk, master)
            else:
                self._follow(master)

    def at_rest(self, parameter: torch.Tensor) -> dict[str, TensorAtRest]:
        """The part of a parameter's state that is on disk and not lent, to be read when it is wanted."""
        master = self.masters.get(parameter)
        if master is not None and not master.layout_unchanged:
            self._follow(master)
        if self.disk is None or master is None or parameter in self._lent:
            return {}
        tensors: dict[str, TensorAtRest] = {}
        for key in self._keys(parameter):
            tensors |= self.disk.at_rest(key, key[1])
        shaped = self._shaped(master, {name: one.like for name, one in tensors.items()})
        return {name: replace(one, like=shaped[name]) for name, one in tensors.items()}

    def fill(self, rule: ElementRule | MatrixRule, master: MasterWeight, tensors: Mapping[str, TensorAtRest]) -> None:
        """Makes these tensors, which are in files, a parameter's state; if all fit as they are, from file to file."""
        parameter = master.parameter
        disk = None if master.state_device.type != "cpu" else self.disk
        if disk is not None and isinstance(rule, ElementRule):
            kept = self.dtypes(rule, master)
            if all(one.like.dtype == kept.get(name) and master.is_shaped(one.like) for name, one in tensors.items()):
                self.entries.setdefault(parameter, {})
                disk.fill((parameter, parameter.numel()), parameter.numel(), tensors)
                return
        self.entries[parameter].update({name: one.load() for name, one in tensors.items()})
        self.to_rest(rule, master)

    def take_apart(self, state: Mapping[Any, Any]) -> None:
        """Copies into memory each tensor in `state` that is lent as the state of another parameter."""
        owners = {_memory(value): parameter for parameter, lent in self._lent.items() for value in lent.values()}
        for parameter, entries in list(state.items()) if owners else ():
            for name, value in list(entries.items()):
                if isinstance(value, torch.Tensor) and owners.get(_memory(value), parameter) is not parameter:
                    entries[name] = value.clone()

    def held_bytes(self) -> int:
        """The bytes of host memory that states and masters take. State on disk that is shown takes none."""
        on_disk = {id(value) for lent in self._lent.values() for value in lent.values()}
        values = (value for entries in self.entries.values() for value in entries.values() if id(value) not in on_disk)
        held = sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.device.type == "cpu")
        return held + (0 if self.disk is None else self.disk.host_bytes)


def _movable(state: Mapping[str, Any], master: MasterWeight) -> dict[str, torch.Tensor]:
    """The tensors of a state in host memory that are worth moving to disk, in a form that can be brought back."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.nbytes >= LEAST_BYTES
        if value.dtype != torch.uint8 or eight_bit.is_record(value, master.host.numel())
    }


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
