"""How do rules update that work element by element? Rows of all parameters at once, in one pass over memory.

A row is a run of one parameter's elements. Its columns are weight, gradient, master and moments, each of which is in
host memory, on an accelerator, or in a file and a part at a time in memory. All rows are updated in the same way.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.optim import kernel, update
from headrace.optim.devices import Member
from headrace.optim.disk_state import DiskState, Part, Wanted
from headrace.optim.in_files import Grains, Row, in_files, mark_written_in_place
from headrace.optim.kernel import Master
from headrace.optim.not_finite import NotFiniteSteps
from headrace.optim.on_device import DeviceUpdates
from headrace.optim.states import ParamStates
from headrace.optim.update import Update
from headrace.runtime.torch_rules import foreach_add

__all__ = ["ElementUpdates"]


@dataclass
class _Columns:
    """The part of a parameter's state that takes part in its update."""

    moments: tuple[str, ...]
    dtypes: dict[str, torch.dtype]  # of all columns of state, the master among them
    fresh: frozenset[str]  # the columns that begin as zeros
    state: dict[str, Any]  # if not on disk; becomes the parameter's after the update


class ElementUpdates:
    """The updates of one optimizer's parameters by rules that work element by element."""

    def __init__(self, states: ParamStates, not_finite: NotFiniteSteps, *, always_counts: bool) -> None:
        """`always_counts`: whether steps are always counted, because stochastic rounding differs from step to step."""
        self._states = states
        self._not_finite = not_finite
        self._always_counts = always_counts

    def perform(
        self, members: Sequence[Member], scale: float, *, in_place: bool, device: DeviceUpdates | None = None
    ) -> None:
        """Updates all members. `in_place`: weights on disk are updated in their files if possible. `device`: updates
        them; None: they are updated in the memory where they are.
        """
        disk = self._states.disk if members[0].master.state_device.type == "cpu" else None
        on_host = members[0].master.host.device.type == "cpu"
        in_their_files, others = in_files(members) if on_host and in_place else ([], members)
        columns = {
            id(member): self._columns_in_memory(member) if disk is None else self._columns_on_disk(member, disk)
            for member in members
        }
        if device is not None:
            if disk is not None:
                disk.lock_for(device.device)
            else:
                for found in columns.values():
                    self._states.in_locked_memory(found.state, found.dtypes, device.device)
        perform = update.perform if device is None else device.perform
        if in_their_files:  # first: a drive that fails at once has changed nothing
            with contextlib.closing(Grains(in_their_files)) as grains:
                self._perform(in_their_files, columns, disk, grains, perform, scale)
        if others:
            self._perform(others, columns, disk, None, perform, scale)
        self._count_steps([member.state for member in members if self._always_counts or member.rule.counts_steps])

    def _perform(
        self,
        members: Sequence[Member],
        every: dict[int, _Columns],
        disk: DiskState | None,
        grains: Grains | None,
        perform_all: Callable[[Sequence[Update], float], None],
        scale: float,
    ) -> None:
        columns = [every[id(member)] for member in members]
        checksums: list[int | torch.Tensor] = [0] * len(members)

        def perform(rows: Sequence[Row]) -> None:
            updates = [_update_of(members[row.index], columns[row.index], row) for row in rows]
            perform_all(updates, scale)
            for row, done in zip(rows, updates, strict=True):
                member = members[row.index]
                self._not_finite.note(member.step, done.not_finite)
                if member.master.form is Master.SPLIT:
                    whole = row.stop - row.start == member.parameter.numel()
                    checksums[row.index] = done.checksum if whole else _joined(checksums[row.index], row, done)

        if disk is not None:
            self._stream_from_disk(disk, members, columns, grains, perform)
        elif grains is not None:
            for rows in grains.all():
                for row in rows:
                    flat, part = members[row.index].master.flat, slice(row.start, row.stop)
                    state = columns[row.index].state
                    row.state = {name: flat(state[name])[part] for name in columns[row.index].dtypes}
                perform(rows)
        else:
            perform([_whole(index, member, columns[index].state) for index, member in enumerate(members)])
        if grains is not None:
            grains.finish()
        for member, column, checksum in zip(members, columns, checksums, strict=True):
            member.master.performed(checksum)
            member.updated = True
            if disk is None:
                member.state.clear()
                member.state.update(column.state)
        if grains is not None:
            mark_written_in_place(members)

    def _count_steps(self, states: Sequence[dict[str, Any]]) -> None:
        """Counts a step in each of these states."""
        for state in states:
            if not isinstance(state.get("step", None), torch.Tensor):  # missing, or a number from an old state dict
                step = float(state.get("step", 0.0))
                state["step"] = torch.tensor(step, device="cpu")
            elif state["step"].device.type != "cpu":
                state["step"] = state["step"].to("cpu")
        if states:
            foreach_add([state["step"] for state in states], 1)

    def _stream_from_disk(
        self,
        disk: DiskState,
        members: Sequence[Member],
        columns: Sequence[_Columns],
        grains: Grains | None,
        perform: Callable[[Sequence[Row]], None],
    ) -> None:
        weights = [] if grains is not None else [_whole(index, one, {}) for index, one in enumerate(members)]

        def rows_of(part: Part) -> Iterator[Row]:
            if grains is None:
                yield weights[part.index].part(part.start, part.stop, part.tensors)
                return
            for row in grains.runs(part.index, part.start, part.stop):
                elements = slice(row.start - part.start, row.stop - part.start)
                row.state = {name: tensor[elements] for name, tensor in part.tensors.items()}
                yield row

        def perform_parts(parts: list[Part]) -> None:
            perform([row for part in parts for row in rows_of(part)])
            if grains is not None:
                grains.updated()

        disk.stream(
            [
                Wanted((one.parameter, one.parameter.numel()), one.parameter.numel(), column.dtypes, column.fresh)
                for one, column in zip(members, columns, strict=True)
            ],
            perform_parts,
        )

    def _columns_in_memory(self, member: Member) -> _Columns:
        """A parameter's state in a copy of its dict, so that the dict is unchanged if the update fails."""
        state: dict[str, Any] = dict(member.state)
        rule, master = member.rule, member.master
        self._states.normalize(state, rule, master)
        dtypes, fresh = self._states.dtypes(rule, master), set()
        master.master(state)
        for name, dtype in dtypes.items():
            value = state.get(name)
            if value is not None and value.dtype != dtype:  # somebody cast it meanwhile
                value = value.to(dtype)
            kept = master.adopt(value, dtype)
            if kept is None:
                fresh.add(name)
            state[name] = master.zeros(dtype) if kept is None else kept
        return _Columns(self._states.moments(rule, master), dtypes, frozenset(fresh), state)

    def _columns_on_disk(self, member: Member, disk: DiskState) -> _Columns:
        states, rule, master = self._states, member.rule, member.master
        if master.other_form(member.state):
            master.master(member.state)
        states.to_disk(disk, rule, master, member.state)
        dtypes = states.dtypes(rule, master)
        fresh = frozenset(dtypes).difference(disk.holds((member.parameter, member.parameter.numel())))
        if master.master_is_stale:
            fresh |= frozenset(master.master_dtypes)
        return _Columns(states.moments(rule, master), dtypes, fresh, member.state)


