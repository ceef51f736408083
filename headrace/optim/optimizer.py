"""What do all optimizers of headrace share? State and update in host memory, and the conventions of torch.optim."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from headrace.errors import LayoutError
from headrace.optim import refusals
from headrace.optim.at_rest import StateAtRest
from headrace.optim.dealt import Dealt
from headrace.optim.devices import Member, Twins
from headrace.optim.disk_state import DiskState
from headrace.optim.early import EarlyUpdates
from headrace.optim.interruption import Interruption
from headrace.optim.kernel import Master
from headrace.optim.local_shards import LocalShards
from headrace.optim.norms import GradientNorms, clipping_of_shards
from headrace.optim.not_finite import NotFiniteSteps
from headrace.optim.on_node import OnNode, node_of
from headrace.optim.options import Options, comparable, snapshot
from headrace.optim.overlap import Updater, by_unit
from headrace.optim.reduced import dealt_over
from headrace.optim.shares import Shares
from headrace.optim.weights import FULL, REMAINDER, Weights
from headrace.runtime.autograd import without_overrides
from headrace.runtime.capture import before_write, will_write
from headrace.runtime.holders import gradient_is_shared
from headrace.runtime.pending import Pending, Unit, watch
from headrace.runtime.sharded import local_shard

__all__ = ["HostOptimizer"]


class HostOptimizer(StateAtRest):
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
        self._local_shards = LocalShards()
        self._dealt: Dealt | None = dealt_over(options)
        self._not_finite = NotFiniteSteps()
        self.skipped_steps = 0
        self.last_step_skipped = False
        self.last_grad_norm: float | None = None
        self._forget_weights()
        self._begin_anew(options)
        super().__init__(params, **stock)
        refusals.check_one_model(self._places())
        refusals.check_device_fraction(self._places(), options.device_fraction)
        self._join_node()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch.optim does. Raises ValueError for a parameter that is in it twice, or in another.

        LayoutError for one that is not plain bytes: of a class of its own, sparse, quantised, on meta.
        """
        refusals.check_duplicates(param_group)
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        try:
            for parameter in added:
                refusals.check_parameter(self.param_groups, parameter, local_shard(parameter))
            self._deal_out(added, ())
        except (LayoutError, ValueError):
            self.param_groups.pop()
            raise
        self._local_shards.take(added)

    def _deal_out(self, added: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        if self._dealt is not None:
            self._dealt.take(added)

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
        self._join_node()
        if self._dealt is None:
            self._check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if isinstance(self._dealt, OnNode):
                self._dealt.common.agree("what its closure wrote")
        if self._dealt is None:
            members = self._begin()
        else:
            members = self._dealt.agree(self._begin, self.param_groups, self._deciding())
        scale = self._clipping_factor(members)
        self.last_step_skipped = scale is None
        if scale is None:
            self.skipped_steps += 1
        elif members:
            self._update(members, scale)
        if isinstance(self._dealt, OnNode):
            self._dealt.common.accept()
        if self._early is not None:
            self._early.end_step(self._places())
        if self._norms is not None:
            watch(self._norms, self._places())
        self._not_finite.number += 1
        return loss

    def _join_node(self) -> None:
        if isinstance(self._dealt, OnNode):
            return
        common = next((found for one in self._places() if (found := node_of(one)) is not None), None)
        if common is None:
            return
        refusals.check_on_node(self._options)
        self.synchronize()
        self._shares.join(self.entries)
        self._weights.clear()
        self._dealt = OnNode(common)
        self._deal_out(list(self._places()), ())
        for parameter in filter(self._dealt.is_elsewhere, self._places()):
            self._lent.pop(parameter, None)
            self._begin_state(parameter)
            if parameter in self.entries:
                self.entries[parameter] = {}

    def _check(self) -> None:
        places = self._places()
        refusals.check_one_model(places)
        if self.overlaps:
            refusals.check_overlap(places, self._options.overlap)
        if self._interruption.has_struck:
            self._updater.synchronize()  # which tells of it, if an update beside another pass was cut short, once
        self._interruption.check()

    def _begin(self) -> list[Member]:
        if self._dealt is not None:  # here, where the other ranks are told what it raises
            self._check()
        if self._early is None or not self._early.updated:
            self.synchronize()
        if self._early is not None:
            self._early.check()
        return self._members()

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
        self._join_node()
        if set_to_none:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            self.synchronize()
            super().zero_grad(set_to_none=False)
        if isinstance(self._dealt, OnNode):
            self._dealt.common.discard([one for group in self.param_groups for one in group["params"]])

    def _update(self, members: list[Member], scale: float) -> None:
        if self._dealt is not None and not self.overlaps:
            before_write([member.parameter for member in members])
            self._dealt.update(members, lambda mine: self._update_now(mine, scale))
            self._written(members)
            return
        if not self.overlaps:
            self._update_now(members, scale)
            return
        with self._interruption.told(members, self._updater.settle):
            units, alone = by_unit(members)
            under_way = [(self._submit(unit, travelling, scale), travelling) for unit, travelling in units]
            for pending, travelling in under_way:
                if any(member.shared for member in travelling):
                    pending.settle()
            self._update_now(alone, scale)

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
        node = self._dealt if isinstance(self._dealt, OnNode) else None
        perform_own = self._perform if node is None else partial(node.perform, self._perform)

        def perform(batch: Sequence[Member]) -> None:
            before_write([member.parameter for member in batch])
            with self._interruption.told(batch):
                perform_own(batch, scale)
            if self._early is not None:
                self._early.performed(member.parameter for member in batch)

        others = None if node is None else node.common.begin_update(unit)
        return self._updater.submit(unit, members, perform, arrived, others)

    def _begin_early(
        self,
        unit: Unit,
        gradients: Mapping[Any, torch.Tensor],
        arrived: Callable[[], None],
        updated: dict[Any, None],
    ) -> Sequence[Any]:
        """`updated` is given those whose update has begun, or Ctrl-C is told of by the next step."""
        places = self._places()
        begun = [parameter for parameter in gradients if parameter in places]
        if not begun:  # all are another optimizer's
            return begun
        self._take_apart(self.entries)
        members = [self._member(*places[parameter], parameter, gradients[parameter]) for parameter in begun]
        with self._interruption.told(members, self._updater.settle):
            self._submit(unit, members, 1.0, arrived)
            updated |= dict.fromkeys(begun)
        return begun

    def _update_now(self, members: list[Member], scale: float) -> None:
        before_write([member.parameter for member in members])
        with self._interruption.told(members):
            for device in dict.fromkeys(member.parameter.device for member in members):
                present = [member for member in members if member.parameter.device == device]
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
            for member in on_device:
                member.weights.host = member.parameter  # no piece of its memory, which it may leave
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
            [parameter for parameter in self._mine() if parameter.device == device],
            fraction,
            len(self.ELEMENTWISE) * self._options.moment_dtype.itemsize + torch.float32.itemsize,
            splits=self.SPLITS and self._disk is None,  # state on disk is that of whole parameters
        )
        return shares.divide(members, self._weights_of)

    def _written(self, members: Sequence[Member]) -> None:
        written = [member.parameter for member in members]
        torch.autograd.graph.increment_version([*written, *self._local_shards.wholes(written)])
        for member in members:
            member.weights.written()

    def _members(self) -> list[Member]:
        """The parameters that have a gradient."""
        updated = {} if self._early is None else self._early.updated
        self._take_apart(self.entries)
        members = []
        for parameter, (index, group) in self._places().items():
            with without_overrides():  # another optimizer may be updating others beside it
                if self._local_shards.given(parameter).grad is not None and parameter not in updated:
                    members.append(self._member(index, group, parameter))
        return members

    def _mine(self) -> Iterable[torch.Tensor]:
        """What is updated on this rank."""
        return (one for one in self._places() if self._dealt is None or not self._dealt.is_elsewhere(one))

    def _places(self) -> dict[torch.Tensor, tuple[int, dict[str, Any]]]:
        """The number and the group of each parameter; of a DTensor, under its local shard."""
        pairs = ((group, parameter) for group in self.param_groups for parameter in group["params"])
        if self._local_shards:
            pairs = ((group, self._local_shards.of(parameter)) for group, parameter in pairs)
        return {parameter: (index, group) for index, (group, parameter) in enumerate(pairs)}

    def _member(self, index: int, group: dict[str, Any], parameter: Any, gradient: Any = None) -> Member:
        """A parameter and the gradient to update it with; None: its own."""
        weights = self._weights_of(parameter)
        if parameter not in self.entries:
            self._begin_state(parameter)
        asks = gradient is None and not self._local_shards and (self.overlaps or self._norms is not None)
        shared = asks and gradient_is_shared(parameter)  # before this has it, too
        gradient = self._local_shards.gradient(parameter) if gradient is None else gradient
        if isinstance(self._dealt, OnNode):
            weights.host = self._dealt.place_of(parameter)  # which may have moved to disk
        refusals.check_gradient(type(self).__name__, index, parameter, gradient)
        return Member(
            index=index,
            group=group,
            parameter=parameter,
            place=parameter.detach(),
            step=self._not_finite.number,
            weights=weights,
            state=self.entries[parameter],
            gradient=gradient,
            shared=shared,
        )

    def _begin_state(self, parameter: torch.Tensor) -> None:
        """It has no state, or none any more: somebody removed it."""
        self._shares.pieces.pop(parameter, None)
        if self._disk is not None and parameter not in self._lent:
            self._disk.forget([parameter])

    def _take_apart(self, state: Mapping[Any, Any]) -> None:
        owners = {_memory(value): parameter for parameter, lent in list(self._lent.items()) for value in lent.values()}
        for parameter, entries in list(state.items()) if owners else ():
            for name, value in list(entries.items()):
                if isinstance(value, torch.Tensor) and owners.get(_memory(value), parameter) is not parameter:
                    entries[name] = value.clone()

    def _weights_of(self, parameter: torch.Tensor, side: int = 0) -> Weights:
        given = self._local_shards.given(parameter)
        if not self._local_shards.is_stand_in(parameter):
            refusals.check_parameter(self.param_groups, given, parameter)
        weights = self._weights.get((parameter, side))
        if weights is not None and not weights.fit:
            self._follow(parameter, weights)
            weights = None
        if weights is None:
            weights = self._weights[parameter, side] = Weights(
                parameter, given, self._options.master_form, eight_bits=self._options.state_dtype == "8bit"
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
        if self._local_shards:
            of_all_ranks = [self._local_shards.given(member.parameter).grad for member in members]
            factor, self.last_grad_norm = clipping_of_shards(limit, of_all_ranks)
            return factor
        gradients = {member.parameter: member.gradient for member in members}
        shared = {member.parameter for member in members if member.shared}
        factor, self.last_grad_norm = self._norms.clipping(limit, gradients, shared, self._dealt)
        return factor

    def _take_loaded(self) -> None:
        """`entries` were loaded: what was kept of the state before is void."""
        self._interruption.forget()
        if self._early is not None:
            self._early.load()

    def _begin_anew(self, options: Options) -> None:
        self._updater = Updater()
        self._interruption = Interruption()
        self._disk = DiskState(options.disk) if options.tier == "disk" else None
        early = options.overlap == "backward"
        self._early = EarlyUpdates(self._begin_early, self._settings) if early else None
        self._norms = None if options.max_grad_norm is None else GradientNorms(self._updater.run)

    def _settings(self) -> list[dict[str, Any]]:
        """The settings of all groups, to be compared."""
        return [comparable(group) for group in self.param_groups]

    def _deciding(self) -> dict[str, object]:
        """What decides about results and is not in gradients: on all ranks the same."""
        found: dict[str, object] = {"the class of optimizer": type(self).__name__}
        found |= {name: getattr(self._options, name) for name in ("max_grad_norm", "state_dtype", "overlap")}
        for number, group in enumerate(self._settings()):
            plain = (name for name in self.defaults if isinstance(group.get(name), float | int | str | tuple | list))
            found |= {f"param_groups[{number}][{name!r}]": group[name] for name in plain}
        return found

    def _forget_weights(self) -> None:
        self._weights: dict[tuple[torch.Tensor, int], Weights] = {}
        self._shares = Shares()
        self._lent: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # state on disk that `state` shows
        self._twins: dict[torch.device, Twins] = {}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
