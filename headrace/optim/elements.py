"""How do elementwise rules update? Rows of all parameters at once, in one pass over memory.

A row is a run of one parameter's elements. Its columns are weight, gradient, master and moments. Each column is in host
memory, on an accelerator, or in a file from which a part at a time is in memory. All rows are updated in the same way.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.optim import kernel, update
from headrace.optim.devices import Member
from headrace.optim.disk_state import DiskState, Part, Wanted
from headrace.optim.in_files import Grains, in_files, mark_written_in_place
from headrace.optim.kernel import Master
from headrace.optim.not_finite import NotFiniteSteps
from headrace.optim.on_device import DeviceUpdates
from headrace.optim.states import ParamStates
from headrace.optim.update import Update, part_of
from headrace.runtime.torch_rules import foreach_add


@dataclass
class _State:
    """The part of a member's state that takes part in its update."""

    member: Member
    columns: dict[str, str]  # by the name of each tensor: which column of an `Update` it is
    wanted: Wanted
    entries: dict[str, Any]  # if not on disk; becomes the parameter's state after the update


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
        lock_for = None if device is None else device.device
        if disk is not None and lock_for is not None:
            disk.lock_for(lock_for)
        states = {
            id(one): self._in_memory(one, lock_for) if disk is None else self._on_disk(one, disk) for one in members
        }
        run = update.perform if device is None else device.perform
        # Those in files are first: a drive that fails at once has changed nothing.
        for batch, from_files in ((in_their_files, True), (others, False)):
            if batch:
                theirs = [states[id(one)] for one in batch]
                self._perform(theirs, disk, lambda rows: run(rows, scale), from_files=from_files)
        self._count_steps([member.state for member in members if self._counts(member)])

    def _perform(
        self,
        states: Sequence[_State],
        disk: DiskState | None,
        perform_all: Callable[[Sequence[Update]], None],
        *,
        from_files: bool,
    ) -> None:
        wholes = [_whole(state, in_memory=disk is None) for state in states]
        by_stream = {whole.stream: (state.member, whole) for state, whole in zip(states, wholes, strict=True)}

        def perform(rows: Sequence[Update]) -> None:
            perform_all(rows)
            for row in rows:
                member, whole = by_stream[row.stream]
                self._not_finite.note(member.step, row.not_finite)
                if row.form is Master.SPLIT and row is not whole:
                    whole.checksum = _joined(whole, row)

        with contextlib.ExitStack() as stack:
            grains = stack.enter_context(contextlib.closing(Grains(wholes))) if from_files else None

            def perform_parts(parts: list[Part]) -> None:
                rows = []
                for part in parts:
                    state, elements = states[part.index], (part.start, part.stop)
                    whole = wholes[part.index]
                    weights = [whole.part(*elements)] if grains is None else grains.parts(part.index, *elements)
                    rows += [_with_state(one, part, state.columns) for one in weights]
                perform(rows)
                if grains is not None:
                    grains.performed()

            if disk is not None:
                wanted = [state.wanted for state in states]
                if from_files:
                    weights = [whole.weight.itemsize for whole in wholes]
                    wanted = [replace(one, weight_bytes=size) for one, size in zip(wanted, weights, strict=True)]
                disk.stream(wanted, perform_parts)
            else:
                for rows in [wholes] if grains is None else grains.all():
                    perform(rows)
            if grains is not None:
                grains.finish()
            for state, whole in zip(states, wholes, strict=True):
                member = state.member
                member.master.performed(whole.checksum)
                member.updated = True
                if disk is None:
                    member.state.clear()
                    member.state.update(state.entries)
            if grains is not None:
                mark_written_in_place([state.member for state in states])

    def _counts(self, member: Member) -> bool:
        return self._always_counts or member.rule.counts_steps or member.master.form is Master.NONE

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

    def _in_memory(self, member: Member, lock_for: torch.device | None) -> _State:
        """A parameter's state in a copy of its dict, so that the dict's values are unchanged if the update fails.

        `lock_for`: the device for which its memory is page-locked. Values that needed no conversion are moved to that
        memory in the dict itself, too, so that dict and copy share it.
        """
        entries: dict[str, Any] = dict(member.state)
        rule, master = member.rule, member.master
        self._states.normalize(entries, rule, master)
        dtypes, fresh = self._states.dtypes(rule, master), set()
        master.master(entries)
        for name, dtype in dtypes.items():
            value = entries.get(name)
            if value is not None and value.dtype != dtype:  # somebody cast it meanwhile
                value = value.to(dtype)
            kept = master.adopt(value, dtype)
            if kept is None:
                fresh.add(name)
            entries[name] = master.zeros(dtype) if kept is None else kept
        if lock_for is not None:
            self._states.in_locked_memory(entries, dtypes, lock_for)
            same = {name for name in dtypes.keys() - fresh if dtypes[name] == _dtype(member.state.get(name))}
            member.state.update({name: entries[name] for name in same})
        return self._state(member, dtypes, frozenset(fresh), entries)

    def _on_disk(self, member: Member, disk: DiskState) -> _State:
        rule, master = member.rule, member.master
        if master.other_form(member.state):
            master.master(member.state)
        self._states.to_disk(disk, rule, master, member.state)
        dtypes = self._states.dtypes(rule, master)
        fresh = frozenset(dtypes).difference(disk.holds((member.parameter, member.parameter.numel())))
        if master.master_is_stale:
            fresh |= frozenset(master.master_dtypes)
        return self._state(member, dtypes, fresh, member.state)

    def _state(
        self, member: Member, dtypes: dict[str, torch.dtype], fresh: frozenset[str], entries: dict[str, Any]
    ) -> _State:
        elements = member.parameter.numel()
        moments, maximum = ("first", "second")[: len(member.rule.moments)], ("maximum",) * bool(member.rule.maximum)
        columns = dict(zip(dtypes, (*moments, *maximum, "master"), strict=False))
        return _State(member, columns, Wanted((member.parameter, elements), elements, dtypes, fresh), entries)


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _whole(state: _State, *, in_memory: bool) -> Update:
    """The row of all elements of a parameter, in its shape; with its state, if that is in memory."""
    member = state.member
    return Update(
        rule=member.rule,
        weight=member.master.exposed_dense(),
        gradient=member.master.dense(member.gradient),
        form=member.master.form,
        first_step=any(state.columns[name] in ("first", "second") for name in state.wanted.fresh),
        stream=member.index,
        offset=member.master.offset,
        begins=member.begins,
        **{column: state.entries[name] for name, column in state.columns.items() if in_memory},
    )


def _with_state(weights: Update, part: Part, columns: dict[str, str]) -> Update:
    """The row with its columns of state, of which `part` has those and maybe more elements."""
    start = weights.place - part.start
    stop = start + weights.weight.numel()
    state: dict[str, Any] = {columns[name]: part_of(one, start, stop) for name, one in part.tensors.items()}
    return replace(weights, **state)


def _joined(whole: Update, row: Update) -> int | torch.Tensor:
    """The `kernel.checksum` of `whole`, the sum of bits * (2 * place + 1), with the elements of `row` added to it."""
    if not row.place:
        return row.checksum
    if row.weight.device.type != "cpu":  # there, it is the plain sum of the bits
        return whole.checksum + row.checksum
    first = int(row.weight[:1].view(torch.int16)) & 0xFFFF
    own = int(row.checksum)
    twice_the_sum = own + first - int(kernel.checksum(row.weight[1:]))
    return int(whole.checksum) + own + row.place * twice_the_sum & 0xFFFFFFFF