def _whole(index: int, member: Member, state: Mapping[str, torch.Tensor]) -> Row:
    """The row of all elements of a parameter, in its shape."""
    master = member.master
    weight, gradient = master.exposed_dense(), master.dense(member.gradient)
    return Row(index, 0, weight.numel(), weight, gradient, state)


def _update_of(member: Member, columns: _Columns, row: Row) -> Update:
    state, names = row.state, columns.moments
    maximum = member.rule.maximum
    return Update(
        rule=member.rule,
        weight=row.weight,
        gradient=row.gradient,
        form=member.master.form,
        master=next((state[name] for name in member.master.master_dtypes), None),
        first=state[names[0]] if names else None,
        second=state[names[1]] if len(names) > 1 else None,
        maximum=None if maximum is None else state[maximum],
        first_step=not columns.fresh.isdisjoint(names),
        stream=member.index,
        place=row.start,
        begins=member.begins,
    )


def _joined(before: int | torch.Tensor, row: Row, done: Update) -> int | torch.Tensor:
    """A parameter's `kernel.checksum`, the sum of bits * (2 * place + 1), with the elements of `row` added to it."""
    if row.weight.device.type != "cpu":  # there, it is the plain sum of the bits
        return done.checksum if isinstance(before, int) else before + done.checksum
    first = int(row.weight[:1].view(torch.int16)) & 0xFFFF
    own = int(done.checksum)
    twice_the_sum = own + first - int(kernel.checksum(row.weight[1:]))
    return int(before) + own + row.start * twice_the_sum & 0xFFFFFFFF
