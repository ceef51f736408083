"""What do all optimizers of millrace share? State and update in host memory, and the conventions of torch.optim."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from millrace.errors import DiskError, LayoutError, StateError
from millrace.optim import refusals
from millrace.optim.at_rest import StateAtRest
from millrace.optim.devices import Member, Twins
from millrace.optim.disk_state import DiskState
from millrace.optim.early import EarlyUpdates
from millrace.optim.interruption import Interruption
from millrace.optim.kernel import Master
from millrace.optim.loading import values_from
from millrace.optim.norms import GradientNorms
from millrace.optim.not_finite import NotFiniteSteps
from millrace.optim.options import Options, comparable, snapshot
from millrace.optim.overlap import Updater, by_unit
from millrace.optim.shares import Shares
from millrace.optim.weights import FULL, REMAINDER, Weights
from millrace.runtime.autograd import without_overrides
from millrace.runtime.capture import before_write, will_write
from millrace.runtime.holders import gradient_is_shared
from millrace.runtime.pending import Pending, Unit, watch

__all__ = ["HostOptimizer"]

# Kept by copies and pickles, beside what the stock one keeps.
_OWN = ("_options", "_not_finite", "skipped_steps", "last_step_skipped", "last_grad_norm")


class HostOptimizer(StateAtRest, Optimizer):
    """An optimizer whose state and update live in host memory, for parameters on the host or on an accelerator.

    It stands before a stock optimizer of torch.optim among the bases of a class: param groups, defaults, validation and
    the format of `state_dict` are the stock one's; the state and the step are ours.

    `skipped_steps` counts steps that were skipped because the norm of the gradients was not finite (with
    `max_grad_norm`); `last_step_skipped` says whether the last one was, and `last_grad_norm` is its norm before
    clipping. `not_finite_steps` counts steps that were not skipped although some gradient was not finite.
    """

    # Names of the state that has its parameter's shape, in the state dtype.
    ELEMENTWISE: tuple[str, ...] = ()
    SPLITS = True  # whether a tensor may be updated in two pieces
    asks_before_write = True  # as runtime.capture wants it: for each parameter, when its update begins

    def __init__(self, params: Any, *, options: Options, **stock: Any) -> None:
        self._options = options
        self._not_finite = NotFiniteSteps()
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.last_grad_norm: float | None = None
        self._forget_weights()
        self._begin_anew(options)
        super().__init__(params, **stock)
        refusals.check_one_model(self._places())
        refusals.check_device_fraction(self._places(), options.device_fraction)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim does. Raises ValueError for a parameter that is in it twice, or in another.

        LayoutError for one that is not plain bytes: a DTensor or another subclass, sparse, quantised, on meta.
        """
        refusals.check_duplicates(param_group)
        super().add_param_group(param_group)
        try:
            for parameter in self.param_groups[-1]["params"]:
                refusals.check_parameter(self.param_groups, parameter)
        except LayoutError:
            self.param_groups.pop()
            raise

    def _perform(self, members: Sequence[Member], scale: float) -> None:
        """Updates the weights of `members`, in host memory. `scale` multiplies their gradients."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. `closure`, when given, is called once before it; its result is returned.

        Parameters without a gradient are left alone. Raises RuntimeError for sparse or complex gradients, LayoutError
        for what is not plain bytes any more, ValueError for parameters of two offloaded models and for `overlap` with
        none and weights on an accelerator, DiskError when a drive failed before anything was changed, StateError
        when it did so later: then nothing goes on before a state was loaded.
        """
        places = self._places()
        refusals.check_one_model(places)
        if self.overlaps:
            refusals.check_overlap(places, self._options.overlap)
        self._interruption.check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._early is None or not self._early.updated:
            self.synchronize()
        if self._early is not None:
            self._early.check()
        members = self._members()
        scale = self._clipping_factor(members)
        self.last_step_skipped = scale is None
        if scale is None:
            self.skipped_steps += 1
        elif members:
            self._update(members, scale)
        if self._early is not None:
            self._early.end_step(self._places())
        if self._norms is not None:
            watch(self._norms, self._places())
        self._not_finite.number += 1
        return loss

    @property
    def not_finite_steps(self) -> int:
        """How many steps updated weights with gradients of which some were NaN or infinite. Waits for updates.

        Those that `max_grad_norm` skipped are not among them.
        """
        return self.count_not_finite_steps(wait=True)

    def count_not_finite_steps(self, *, wait: bool) -> int:
        """The same; without `wait` of those steps whose updates are over."""
        if not wait:
            return self._not_finite.known()
        self.synchronize()
        return self._not_finite.count()

    @property
    def overlaps(self) -> bool:
        """Whether updates of an offloaded model's parameters run beside passes over it."""
        return self._options.overlap != "none"

    def synchronize(self) -> None:
        """The host waits for updates that are under way (with `overlap`). Raises what failed in one."""
        self._updater.synchronize()

    def refresh(self) -> None:
        """The next step reads all weights anew: after writes that leave no trace in them (`p.data.copy_`)."""
        self.synchronize()
        for weights in self._weights.values():
            weights.suspect()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim has it. Without `set_to_none` it waits for updates that are under way and read gradients."""
        if not set_to_none:
            self.synchronize()
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _update(self, members: list[Member], scale: float) -> None:
        if self.overlaps:
            units, members = by_unit(members)
            under_way = [(self._submit(unit, travelling, scale), travelling) for unit, travelling in units]
            for pending, travelling in under_way:
                if any(member.shared for member in travelling):
                    pending.settle()
        if members:
            self._update_now(members, scale)

    def _submit(
        self, unit: Unit, members: Sequence[Member], scale: float, arrived: Callable[[], None] | None = None
    ) -> Pending:
        """Begins the update of parameters of a unit, with the settings that their groups have now."""
        groups = {id(member.group): member.group for member in members}
        snapshots = {key: snapshot(group) for key, group in groups.items()}
        for member in members:
            member.group = snapshots[id(member.group)]
        will_write([member.parameter for member in members])
        self._written(members)

        def perform(batch: Sequence[Member]) -> None:
            before_write([member.parameter for member in batch])
            self._perform(batch, scale)
            if self._early is not None:
                self._early.performed(member.parameter for member in batch)

        return self._updater.submit(unit, members, perform, arrived)

    def _begin_early(
        self, unit: Unit, gradients: Mapping[Any, torch.Tensor], arrived: Callable[[], None]
    ) -> Sequence[Any]:
        places = self._places()
        begun = [parameter for parameter in gradients if parameter in places]
        if not begun:  # all are another optimizer's
            return begun
        members = [self._member(*places[parameter], parameter, gradients[parameter]) for parameter in begun]
        self._submit(unit, members, 1.0, arrived)
        return begun

    def _update_now(self, members: list[Member], scale: float) -> None:
        before_write([member.parameter for member in members])
        places: dict[torch.device, list[Member]] = defaultdict(list)
        for member in members:
            places[member.parameter.device].append(member)
        for device, present in places.items():
            if device.type == "cpu":
                self._perform(present, scale)
                self._written(present)
            else:
                self._update_beside(device, present, scale)

    def _update_beside(self, device: torch.device, members: list[Member], scale: float) -> None:
        """Parameters on an accelerator: what is updated there runs beside the transfers of what is updated here."""
        on_host, on_device = self._divided(device, members)
        if on_device:
            self._perform(on_device, scale)
        if on_host:
            if device not in self._twins:
                self._twins[device] = Twins(device, pin=self._options.pin, overlap=self._options.overlap_d2h_h2d)
            self._twins[device].update(on_host, lambda batch: self._perform(batch, scale))
        self._written([*on_host, *on_device])

    def _divided(self, device: torch.device, members: list[Member]) -> tuple[list[Member], list[Member]]:
        fraction = self._options.device_fraction
        if fraction == 0:
            return members, []
        shares = self._shares
        shares.assign(
            [parameter for parameter in self._places() if parameter.device == device],
            fraction,
            len(self.ELEMENTWISE) * self._options.moment_dtype.itemsize + torch.float32.itemsize,
            splits=self.SPLITS and self._disk is None,  # state on disk is that of whole parameters
        )
        return shares.divide(members, self._weights_of)

    def _written(self, members: Sequence[Member]) -> None:
        torch.autograd.graph.increment_version([member.parameter for member in members])
        for member in members:
            member.weights.written()

    def _members(self) -> list[Member]:
        """The parameters that have a gradient."""
        updated = {} if self._early is None else self._early.updated
        members = []
        for parameter, (index, group) in self._places().items():
            with without_overrides():  # another optimizer may be updating others beside it
                if parameter.grad is not None and parameter not in updated:
                    members.append(self._member(index, group, parameter))
        return members

    def _places(self) -> dict[torch.Tensor, tuple[int, dict[str, Any]]]:
        """The number and the group of each parameter."""
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        return {parameter: (index, group) for index, (group, parameter) in enumerate(pairs)}

    def _member(self, index: int, group: dict[str, Any], parameter: Any, gradient: Any = None) -> Member:
        """A parameter and the gradient to update it with; None: its own."""
        weights = self._weights_of(parameter)
        refusals.check_gradient(type(self).__name__, index, parameter, parameter.grad if gradient is None else gradient)
        asks = gradient is None and (self.overlaps or self._norms is not None)
        shared = asks and gradient_is_shared(parameter)  # before this has it, too
        return Member(
            index=index,
            group=group,
            parameter=parameter,
            place=parameter.detach(),
            step=self._not_finite.number,
            weights=weights,
            state=self.entries[parameter],
            gradient=parameter.grad if gradient is None else gradient,
            shared=shared,
        )

    def _weights_of(self, parameter: torch.Tensor, side: int = 0) -> Weights:
        refusals.check_parameter(self.param_groups, parameter)
        weights = self._weights.get((parameter, side))
        if weights is not None and not weights.fit:
            self._follow(parameter, weights)
            weights = None
        if weights is None:
            weights = self._weights[parameter, side] = Weights(
                parameter, self._options.master_form, eight_bits=self._options.state_dtype == "8bit"
            )
        weights.look()
        return weights

    def master_form_of(self, parameter: torch.Tensor) -> Master:
        """How the exact value of a parameter is kept."""
        return self._weights_of(parameter).form

    def _follow(self, parameter: torch.Tensor, before: Weights) -> None:
        """A parameter was given another dtype, device or layout, as `model.to()` does: its state follows."""
        before.check_layout(keeps_order=self._disk is not None or parameter in self._shares.pieces)
        for key in [key for key in self._weights if key[0] is parameter]:
            del self._weights[key]
        self._show_state()
        state = self.entries[parameter]
        if before.dtype != parameter.dtype:
            for name in (REMAINDER, FULL):
                state.pop(name, None)
        # Copies: what is only shown here rests in the form that the parameter had.
        state.update({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)})

    def _clipping_factor(self, members: Sequence[Member]) -> float | None:
        """The factor for all gradients; None: skip this step."""
        limit = self._options.max_grad_norm
        if limit is None or self._norms is None or not members:
            return 1.0
        gradients = {member.parameter: member.gradient for member in members}
        factor, self.last_grad_norm = self._norms.clipping(
            limit, gradients, {member.parameter for member in members if member.shared}
        )
        return factor

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State by parameter, as torch.optim has it. Waits for updates that are under way."""
        self.synchronize()
        self._show_state()
        return self.entries

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.__dict__["state"] = value

    def _show_state(self) -> None:
        """`entries` become the whole state, wherever parts of it live."""
        self._shares.join(self.entries)

    def _take_loaded(self) -> None:
        """`entries` were loaded: what was kept of the state before is void."""
        self._interruption.forget()
        if self._early is not None:
            self._early.load()

    # state -----------------------------------------------------------------------------------------------------------
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict()` of this or of the stock optimizer returned. Moments keep their values.

        Raises ValueError when groups or shapes do not match; nothing has changed then. Updates that a drive cut short
        are no error any more: loading is what makes up for them.
        """
        before, after = self._optimizer_load_state_dict_pre_hooks, self._optimizer_load_state_dict_post_hooks
        with contextlib.suppress(DiskError, StateError):
            self.synchronize()
        state_dict = state_dict.copy()
        for hook in before.values():
            state_dict = hook(self, state_dict) or state_dict
        values = values_from(self.param_groups, state_dict, self.ELEMENTWISE, self._options.moment_dtype)
        before_write(list(self._places()))
        self._forget_weights()
        if self._disk is not None:
            self._disk = self._disk.emptied()
        try:  # The stock method casts moments to the dtype of their parameter, so it gets the groups alone.
            self._optimizer_load_state_dict_pre_hooks = type(before)()
            self._optimizer_load_state_dict_post_hooks = type(after)()
            super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        finally:
            self._optimizer_load_state_dict_pre_hooks = before
            self._optimizer_load_state_dict_post_hooks = after
        self.__setstate__({"state": defaultdict(dict, values), "param_groups": self.param_groups})
        self._take_loaded()
        for post_hook in after.values():
            post_hook(self)

    def held_bytes(self) -> int:
        """Bytes of host memory that state, masters and copies take; the user's own tensors do not count."""
        self.synchronize()
        states = [*self.entries.values(), *(on_host for on_host, _ in self._shares.pieces.values())]
        values = [value for entries in states for value in entries.values() if isinstance(value, torch.Tensor)]
        held = sum(value.nbytes for value in values if value.device.type == "cpu")
        held += 0 if self._disk is None else self._disk.host_bytes
        return held + sum(twins.held_bytes() for twins in self._twins.values())

    def _begin_anew(self, options: Options) -> None:
        """Nothing is under way."""
        self._updater = Updater()
        self._interruption = Interruption()
        self._disk = DiskState(options.disk) if options.tier == "disk" else None
        early = options.overlap == "backward"
        self._early = EarlyUpdates(self._begin_early, self._settings) if early else None
        self._norms = None if options.max_grad_norm is None else GradientNorms(self._updater.run)

    def _settings(self) -> list[dict[str, Any]]:
        """The settings of all groups, to be compared."""
        return [comparable(group) for group in self.param_groups]

    def _forget_weights(self) -> None:
        self._weights: dict[tuple[torch.Tensor, int], Weights] = {}
        self._shares = Shares()
        self._lent: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # state on disk that `state` shows
        self._twins: dict[torch.device, Twins] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in _OWN}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_weights" not in self.__dict__:  # of a copy or an unpickled optimizer
            self._forget_weights()
            self._begin_anew(state["_options"])
        super().__setstate__(state)
