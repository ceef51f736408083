"""How does an optimizer step that works element by element? All parameters at once, in one pass over memory."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.memory.disk import TensorAtRest
from headrace.optim import eight_bit, kernel, update
from headrace.optim.devices import Member
from headrace.optim.disk_state import DiskState, Part, Wanted
from headrace.optim.in_files import Grains, Run, are_in_files, in_files
from headrace.optim.kernel import Master
from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Options
from headrace.optim.rules import ElementRule
from headrace.optim.update import Update
from headrace.optim.weights import Weights
from headrace.runtime.torch_rules import foreach_add

__all__ = ["ElementOptimizer"]


class ElementOptimizer(HostOptimizer):
    """Adam and its like: a subclass names its state and gives its rule."""

    MAXIMUM: str | None = None  # the running maximum of groups with amsgrad, in float32
    COUNTS_STEPS = True  # whether the stock optimizer keeps "step" in its state

    def __init__(self, params: Any, *, options: Options, **stock: Any) -> None:
        kernel.warn_if_missing()
        super().__init__(params, options=options, **stock)

    def _rule(self, group: dict[str, Any], step: float) -> ElementRule:
        """The rule of a group at one step."""
        raise NotImplementedError

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state that this group needs: the first, and the second, of ELEMENTWISE."""
        return self.ELEMENTWISE

    def _maximum_name(self, group: dict[str, Any]) -> str | None:
        return self.MAXIMUM if group.get("amsgrad") else None

    def _perform(self, members: Sequence[Member], scale: float) -> None:
        on_host = members[0].weights.host.device.type == "cpu"
        on_disk: list[Member] = []
        if on_host and not self.overlaps:
            on_disk, members = in_files(members)
        if self._disk is not None and on_host:
            if on_disk:
                self._perform_from_disk(self._disk, on_disk, scale, Grains(on_disk))
            if members:
                self._perform_from_disk(self._disk, members, scale)
            return
        rules: dict[tuple[int, float], ElementRule] = {}
        updates = []
        states = []
        members = [*on_disk, *members]
        for member in members:
            state, fresh = self._state_of(member)
            states.append(state)
            step = self._next_step(state)
            key = (id(member.group), step)
            if key not in rules:
                rules[key] = self._rule(member.group, step)
            updates.append(self._update_of(member, state, rules[key], fresh))
        if on_disk:  # first: a drive that fails at once has changed nothing
            self._perform_in_files(on_disk, updates[: len(on_disk)], scale)
        for member, item in zip(members[len(on_disk) :], updates[len(on_disk) :], strict=True):
            item.begins = member.begins
        update.perform(updates[len(on_disk) :], scale)
        for member, item, state in zip(members, updates, states, strict=True):
            member.weights.performed(item.checksum)
            member.updated = True
            self._not_finite.note(member.step, item.not_finite)
            member.state.clear()
            member.state.update(state)
        self._count_steps([member.state for member in members])

    def _perform_in_files(self, members: Sequence[Member], updates: Sequence[Update], scale: float) -> None:
        def update_of(run: Run) -> Update:
            whole, elements = updates[run.index], slice(run.start, run.stop)

            def part(state: torch.Tensor | None) -> torch.Tensor | None:
                return None if state is None else members[run.index].weights.flat(state)[elements]

            return replace(
                whole,
                weight=run.weight,
                gradient=run.gradient,
                master=part(whole.master),
                first=part(whole.first),
                second=part(whole.second),
                maximum=part(whole.maximum),
                place=whole.place + run.start,
                not_finite=False,
            )

        grains = Grains(members)
        with contextlib.closing(grains):
            for runs in grains.all():
                for run in runs:
                    members[run.index].begun = True
                parts = [update_of(run) for run in runs]
                update.perform(parts, scale)
                for run, done in zip(runs, parts, strict=True):
                    updates[run.index].not_finite |= done.not_finite
            grains.finish()
        for item, checksum in zip(updates, grains.checksums, strict=True):
            item.checksum = checksum
        are_in_files(members)

    def _update_of(self, member: Member, state: dict[str, Any], rule: ElementRule, fresh: bool) -> Update:
        weights = member.weights
        tensors = [weights.dense(state[name]) for name in self._moments(member.group, weights)]
        maximum = self._maximum_name(member.group)
        return Update(
            rule=rule,
            weight=weights.exposed_dense(),
            gradient=weights.dense(member.gradient),
            form=weights.form,
            master=weights.master(state),
            first=tensors[0] if tensors else None,
            second=tensors[1] if len(tensors) > 1 else None,
            maximum=None if maximum is None else weights.dense(state[maximum]),
            first_step=fresh,
            stream=member.index,
            place=member.offset,
        )

    def _state_of(self, member: Member) -> tuple[dict[str, Any], bool]:
        """The state of a parameter where it is updated, and whether it was made just now.

        Its entries become the parameter's when the update has been performed: nothing has changed if that fails.
        """
        state: dict[str, Any] = dict(member.state)
        weights = member.weights
        fresh = False
        self._settle(state, member.group, weights)
        for name, dtype in self._dtypes(member.group, weights).items():
            value = state.get(name)
            if value is not None and value.dtype != dtype:  # somebody cast it while it was away
                value = value.to(dtype)
            kept = weights.adopt(value, dtype)
            fresh = fresh or kept is None
            state[name] = weights.zeros(dtype) if kept is None else kept
        return state, fresh

    @property
    def _counts(self) -> bool:
        return self.COUNTS_STEPS or self._options.state_dtype != torch.float32  # its rounding differs in each step

    def _next_step(self, state: dict[str, Any]) -> float:
        """The number of the step that a parameter of this state takes now, from 1."""
        return float(state["step"]) + 1 if self._counts and "step" in state else 1.0

    def _count_steps(self, states: Sequence[dict[str, Any]]) -> None:
        """Updates were performed."""
        if not self._counts:
            return
        for state in states:
            if not isinstance(state.get("step", None), torch.Tensor):  # none yet, or a number in an old state dict
                step = float(state.get("step", 0.0))
                state["step"] = torch.tensor(step, device="cpu")
            elif state["step"].device.type != "cpu":
                state["step"] = state["step"].to("cpu")
        foreach_add([state["step"] for state in states], 1)

    def _dtypes(self, group: dict[str, Any], weights: Weights) -> dict[str, torch.dtype]:
        """The state that a parameter needs, without its master."""
        own_dtype = weights.host.dtype if weights.host.dtype == torch.float64 else torch.float32
        moments = self._options.moment_dtype if own_dtype == torch.float32 else own_dtype
        if moments == torch.uint8 and not weights.packs:
            moments = own_dtype
        dtypes = dict.fromkeys(self._moments(group, weights), moments)
        maximum = self._maximum_name(group)
        if maximum is not None:
            dtypes[maximum] = own_dtype
        return dtypes

    def _moments(self, group: dict[str, Any], weights: Weights) -> tuple[str, ...]:
        """The names under which the moments of a parameter are kept."""
        names = self._state_names(group)
        return tuple(name + eight_bit.SUFFIX for name in names) if weights.packs else names

    def _settle(self, state: dict[str, Any], group: dict[str, Any], weights: Weights) -> None:
        """Moments that were loaded, or put there by somebody, in 8 bits or not, become what is kept."""
        eight_bit.settle(state, self._state_names(group), weights.host, narrow=weights.packs)

    # state on disk ----------------------------------------------------------------------------------------------------
    def _perform_from_disk(
        self, disk: DiskState, members: Sequence[Member], scale: float, grains: Grains | None = None
    ) -> None:
        """`grains`: of their weights, where these are updated in their files."""
        wanted, rules = [], []
        for member in members:
            if member.weights.other_form(member.state):
                member.weights.master(member.state)
            self._to_disk(disk, member.parameter, member.group, member.weights, member.state)
            dtypes = {**self._dtypes(member.group, member.weights), **member.weights.master_dtypes}
            fresh = frozenset(dtypes).difference(disk.holds(member.parameter))
            if member.weights.master_is_stale:
                fresh |= frozenset(member.weights.master_dtypes)
            wanted.append(Wanted(member.parameter, member.weights.host.numel(), dtypes, fresh))
            rules.append(self._rule(member.group, self._next_step(member.state)))
        weights = [member.weights.exposed() for member in members]
        gradients = [member.weights.flat(member.gradient) for member in members]

        def runs_of(part: Part) -> Iterable[Run]:
            if grains is not None:
                return grains.runs(part.index, part.start, part.stop)
            elements = slice(part.start, part.stop)
            weight, gradient = weights[part.index][elements], gradients[part.index][elements]
            return [Run(part.index, part.start, part.stop, weight, gradient)]

        def update_of(part: Part, run: Run) -> Update:
            member = members[part.index]
            if grains is None:
                tensors = part.tensors
            else:
                elements = slice(run.start - part.start, run.stop - part.start)
                tensors = {name: tensor[elements] for name, tensor in part.tensors.items()}
            names = self._moments(member.group, member.weights)
            maximum = self._maximum_name(member.group)
            return Update(
                rule=rules[part.index],
                weight=run.weight,
                gradient=run.gradient,
                form=member.weights.form,
                master=next((tensors[name] for name in member.weights.master_dtypes), None),
                first=tensors[names[0]] if names else None,
                second=tensors[names[1]] if len(names) > 1 else None,
                maximum=None if maximum is None else tensors[maximum],
                first_step=any(name in wanted[part.index].fresh for name in names),
                stream=member.index,
                place=run.start,
            )

        def update_parts(parts: list[Part]) -> None:
            for part in parts:
                members[part.index].begun = True
            updates = [(part.index, update_of(part, run)) for part in parts for run in runs_of(part)]
            update.perform([item for _, item in updates], scale)
            for index, item in updates:
                self._not_finite.note(members[index].step, item.not_finite)
            if grains is not None:
                grains.updated()

        with contextlib.closing(grains or contextlib.ExitStack()):
            disk.stream(wanted, update_parts)
            if grains is not None:
                grains.finish()
        for index, member in enumerate(members):
            if member.weights.form is not Master.SPLIT:
                member.weights.performed(None)
            else:
                found = kernel.checksum(weights[index]) if grains is None else grains.checksums[index]
                member.weights.performed(found)
            member.updated = True
        if grains is not None:
            are_in_files(members)
        self._count_steps([member.state for member in members])

    def _to_disk(
        self, disk: DiskState, parameter: torch.Tensor, group: dict[str, Any], weights: Weights, state: dict[str, Any]
    ) -> None:
        """State that was lent, loaded or put there by somebody goes to disk; not a master of the other form.

        What somebody removed is gone there, too.
        """
        lent = self._lent.pop(parameter, {})
        if lent:
            disk.take_back(parameter)
            disk.drop(parameter, lent.keys() - state.keys())
        self._settle(state, group, weights)
        dtypes = {**self._dtypes(group, weights), **weights.master_dtypes}
        present = {name for name in dtypes if name in state}
        if any(state[name] is not lent.get(name) for name in present):
            tensors = {}
            for name, dtype in dtypes.items():
                value = state.get(name)
                adopted = None if value is None else weights.adopt(value.to(dtype), dtype)
                if adopted is not None:
                    tensors[name] = weights.flat(adopted)
            disk.keep(parameter, parameter.numel(), tensors)
        for name in present:
            del state[name]

    def _show_state(self) -> None:
        super()._show_state()
        if self._disk is None:
            return
        for parameter in self._places():
            if parameter not in self._lent and self._disk.holds(parameter):
                weights = self._weights_of(parameter)
                lent = self._disk.lend(parameter, parameter.numel())
                self._lent[parameter] = {name: weights.shaped(flat) for name, flat in lent.items()}
                self.entries[parameter].update(self._lent[parameter])

    def _at_rest(self, parameter: torch.Tensor) -> dict[str, TensorAtRest]:
        if self._disk is None or parameter in self._lent:
            return {}
        weights, found = self._weights_of(parameter), self._disk.at_rest(parameter, parameter.numel())
        return {name: replace(one, like=weights.shaped(one.like)) for name, one in found.items()}

    def fill(self, state: Mapping[torch.Tensor, Mapping[str, TensorAtRest]]) -> None:
        places = self._places()
        for parameter, tensors in state.items():
            self._fill(parameter, places[parameter][1], tensors)
        if self._disk is not None:
            self._disk.synchronize()

    def _fill(self, parameter: torch.Tensor, group: dict[str, Any], tensors: Mapping[str, TensorAtRest]) -> None:
        weights = self._weights_of(parameter)
        kept = {**self._dtypes(group, weights), **weights.master_dtypes}
        as_kept = {
            name
            for name, one in tensors.items()
            if one.like.dtype == kept.get(name) and one.like.stride() == weights.shaped(_flat_like(one)).stride()
        }
        on_disk = None if parameter.device.type != "cpu" else self._disk
        if on_disk is not None and as_kept == set(tensors):
            self.entries.setdefault(parameter, {})
            on_disk.fill(parameter, parameter.numel(), tensors)
            return
        self.entries[parameter].update({name: one.load() for name, one in tensors.items()})
        if on_disk is not None:
            self._to_disk(on_disk, parameter, group, weights, self.entries[parameter])

    def _take_loaded(self) -> None:
        super()._take_loaded()
        if self._disk is None:
            return
        for parameter, (_, group) in self._places().items():
            if parameter.device.type == "cpu" and parameter in self.entries:
                self._to_disk(self._disk, parameter, group, self._weights_of(parameter), self.entries[parameter])


def _flat_like(tensor: TensorAtRest) -> torch.Tensor:
    return torch.empty(tensor.like.numel(), dtype=tensor.like.dtype, device="meta")
