"""What do all optimizers of headrace share? State and update in host memory, and the conventions of torch.optim."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from headrace.errors import DiskError, LayoutError, StateError
from headrace.memory.disk import TensorAtRest
from headrace.optim import kernel, refusals
from headrace.optim.consolidation import OnAnotherRank
from headrace.optim.devices import Member
from headrace.optim.early import EarlyUpdates
from headrace.optim.gathered import Gathered
from headrace.optim.kernel import Master
from headrace.optim.loading import lacking_options, values_from
from headrace.optim.local_shards import LocalShards
from headrace.optim.norms import GradientNorms, clipping_of_shards
from headrace.optim.not_finite import NotFiniteSteps
from headrace.optim.on_node import OnNode, node_of
from headrace.optim.options import Options, comparable
from headrace.optim.ownership import Unscale
from headrace.optim.reduced import owners_over
from headrace.optim.rules import ElementRule, MatrixRule
from headrace.optim.states import ParamStates
from headrace.optim.updates import Updates
from headrace.optim.weights import MasterWeight
from headrace.runtime.autograd import without_overrides
from headrace.runtime.capture import before_write
from headrace.runtime.holders import gradient_is_shared
from headrace.runtime.pending import Unit, watch
from headrace.runtime.sharded import cut_of, local_shard
from headrace.runtime.tensors import parameters_of

# Attributes that copies and pickles keep, beside those that the stock optimizer keeps.
_OWN = ("_options", "_adamw", "_not_finite", "skipped_steps", "last_step_skipped", "last_grad_norm")


class HostOptimizer(Optimizer):
    """An optimizer whose state and update live in host memory, for parameters on the host or on an accelerator.

    A class of this package has it as a base before a stock optimizer of torch.optim, and adds the rule. Param groups,
    defaults, validation and the format of `state_dict` are those of the stock optimizer; the state and the step are
    ours.

    `skipped_steps` counts steps that were skipped because the norm of the gradients was not finite (with
    `max_grad_norm`); `last_step_skipped` says whether the last step was skipped, and `last_grad_norm` is the norm of
    its gradients before clipping. `not_finite_steps` counts steps that were not skipped although some gradient was not
    finite.
    """

    asks_before_write = True  # see runtime.capture
    _updates_whole = False  # whether a DTensor that is cut is updated as a whole, on one rank for all

    def __init__(self, params: Any, *stock: Any, options: Options, **named: Any) -> None:
        if not self._updates_whole:
            kernel.warn_if_missing()
        self._not_finite = NotFiniteSteps()
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.last_grad_norm: float | None = None
        self._begin_anew(options)
        super().__init__(params, *stock, **named)
        self._hold_state(self._places())
        refusals.check_device_fraction(self._places(), options.device_fraction)
        self._join_node()
        self._reserve_device_memory()

    def _begin_anew(self, options: Options, owners: Sequence[int] = ()) -> None:
        """Sets everything to the state before any parameter. `owners`: the owners of the parameters that will come."""
        self._options = options
        self._local_shards = LocalShards()
        self._owners = owners_over(options, owners)
        self._owners_before = owners
        self._states = ParamStates(options)
        self._updates = Updates(options, self._states, self._local_shards, self._not_finite)
        if options.overlap == "backward":
            self._updates.early = EarlyUpdates(self._begin_early, self._settings)
        run = self._updates.updater.run
        self._norms = None if options.max_grad_norm is None else GradientNorms(run)

    def _rule(self, group: dict[str, Any], step: float) -> ElementRule | MatrixRule:
        """The rule of a group with its current settings, for parameters whose step has this number."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim does. Raises ValueError for a parameter that is in it twice or in another group.

        Raises LayoutError for a parameter that is not plain bytes: a tensor subclass, sparse, quantised, or on meta.
        """
        refusals.check_duplicates(param_group)
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        try:
            for parameter in added:
                refusals.check_parameter(self.param_groups, parameter, local_shard(parameter))
            self._take(added)
        except (LayoutError, ValueError):
            self.param_groups.pop()
            raise

    def _take(self, added: Sequence[torch.Tensor]) -> None:
        """Adds parameters, which get owners and local shards."""
        cuts = (cut for parameter in added if (cut := cut_of(parameter)) is not None)
        first = next(cuts, None) if self._updates_whole and not self._owners.shares else None
        if first is not None:
            self._owners = Gathered(first, self._local_shards, self._owners_before)
        self._owners.take(added)
        self._local_shards.take(added)

    def _join_node(self) -> None:
        """Has the ranks of a node share the work if they share the parameters' model."""
        if isinstance(self._owners, OnNode):
            return
        common = next((found for one in self._places() if (found := node_of(one)) is not None), None)
        if common is None:
            return
        refusals.check_on_node(self._options)
        self.synchronize()
        self._owners = OnNode(common)
        self._owners.take(list(self._places()))
        for parameter in filter(self._owners.is_elsewhere, self._places()):
            self._states.drop(parameter)

    def _hold_state(self, parameters: Iterable[torch.Tensor]) -> None:
        """Has the state sleep with the parameters' model, and count in the host memory that the model shares."""
        manager = refusals.check_one_model(parameters)
        if manager is not None:
            manager.hold_state(self, self._state_bytes)

    def _state_bytes(self) -> int:
        """The bytes of host memory that the state takes while it is awake, or will take."""
        rules = {id(group): self._rule(group, 1.0) for group in self.param_groups}
        return sum(
            self._states.bytes_when_awake(rules[id(group)], parameter, self._local_shards.dtensor_of(parameter))
            for parameter, (_, group) in self._places().items()
        )

    def sleep(self, directory: str | os.PathLike[str]) -> int:
        """Called by `Offloaded.sleep(host=True)`: moves the state from host memory to files in `directory`.

        Returns the bytes that stay. The state comes back with `wake()`, with the next step, or when somebody asks for
        it. Raises DiskError, and has moved nothing then.
        """
        self.synchronize()
        self._states.sleep(directory, [self._master_of(one) for one in self._places() if self.entries.get(one)])
        return sum(map(self._states.bytes_awake_now, self._places()))

    def wake(self) -> None:
        """Brings back state that went to disk when the parameters' model went to sleep, as the next step does.

        Raises BudgetError if host memory has no room, and DiskError: the state is still on disk then.
        """
        if self._states.sleeps:
            self._hold_state(self._places())
            self._states.wake()

    def _reserve_device_memory(self) -> None:
        """With update="device", gets device memory for the updates, unless there is enough."""
        if self._options.update == "host":
            return
        whole = {id(group): isinstance(self._rule(group, 1.0), MatrixRule) for group in self.param_groups}
        self._updates.reserve_device_memory(
            {parameter: whole[id(group)] for parameter, (_, group) in self._places().items()}
        )

    # the step ---------------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls `closure` once, if given, then takes one step. Returns the closure's result.

        Parameters without a gradient are left alone. Raises RuntimeError for sparse or complex gradients, LayoutError
        for parameters that are not plain bytes any more, and ValueError for parameters of two offloaded models and for
        `overlap` with weights on an accelerator but no offloaded model. When a drive fails before anything has changed,
        raises DiskError. When it fails later, raises StateError, and so does every later step until a state has been
        loaded.
        """
        self._join_node()
        if not self._owners.shares:
            self._check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self._owners.end_closure()
        members = self._owners.agree(self._begin, self.param_groups, self._deciding)
        scale = self._clipping_factor(members)
        self.last_step_skipped = scale is None
        if scale is None:
            self.skipped_steps += 1
        elif members:
            self._updates.perform(members, scale, self._owners, self._places())
        self._owners.end_step()
        if self._updates.early is not None:
            self._updates.early.end_step(self._places())
        if self._norms is not None:
            watch(self._norms, self._places())
        self._not_finite.number += 1
        return loss

    def _check(self) -> None:
        places = self._places()
        self._hold_state(places)
        self._reserve_device_memory()
        self._updates.check_device()
        if self.overlaps:
            refusals.check_overlap(places, self._options.overlap)
        if self._updates.interruption.has_struck:
            self._updates.updater.synchronize()  # raises, once, the error of an update that was cut short beside a pass
        self._updates.interruption.check()

    def _begin(self) -> list[Member]:
        """Begins a step: the members of all parameters that have a gradient and were not updated early."""
        if self._owners.shares:  # here, because the other ranks are told what this raises
            self._check()
        early = self._updates.early
        if early is None or not early.updated:
            self.synchronize()
        if self._norms is not None:
            self._norms.wait()
        if early is not None:
            early.check()
        updated = {} if early is None else early.updated
        with without_overrides():  # does not wait: another optimizer may be updating other parameters
            present = [one for one in self._places() if self._local_shards.dtensor_of(one).grad is not None]
        return self._members({parameter: None for parameter in present if parameter not in updated})

    def _begin_early(
        self,
        unit: Unit,
        gradients: Mapping[Any, torch.Tensor],
        arrived: Callable[[], None],
        updated: dict[Any, None],
    ) -> Sequence[Any]:
        """Begins updates in backward, and adds their parameters to `updated`. After Ctrl-C, the next step raises."""
        places = self._places()
        begun = {parameter: gradient for parameter, gradient in gradients.items() if parameter in places}
        if not begun or not self._updates.has_device_memory or self._states.sleeps:
            return ()  # all belong to another optimizer, or `step` updates them
        members = self._members(begun)
        with self._updates.interruption.guard_partial_step(members, self._updates.updater.drain):
            self._updates.submit(unit, members, 1.0, self._owners, arrived)
            updated |= dict.fromkeys(begun)
        return list(begun)

    def _members(self, gradients: Mapping[Any, Any]) -> list[Member]:
        """The members for these parameters, with the gradients to update them with; None means `.grad`."""
        self._updates.updater.drain_writers(gradients)  # updates under way raise the count of steps
        self.wake()
        self._states.take_apart(self._states.entries)
        places = self._places()
        rules: dict[tuple[int, float], ElementRule | MatrixRule] = {}
        members = []
        for parameter, given in gradients.items():
            index, group = places[parameter]
            master = self._master_of(parameter)
            state = self._states.begin(parameter)
            asks = given is None and not self._local_shards and (self.overlaps or self._norms is not None)
            shared = asks and gradient_is_shared(parameter)  # before the next line holds it too
            gradient: Any = self._local_shards.gradient(parameter) if given is None else given
            refusals.check_gradient(type(self).__name__, index, parameter, gradient)
            step = float(state["step"]) + 1 if "step" in state else 1.0
            key = id(group), step
            if key not in rules:
                rules[key] = self._rule(group, step)
            members.append(
                Member(
                    index=index,
                    parameter=parameter,
                    rule=rules[key],
                    step=self._not_finite.number,
                    master=master,
                    state=state,
                    gradient=gradient,
                    shared=shared,
                )
            )
        return members

    def _places(self) -> dict[torch.Tensor, tuple[int, dict[str, Any]]]:
        """The number and the group of each parameter. The key of a DTensor is its local shard."""
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        if self._local_shards:
            pairs = ((group, self._local_shards.to_local(parameter)) for group, parameter in pairs)
        return {parameter: (index, group) for index, (group, parameter) in enumerate(pairs)}

    def _master_of(self, parameter: torch.Tensor) -> MasterWeight:
        given = self._local_shards.dtensor_of(parameter)
        if not self._local_shards.is_stand_in(parameter):
            refusals.check_parameter(self.param_groups, given, parameter)
        return self._states.master_of(parameter, given)

    def _unscale_together(self, unscale: Unscale) -> dict[torch.device, torch.Tensor]:
        """Called by GradScaler, see `runtime.grad_scaler`: `unscale` unscales gradients as one process would."""
        return self._owners.unscale(unscale, parameters_of(self))

    def _clipping_factor(self, members: Sequence[Member]) -> float | None:
        """The factor for all gradients; None: skip this step."""
        limit = self._options.max_grad_norm
        if limit is None or self._norms is None or not members:
            return 1.0
        if self._local_shards:
            of_all_ranks = [self._local_shards.dtensor_of(member.parameter).grad for member in members]
            factor, self.last_grad_norm = clipping_of_shards(limit, of_all_ranks)
            return factor
        gradients = {member.parameter: member.gradient for member in members}
        shared = {member.parameter for member in members if member.shared}
        factor, self.last_grad_norm = self._norms.clipping(limit, gradients, shared, self._owners)
        return factor

    def _settings(self) -> list[dict[str, Any]]:
        """The settings of all groups, in a form that can be compared."""
        return [comparable(group) for group in self.param_groups]

    def _deciding(self) -> dict[str, object]:
        """The settings that decide about results, which all ranks must have alike."""
        found: dict[str, object] = {"the class of optimizer": type(self).__name__}
        options = ("max_grad_norm", "master_form", "state_dtype", "overlap")
        found |= {name: getattr(self._options, name) for name in options}
        for number, group in enumerate(self._settings()):
            plain = (name for name in self.defaults if isinstance(group.get(name), float | int | str | tuple | list))
            found |= {f"param_groups[{number}][{name!r}]": group[name] for name in plain}
        return found

    @property
    def not_finite_steps(self) -> int:
        """How many steps updated weights despite NaN or infinite gradients. Waits for updates.

        Steps that `max_grad_norm` skipped do not count.
        """
        return self.count_not_finite_steps(wait=True)

    def count_not_finite_steps(self, *, wait: bool) -> int:
        """The same. Without `wait`, counts only steps whose updates are over."""
        if not wait:
            return self._not_finite.known()
        self.synchronize()
        return self._not_finite.count()

    @property
    def overlaps(self) -> bool:
        """Whether updates of an offloaded model's parameters run beside passes over it."""
        return self._updates.overlaps

    def synchronize(self) -> None:
        """Waits for updates that are under way (with `overlap`). Raises the error of one that failed."""
        self._updates.updater.synchronize()

    def refresh(self) -> None:
        """Makes the next step read all weights anew. Needed after writes that leave no trace (`p.data.copy_`)."""
        self.synchronize()
        for master in self._states.masters.values():
            master.suspect()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim. Without `set_to_none` it waits for updates that still read gradients."""
        self._join_node()
        if set_to_none:
            for parameter in parameters_of(self):
                parameter.grad = None
        else:
            self.synchronize()
            super().zero_grad(set_to_none=False)
        self._owners.discard_gradients(parameters_of(self))

    # the state --------------------------------------------------------------------------------------------------------
    @property
    def entries(self) -> defaultdict[torch.Tensor, Any]:
        """`state`, without what is on disk, and without waiting for updates that are under way."""
        return self._states.entries

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State by parameter, as in torch.optim. Waits for updates that are under way.

        With DTensor parameters, each call returns a new mapping of the same tensors: what you put into it has no
        effect.
        """
        self._join_node()
        self.synchronize()
        self.wake()
        self._states.show()
        return self._local_shards.globalize_state(self.entries) if self._local_shards else self.entries

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.synchronize()
        self.wake()
        self._states.show()  # state on disk is needed if `value` has some of it
        self._states.entries = self._local_shards.localize_state(value) if self._local_shards else value

    @property
    def state_on_disk(self) -> bool:
        """Whether state rests on disk."""
        return self._states.disk is not None

    def state_at_rest(self) -> Mapping[torch.Tensor, Mapping[str, Any]]:
        """As `state`, but what is on disk is read only when it is accessed. Waits for updates that are under way."""
        self._join_node()
        self.synchronize()
        self.wake()
        if self._owners.shares:
            state = self.state_dict()["state"]
            for entries in state.values():
                if isinstance(entries, OnAnotherRank):
                    raise StateError(repr(entries))
            return {one: state[number] for number, one in enumerate(parameters_of(self)) if number in state}
        if self._states.disk is None:
            return self.entries
        self._states.disk.synchronize()
        return {one: {**self._states.at_rest(one), **self.entries.get(one, {})} for one in parameters_of(self)}

    def master_form_of(self, parameter: torch.Tensor) -> Master:
        """How the exact value of a parameter is kept."""
        return self._master_of(parameter).form

    def state_dict(self) -> dict[str, Any]:
        """As in torch.optim. If parameters are assigned to ranks, it has the state of this rank's parameters only.

        For the others it has an empty placeholder that cannot be pickled; `consolidate_state_dict` gets their state.
        """
        found = super().state_dict()
        self._owners.with_others(found["state"], parameters_of(self))
        return found

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the state of all ranks in one rank's host memory, for its `state_dict()` until the next step.

        All ranks call this. If no parameters are assigned to ranks, it does nothing.
        """
        self._join_node()
        self._owners.consolidate(self.state, parameters_of(self), to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict()` of this optimizer or of the stock one. Moments keep their values.

        Raises ValueError when groups or shapes do not match, or an option is missing, as in what another kind of
        optimizer saved; nothing has changed then. Loading makes up for updates that a failing drive cut short: steps
        are possible again. If parameters are assigned to ranks, each rank takes the state of its own.
        """
        before, after = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        self._join_node()
        with contextlib.suppress(DiskError, StateError):
            self.synchronize()
        state_dict = state_dict.copy()
        for hook in before.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = self.param_groups
        if lacking := lacking_options(self, state_dict["param_groups"]):
            raise ValueError(
                f"the state dict has no {lacking[0]!r}, which {type(self).__name__} has: another kind of optimizer was"
                " saved; load it into one of that kind"
            )
        state_dict["state"] = self._owners.own_part(state_dict, groups)
        elementwise = [self._rule(group, 1.0).elementwise for group in groups]
        if self._local_shards:
            groups, state_dict["state"] = self._local_shards.loaded(groups, state_dict)
        self._hold_state(self._places())
        values = values_from(groups, state_dict, elementwise, self._options.moment_dtype)
        self._states.take_apart(values)
        before_write(parameters_of(self))
        self._states.reset()
        self._updates.reset()
        try:  # The stock method casts moments to the dtype of their parameter, so it gets the groups alone.
            self._optimizer_load_state_dict_pre_hooks = type(before)()
            self._optimizer_load_state_dict_post_hooks = type(after)()
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        finally:
            self._optimizer_load_state_dict_pre_hooks = before
            self._optimizer_load_state_dict_post_hooks = after
        self.__setstate__({"state": defaultdict(dict, values), "param_groups": self.param_groups})
        self._updates.interruption.forget()
        if self._updates.early is not None:
            self._updates.early.load()
        for parameter, (_, group) in self._places().items() if self._states.disk is not None else ():
            if parameter in self.entries:
                self._states.to_rest(self._rule(group, 1.0), self._master_of(parameter))
        for post_hook in after.values():
            post_hook(self)

    def fill(self, state: Mapping[torch.Tensor, Mapping[str, TensorAtRest]]) -> None:
        """Makes these tensors the parameters' state, in addition to what `load_state_dict` loaded.

        Waits until state that rests on disk is there. Raises DiskError if a drive did not take it.
        """
        places = self._places()
        for parameter, tensors in state.items():
            self._states.fill(self._rule(places[parameter][1], 1.0), self._master_of(parameter), tensors)
        if self._states.disk is not None:
            self._states.disk.synchronize()

    def kept_elsewhere(self) -> set[torch.Tensor]:
        """The parameters whose state another rank keeps."""
        self._join_node()
        return set(filter(self._owners.is_elsewhere, parameters_of(self)))

    def held_bytes(self) -> int:
        """Bytes of host memory that state, masters and copies take. The user's own tensors do not count."""
        self.synchronize()
        return self._states.held_bytes() + self._updates.held_bytes()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in _OWN if name in self.__dict__}  # only Muon has `_adamw`
        return {**super().__getstate__(), **own, "_owned_by": self._owners.map.owners}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = state.copy()
        entries = state.pop("state")
        if "_states" not in self.__dict__:  # this is a copy, or being unpickled
            self._not_finite = state["_not_finite"]
            self._begin_anew(state["_options"], state.pop("_owned_by"))
            self._take([one for group in state["param_groups"] for one in group["params"]])
            entries = self._local_shards.localize_state(entries) if self._local_shards else entries
        self._states.entries = entries
        super().__setstate__(state)
